"""Safe unpickler with an allow-list: reads torch's checkpoint pickles without importing or running code.

``load_pickle(data)`` returns the object. A pickle may name any function of any module, to be called. Here a
name becomes a constant (``torch.bfloat16`` is "BF16"), a builtin container, or a ``PickledObject`` with the
call's arguments. Any other name raises CheckpointError. A harmful file may still take memory and time.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

from bapo_megatron.errors import CheckpointError
from bapo_megatron.runtime.files import COPY_AGAIN

_TYPES = (
    ("bfloat16", "BFloat16Storage", "BF16", 2),
    ("float16", "HalfStorage", "F16", 2),
    ("float32", "FloatStorage", "F32", 4),
    ("float64", "DoubleStorage", "F64", 8),
    ("int64", "LongStorage", "I64", 8),
    ("int32", "IntStorage", "I32", 4),
    ("int16", "ShortStorage", "I16", 2),
    ("int8", "CharStorage", "I8", 1),
    ("uint8", "ByteStorage", "U8", 1),
    ("bool", "BoolStorage", "BOOL", 1),
)
"""Torch's name of each data type and of its storage, safetensors' name, bytes of an element."""

DTYPES = {torch_name: name for torch_name, _, name, _ in _TYPES}
"""safetensors' name of each torch data type."""

DTYPE_BYTES = {name: nbytes for _, _, name, nbytes in _TYPES}
"""Bytes of an element, by safetensors' type name."""


class _Dictionary(dict[Any, Any]):
    """Stand-in for OrderedDict without its attributes: torch's state dictionaries have ``_metadata``."""

    def __setstate__(self, state: Any) -> None:
        pass


_CONSTANTS: dict[str, Any] = {
    "torch.Size": tuple,
    "builtins.set": set,
    "__builtin__.set": set,
    "collections.OrderedDict": _Dictionary,
    **{f"torch.{kind}": name for dtype, storage, name, _ in _TYPES for kind in (dtype, storage)},
}
MOST_PICKLE_BYTES = 1 << 28
"""Largest pickle in bytes: reading one takes up to a hundred times its size in memory."""
_MOST_SHOWN = 200
_DCP = "torch.distributed.checkpoint"
_RECORDS = {
    *(f"{_DCP}.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *(f"{_DCP}.metadata.{kind}StorageMetadata" for kind in ("Tensor", "Bytes", "Chunk")),
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING",
    *(f"{_DCP}.filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")),
    *(f"{_DCP}.planner.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    "torch.serialization._get_layout",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
    "torch.device",
    "argparse.Namespace",
    "_io.BytesIO",
    "_codecs.encode",
    "pathlib.PosixPath",
    "signal.Signals",
    *(f"numpy.{name}" for name in ("ndarray", "dtype")),
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
}
# Megatron stores its arguments, with many kinds of settings, beside the weights.
_RECORD_MODULES = ("megatron.", "transformer_engine.")


class PickledObject:
    """Stand-in for a pickled object: its class's name, arguments and state; none of its code runs."""

    __slots__ = ("arguments", "state")
    class_name = ""
    """Module and name of the class, as in the pickle."""

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> PickledObject:
        """Store the arguments of the class or function."""
        record = object.__new__(cls)
        record.arguments = arguments
        record.state = None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str) -> Any:
        """Return the object's attribute ``name``, None if it has none."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def load_pickle(data: bytes, source: str, persistent: Callable[[Any], Any] | None = None) -> Any:
    """Return the object in ``data``: builtin values, safetensors' names of data types, and ``PickledObject``.
    ``persistent`` turns a persistent identifier (torch's storages) into an object. Raises CheckpointError,
    naming ``source``, for a damaged pickle or a class that no checkpoint needs."""
    if len(data) > MOST_PICKLE_BYTES:
        raise CheckpointError(f"{source}: a pickle of {len(data):,} bytes is too long to be a description")
    try:
        return _Unpickler(data, source, persistent).load()
    except CheckpointError:
        raise
    except Exception as error:
        # A damaged pickle can fail in any way: one message for all.
        why = (
            "it ends too early"
            if isinstance(error, EOFError)
            else f"{type(error).__name__}: {shown(str(error))}"
        )
        raise CheckpointError(f"{source}: damaged pickle ({why}); {COPY_AGAIN}") from None


def shown(text: str) -> str:
    """Return a file's text for a message: cut, without line breaks or terminal codes."""
    cut = text[:_MOST_SHOWN] + ("..." if len(text) > _MOST_SHOWN else "")
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in cut)


# Python's own unpickler, not C's: with the latter a few bytes can reserve gigabytes (its memo is an array as
# long as the largest index).
class _Unpickler(pickle._Unpickler):
    """Python's unpickler, for which ``find_class`` names nothing that runs code."""

    def __init__(self, data: bytes, source: str, persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._source = source
        self._persistent = persistent
        self._classes: dict[str, type[PickledObject]] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        full = f"{module}.{name}"
        if full in _CONSTANTS:
            return _CONSTANTS[full]
        if full not in _RECORDS and not module.startswith(_RECORD_MODULES):
            raise CheckpointError(
                f"{self._source} names {shown(full)}, which no checkpoint needs; nothing was run. "
                "Do not load this file with torch unless you trust who made it"
            )
        if full not in self._classes:
            self._classes[full] = type(
                "PickledObject", (PickledObject,), {"class_name": full, "__slots__": ()}
            )
        return self._classes[full]

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise CheckpointError(f"{self._source} refers to data outside itself")
        return self._persistent(pid)
