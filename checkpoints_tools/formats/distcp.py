"""Reader of torch_dist files: ``.metadata``, the common state, and the byte ranges of each tensor's chunks.

``read_metadata`` returns a ``Metadata``: objects and global tensors by key, each tensor with its chunks
(rectangular parts), each chunk with the byte range of its torch.save archive in a ``.distcp`` file.
``read_common`` returns the common state, from ``common.pt``, or from megatron-core 0.19 on one of the
objects. ``ChunkFiles`` locates a chunk's elements. Executes no pickle. Damaged files raise CheckpointError.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from bapo_megatron.errors import CheckpointError
from bapo_megatron.runtime.files import COPY_AGAIN, file_inside, read_file_inside
from checkpoints_tools.archives.pickle_allow_list import MOST_PICKLE_BYTES, PickledObject, load_pickle, shown
from checkpoints_tools.archives.torch_zip import StoredTensor, is_shape, read_archive, read_tensor

METADATA = ".metadata"
COMMON_FILE = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
"""Key of the common state when stored as an object, a list with it as only item."""
_BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
METADATA_JSON = {
    COMMON_FILE: {**_BACKEND, "common_backend": "torch", "common_backend_version": 1},
    COMMON_OBJECT: _BACKEND,
}
"""Content of ``metadata.json``, the format's backends, by the common state's location."""
_LONGEST_KEY = 1000
_LONGEST_JSON = 1 << 16
_DCP = "torch.distributed.checkpoint.metadata."


@dataclass(frozen=True, slots=True)
class Place:
    """Location of one archive in a torch_dist checkpoint: file, first byte, length in bytes."""

    file: Path
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """Stored chunk of a global tensor: a rectangle (first index and size in each dimension), and the location
    of the archive with its elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclass(frozen=True)
class GlobalTensor:
    """Tensor of a torch_dist checkpoint: key, dtype by safetensors' name, global shape, stored chunks."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[TensorChunk, ...]


@dataclass(frozen=True)
class Metadata:
    """Content of a torch_dist checkpoint by key: global tensors, and the locations of other objects."""

    tensors: dict[str, GlobalTensor]
    objects: dict[str, Place]


def read_metadata(folder: Path) -> Metadata:
    """Return the content of ``folder/.metadata``. Raises CheckpointError if it is damaged, or if a file in it
    is missing or too short."""
    path = file_inside(folder, METADATA)
    try:
        data = read_file_inside(folder, METADATA, MOST_PICKLE_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    metadata = load_pickle(data, str(path))
    if not isinstance(metadata, PickledObject) or metadata.class_name != _DCP + "Metadata":
        raise CheckpointError(f"{path} describes no checkpoint of torch.distributed")
    try:
        return _read_tables(metadata, _Ranges(folder, path, metadata.field("storage_data")))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: its tables are damaged ({error})") from None


def _read_tables(metadata: PickledObject, ranges: _Ranges) -> Metadata:
    tensors, objects = {}, {}
    for key, entry in metadata.field("state_dict_metadata").items():
        if not key.isprintable() or len(key) > _LONGEST_KEY:
            raise ValueError("a key")
        if entry.class_name == _DCP + "BytesStorageMetadata":
            objects[key] = ranges.find(key, None)
        else:
            tensors[key] = _tensor(key, entry, ranges)
    return Metadata(tensors, objects)


def check_backends(folder: Path) -> None:
    """Check that ``metadata.json`` names the backends of torch_dist; megatron chooses its readers by it.
    Raises CheckpointError if it is missing, damaged, or names others."""
    path = file_inside(folder, "metadata.json")
    try:
        stored = json.loads(read_file_inside(folder, path.name, _LONGEST_JSON))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if stored not in METADATA_JSON.values():
        known = " or ".join(map(str, METADATA_JSON.values()))
        raise CheckpointError(f"{path} names other backends than those of torch_dist: {known}")


@dataclass(frozen=True)
class Common:
    """Common state of a torch_dist checkpoint (iteration, arguments, optimizer settings), and its place."""

    place: Place
    layout: str
    """COMMON_FILE or COMMON_OBJECT."""
    content: dict[str, Any]


def read_common(folder: Path, metadata: Metadata) -> Common:
    """Return the common state of the checkpoint in ``folder``, preferably from ``common.pt``."""
    path, layout = file_inside(folder, COMMON_FILE), COMMON_FILE
    try:
        place = Place(path, 0, path.stat().st_size)
    except FileNotFoundError:
        if COMMON_OBJECT not in metadata.objects:
            raise CheckpointError(f"{path} is missing: the checkpoint is incomplete") from None
        place, layout = metadata.objects[COMMON_OBJECT], COMMON_OBJECT
    with place.file.open("rb") as stream:
        state = read_archive(stream, place.file, "the common state", place.start, place.length)
    if layout == COMMON_OBJECT and isinstance(state, list) and len(state) == 1:
        [state] = state
    if not isinstance(state, dict):
        raise CheckpointError(f"{place.file}: the common state is not a dictionary: it is damaged")
    return Common(place, layout, state)


class ChunkFiles:
    """Reader of archives: ``locate`` returns where a chunk's elements are in a file, without reading them;
    ``read`` returns a small archive's bytes. A context manager that opens each file once."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._streams: dict[Path, BinaryIO] = {}

    def __enter__(self) -> ChunkFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def locate(self, tensor: GlobalTensor, chunk: TensorChunk) -> StoredTensor:
        """Return the place of a chunk's elements, row after row, checked against its metadata."""
        place = chunk.place
        name = f"{tensor.key} at {list(chunk.offsets)}"
        stored = read_tensor(self._stream(place.file), place.file, name, place.start, place.length)
        if not stored.contiguous:
            raise CheckpointError(
                f"{place.file}: {name} is not contiguous, which no writer of torch_dist leaves"
            )
        if (stored.shape, stored.dtype) != (chunk.sizes, tensor.dtype):
            raise CheckpointError(
                f"{place.file}: {name} has shape {list(stored.shape)} and type {stored.dtype}; "
                f"{METADATA} says {list(chunk.sizes)} and {tensor.dtype}"
            )
        return stored

    def read(self, place: Place) -> bytes:
        """Return the bytes of a small archive without tensors; its classes are on the allow-list."""
        stream = self._stream(place.file)
        read_archive(stream, place.file, "an object", place.start, place.length)
        stream.seek(place.start)
        return stream.read(place.length)

    def _stream(self, file: Path) -> BinaryIO:
        if file not in self._streams:
            self._streams[file] = self._stack.enter_context(file.open("rb"))
        return self._streams[file]


