"""Streams of named weights: validation, and the safetensors writer of the disk sync, for several processes.

``checked_weights`` validates a stream of (name, tensor) while yielding it; ``write_shards`` writes a stream,
or one writer's share of it, to files and returns their contents. A safetensors file
(https://github.com/huggingface/safetensors) is an eight-byte length of a JSON header, the header, which may
end in spaces, then the tensors' bytes without gaps. The header contains each tensor's offset, so it is
written last, into reserved space. (Exports are written by ``checkpoint/export.py``.) Suffix ``_B``: bytes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_BYTES = 2**25
CHUNKS = 12
"""Maximum number of buffers: 384 MiB, more than any tensor of a 32B model except the two embeddings."""

_SHARD_BYTES = 2**30
_HEADER_BYTES = 2**18
_MOST_TENSORS = 1000
"""Maximum tensors per file: the header has room for that many entries with names of up to 128 characters."""

SAFETENSORS_TYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


class WrittenShard(NamedTuple):
    """Content of a complete weight file: its bytes, and the names of its tensors."""

    nbytes: int
    tensors: tuple[str, ...]


def checked_weights(
    weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a stream's ``weights``, validated, without second names of tied tensors, which are optional.

    ``aliases``: from a second name to the tensor's own. Raises ValueError for a tensor that is unknown,
    duplicate, misshapen, different from its tied tensor, or (at the end) missing.
    """
    seen: set[str] = set()
    tied: dict[str, Tensor] = {}
    for name, tensor in weights:
        own = aliases.get(name, name)
        if own not in shapes:
            raise ValueError(f"the model has no weight {name}")
        if name in seen:
            raise ValueError(f"weight {name} was given twice")
        if tuple(tensor.shape) != shapes[own]:
            raise ValueError(
                f"weight {name} has shape {list(tensor.shape)}; the model's is {list(shapes[own])}"
            )
        seen.add(name)
        if own in aliases.values():
            if own not in tied:
                tied[own] = tensor.detach().clone()
            if not torch.equal(tied[own], tensor):
                raise ValueError(
                    f"weight {name} differs from what the model ties it to: {own} and its other names"
                )
        if name == own:
            yield name, tensor
    if missing := sorted(shapes.keys() - seen):
        raise ValueError(f"{len(missing)} weights are missing: {', '.join(missing[:5])}")


def write_shards(
    weights: Iterable[tuple[str, Tensor]], folder: Path, writer: int = 0, writers: int = 1
) -> dict[str, WrittenShard]:
    """Write ``weights``, or one writer's share, to files of about 1 GiB; return their contents.

    The files are ``model-00000.safetensors`` onwards; a writer's have the numbers ``writer`` modulo
    ``writers``. The index, which covers all writers' files, is not written. A thread writes while the
    iterator continues. Raises ValueError for an unsupported dtype.
    """
    files = _Files(folder, writer, writers)
    with BackgroundCopy(files) as copy:
        for name, tensor in weights_of_writer(weights, writer, writers):
            if tensor.dtype not in SAFETENSORS_TYPES:
                known = ", ".join(SAFETENSORS_TYPES.values())
                raise ValueError(f"weight {name} is of {tensor.dtype}; model weights are {known}")
            copy.add(name, tensor)
    return files.written


