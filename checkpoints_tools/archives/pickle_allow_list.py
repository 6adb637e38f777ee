"""Safe unpickler with an allow-list: reads torch's checkpoint pickles without importing or running code.

``load_pickle(data)`` returns the object. A pickle may name any function of any module, to be called. Here a
name becomes a constant (``torch.bfloat16`` is "BF16"), a builtin container, or a ``PickledObject`` with the
call's arguments. Any other name raises CheckpointError.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, cast

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

# Only builtins whose attributes a pickle cannot change, so no file can affect the next one.
_CONTAINERS: dict[str, Any] = {
    "torch.Size": tuple,
    "builtins.set": set,
    "__builtin__.set": set,
    "collections.OrderedDict": OrderedDict,
}
_CONSTANTS: dict[str, Any] = {
    **_CONTAINERS,
    **{f"torch.{kind}": name for dtype, storage, name, _ in _TYPES for kind in (dtype, storage)},
}
_SCALARS = (str, bytes, int, float, type(None))
MOST_PICKLE_BYTES = 1 << 28
"""Largest pickle in bytes: reading one takes up to a hundred times its size in memory."""
_MOST_CLASSES = 10_000
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

_FORBIDDEN_OPCODES = (
    pickle.INST + pickle.OBJ + pickle.NEWOBJ_EX + pickle.PERSID + pickle.EXT1 + pickle.EXT2 + pickle.EXT4
    # Reserves as much memory as the file asks for, whatever the file's length.
    + pickle.BYTEARRAY8 + pickle.NEXT_BUFFER + pickle.READONLY_BUFFER
)  # fmt: skip


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


def _is_key(value: Any) -> bool:
    """Whether ``value`` may be a key of a dictionary or set. Nested tuples may not: a few bytes can describe
    one whose hash takes forever or overflows the interpreter's stack."""
    if isinstance(value, tuple):
        return all(isinstance(part, _SCALARS) for part in value)
    return isinstance(value, (*_SCALARS, PickledObject))


_ORDINARY: dict[int, Callable[[Any], None]] = cast(Any, pickle._Unpickler).dispatch
_KEYS_ON_STACK = {
    pickle.SETITEM: slice(-2, -1),
    pickle.SETITEMS: slice(None, None, 2),
    pickle.DICT: slice(None, None, 2),
    pickle.ADDITEMS: slice(None),
    pickle.FROZENSET: slice(None),
}
"""Positions of the keys among an instruction's values on the stack."""


def _with_checked_keys(code: bytes, keys: slice) -> Callable[[Any], None]:
    """Return the instruction ``code``, preceded by a check of its keys."""

    def run(unpickler: Any) -> None:
        _check_keys(unpickler.stack[keys])
        _ORDINARY[code[0]](unpickler)

    return run


def _check_keys(keys: Iterable[Any]) -> None:
    for key in keys:
        if not _is_key(key):
            raise pickle.UnpicklingError(f"a {type(key).__name__} as a key")


# Python's own unpickler, not C's: with the latter a few bytes can reserve gigabytes (its memo is an array as
# long as the largest index), and here instructions can be left out.
class _Unpickler(pickle._Unpickler):
    """Python's unpickler without instructions that run code; limits copied items and checks keys."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: method for code, method in _ORDINARY.items() if code not in _FORBIDDEN_OPCODES
    }
    stack: list[Any]

    def __init__(self, data: bytes, source: str, persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._source = source
        self._persistent = persistent
        self._classes: dict[str, type[PickledObject]] = {}
        self._copies_left = len(data)

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
            if len(self._classes) == _MOST_CLASSES:
                raise CheckpointError(f"{self._source} names more than {_MOST_CLASSES:,} classes: damaged")
            # One class per file: a pickle may set attributes of a class.
            self._classes[full] = type(
                "PickledObject", (PickledObject,), {"class_name": full, "__slots__": ()}
            )
        return self._classes[full]

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise CheckpointError(f"{self._source} refers to data outside itself")
        return self._persistent(pid)

    def _copy(self, items: int) -> None:
        """Count copied items, at most as many as the file has bytes."""
        self._copies_left -= items
        if self._copies_left < 0:
            raise pickle.UnpicklingError("it copies more than it holds")

    def _construct(self) -> None:
        """REDUCE and NEWOBJ: build a record or a small container. Container calls are limited: each copies
        its items, and a few bytes of the pickle suffice for a call."""
        arguments = self.stack.pop()
        kind = self.stack[-1]
        if isinstance(kind, type) and issubclass(kind, PickledObject) and type(arguments) is tuple:
            self._copy(len(arguments))
            self.stack[-1] = kind(*arguments)
            return
        if kind not in _CONTAINERS.values() or type(arguments) is not tuple or len(arguments) > 1:
            raise pickle.UnpicklingError("it calls what is not a class")
        [items] = arguments or ((),)
        if not isinstance(items, list | tuple | set):
            raise pickle.UnpicklingError("it fills a container with what is not a list")
        self._copy(len(items))
        if kind is OrderedDict:
            items = [self._pair(pair) for pair in items]
        elif kind is set:
            _check_keys(items)
        self.stack[-1] = kind(items)

    def _pair(self, pair: Any) -> tuple[Any, Any]:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise pickle.UnpicklingError("an item of a dictionary is not a pair")
        _check_keys(pair[:1])
        return pair[0], pair[1]

    def _build(self) -> None:
        """BUILD: set attributes of a record, or of torch's dictionary, whose ``_metadata`` is one."""
        state = self.stack.pop()
        owner = self.stack[-1]
        if isinstance(owner, PickledObject):
            owner.state = state
        elif type(owner) is not OrderedDict or not isinstance(state, dict):
            raise pickle.UnpicklingError("it sets attributes of what has none")

    dispatch |= {
        pickle.REDUCE[0]: _construct,
        pickle.NEWOBJ[0]: _construct,
        pickle.BUILD[0]: _build,
        **{code[0]: _with_checked_keys(code, keys) for code, keys in _KEYS_ON_STACK.items()},
    }