class _Ranges:
    """Index of a checkpoint's archives: ``find`` returns the ``Place`` of a key and a chunk's offset."""

    def __init__(self, folder: Path, source: Path, storage: Any) -> None:
        self.source = source
        self._folder = folder
        self._sizes: dict[str, int] = {}
        self._of: dict[tuple[str, tuple[int, ...] | None], PickledObject] = {}
        for index, info in storage.items():
            key, offset = index.field("fqn"), index.field("offset")
            if not isinstance(key, str) or not (offset is None or is_shape(offset)):
                raise ValueError("a key of the table of files")
            self._of[key, offset] = info

    def find(self, key: str, offsets: tuple[int, ...] | None) -> Place:
        info = self._of.get((key, offsets))
        if info is None:
            at = "" if offsets is None else f" at {list(offsets)}"
            raise CheckpointError(f"{self.source} does not say which file holds {key}{at}")
        name, start, length = (info.field(field) for field in ("relative_path", "offset", "length"))
        if not (isinstance(name, str) and is_shape((start, length))):
            raise CheckpointError(f"{self.source}: the place of {shown(key)} is damaged")
        if name not in self._sizes and Path(name).name != name:
            raise CheckpointError(
                f"{self.source}: {key} lies in {shown(name)!r}, which is not a file of the checkpoint"
            )
        if start + length > self._size(name, key):
            raise CheckpointError(
                f"{self._folder / name} is truncated: it has {self._size(name, key)} bytes, and {key} should "
                f"lie at bytes {start} to {start + length}; {COPY_AGAIN}"
            )
        return Place(self._folder / name, start, length)

    def _size(self, name: str, key: str) -> int:
        if name not in self._sizes:
            try:
                self._sizes[name] = file_inside(self._folder, name).stat().st_size
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    f"{self._folder / name}, which holds {key}, cannot be read ({error}); {COPY_AGAIN}"
                ) from None
        return self._sizes[name]


def _tensor(key: str, entry: PickledObject, ranges: _Ranges) -> GlobalTensor:
    shape, dtype = entry.field("size"), entry.field("properties").state[0]
    if not is_shape(shape) or not isinstance(dtype, str):
        raise ValueError(f"tensor {key}")
    chunks = tuple(_chunk(key, shape, record, ranges) for record in entry.field("chunks"))
    return GlobalTensor(key, dtype, shape, chunks)


def _chunk(key: str, shape: tuple[int, ...], record: Any, ranges: _Ranges) -> TensorChunk:
    offsets, sizes = record.field("offsets"), record.field("sizes")
    if not (is_shape(offsets) and is_shape(sizes) and len(offsets) == len(sizes) == len(shape)):
        raise ValueError(f"a chunk of {key}")
    if any(offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)):
        raise CheckpointError(
            f"{ranges.source}: the chunk of {key} at {list(offsets)}, of shape {list(sizes)}, lies outside "
            f"of {list(shape)}"
        )
    return TensorChunk(offsets, sizes, ranges.find(key, offsets))