def weights_of_writer(
    weights: Iterable[tuple[str, Tensor]], writer: int, writers: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield one writer's tensors: each tensor goes to the writer with the fewest bytes so far. All writers
    see the same weights, so each tensor has one writer. Their bytes differ by at most the largest tensor."""
    shares = [0] * writers
    for name, tensor in weights:
        owner = shares.index(min(shares))
        shares[owner] += tensor.nbytes
        if owner == writer:
            yield name, tensor


class _Files:
    """Safetensors files of one writer, filled one after the other: per tensor ``begin``, then any number of
    ``append``; at the end ``close``, or ``abandon`` after an error. Called by ``BackgroundCopy``'s thread."""

    def __init__(self, folder: Path, writer: int, writers: int) -> None:
        self.written: dict[str, WrittenShard] = {}
        """The complete files by name."""
        self._folder, self._number, self._step = folder, writer, writers
        self._shard: _Shard | None = None

    def begin(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Begin a tensor in the current file or the next one; its bytes follow."""
        if self._shard is None or not self._shard.has_room(dtype):
            self.close()
            self._shard = _Shard(self._folder / f"model-{self._number:05d}.safetensors")
            self._number += self._step
        self._shard.begin(name, dtype, shape)

    def append(self, bytes_B: Tensor) -> None:
        assert self._shard is not None
        self._shard.append(bytes_B)

    def close(self) -> None:
        """Complete the current file."""
        shard, self._shard = self._shard, None
        if shard is not None:
            self.written[shard.path.name] = shard.close()

    def abandon(self) -> None:
        """Leave the current file without a header: no loader accepts it."""
        shard, self._shard = self._shard, None
        if shard is not None:
            shard.abandon()


class _Shard:
    """One safetensors file during writing: its header in memory, its tensors' bytes on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        self._file.seek(8 + _HEADER_BYTES)
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._end = 0

    def has_room(self, dtype: torch.dtype) -> bool:
        """Whether the file is below its size limit and the tensor would be aligned: loaders memory-map it."""
        is_small = self._end < _SHARD_BYTES and len(self._header) <= _MOST_TENSORS
        return is_small and self._end % dtype.itemsize == 0

    def begin(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Add a tensor to the header; its bytes follow."""
        end = self._end + torch.Size(shape).numel() * dtype.itemsize
        self._header[name] = {
            "dtype": SAFETENSORS_TYPES[dtype],
            "shape": list(shape),
            "data_offsets": [self._end, end],
        }
        self._end = end

    def append(self, bytes_B: Tensor) -> None:
        self._file.write(bytes_B.numpy().data)

    def close(self) -> WrittenShard:
        """Write the header, close the file and return its content."""
        header = json.dumps(self._header).encode().ljust(_HEADER_BYTES)
        with self._file:
            if len(header) > _HEADER_BYTES:
                raise ValueError(f"{self._file.name}: the names of its tensors are too long for the header")
            self._file.seek(0)
            self._file.write(_HEADER_BYTES.to_bytes(8, "little") + header)
        tensors = tuple(name for name in self._header if name != "__metadata__")
        return WrittenShard(8 + _HEADER_BYTES + self._end, tensors)

    def abandon(self) -> None:
        self._file.close()


class _Chunk:
    """Staging buffer for bytes of a tensor on their way to a file: ``fill`` begins the copy, ``bytes_B``
    waits for it."""

    def __init__(self, pinned: bool) -> None:
        self._memory_B = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned)
        self._held = 0
        self._copied: torch.cuda.Event | None = None

    def fill(self, bytes_B: Tensor) -> None:
        """Begin the copy. Later work on the source's stream may overwrite the source."""
        self._held = len(bytes_B)
        self._memory_B[: self._held].copy_(bytes_B, non_blocking=True)
        if bytes_B.is_cuda:
            self._copied = torch.cuda.current_stream(bytes_B.device).record_event()

    def bytes_B(self) -> Tensor:
        """Wait for the copy; return its bytes."""
        if self._copied is not None:
            torch.cuda.set_device(self._copied.device)  # a thread begins on GPU 0: avoid a context there
            self._copied.synchronize()
        return self._memory_B[: self._held]


_Job = tuple[str, torch.dtype, tuple[int, ...]] | _Chunk | None
"""A job of the thread: the begin of a tensor, some of its bytes, or the end."""


class BackgroundCopy:
    """Context manager: a thread copies tensors to files (``sink``). ``add`` queues a tensor; on exit all are
    written.

    Uses at most 384 MiB of buffers. A copy from a GPU into pinned memory overlaps with the caller's kernels,
    at bus speed; into pageable memory it would block the caller, at a fraction of it. An error in the block
    aborts the copy. The next ``add``, or the exit, raises an error of the sink.
    """

    def __init__(self, sink: _Files) -> None:
        self._sink = sink
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._free: SimpleQueue[_Chunk] = SimpleQueue()
        self._made = 0
        self._error: BaseException | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights-copy", daemon=True)

    def __enter__(self) -> BackgroundCopy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._stopped.set()
        self._jobs.put(None)
        self._thread.join()
        if error is None and self._error is not None:
            raise self._error

    def add(self, name: str, tensor: Tensor) -> None:
        """Queue a tensor, which may then change (on a GPU in the current stream). Waits for a free buffer."""
        self._jobs.put((name, tensor.dtype, tuple(tensor.shape)))
        bytes_B = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for piece_B in bytes_B.split(CHUNK_BYTES):
            chunk = self._take(piece_B.is_cuda)
            chunk.fill(piece_B)
            self._jobs.put(chunk)
        if self._error is not None:
            raise self._error

    def _take(self, pinned: bool) -> _Chunk:
        if self._free.empty() and self._made < CHUNKS:
            self._made += 1
            return _Chunk(pinned)
        return self._free.get()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._error is None and not self._stopped.is_set():
                self._attempt(job)
            if isinstance(job, _Chunk):
                self._free.put(job)
        try:
            if self._error is None and not self._stopped.is_set():
                self._sink.close()
            else:
                self._sink.abandon()
        except BaseException as error:
            self._error = self._error or error

    def _attempt(self, job: _Job) -> None:
        try:
            if isinstance(job, _Chunk):
                self._sink.append(job.bytes_B())
            elif job is not None:
                self._sink.begin(*job)
        except BaseException as error:
            self._error = error
