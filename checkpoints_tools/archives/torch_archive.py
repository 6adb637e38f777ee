"""Writer of ``torch.save``'s zip archives without torch: of one tensor, or of an object without tensors.

``tensor_archive`` returns the bytes before and after a tensor's elements, which the caller copies in between;
``object_archive`` returns a whole archive. For torch_dist files, which hold many archives end to end.

torch does not check the entries' checksums. The tensor's stays zero: computing it would pass every byte
through the processor once more.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from bapo_megatron.hf.blocks import ITEM_BYTES

ALIGNMENT = 64  # of a tensor's first byte, as in torch
_STORAGES = {"BF16": "BFloat16Storage", "F16": "HalfStorage", "F32": "FloatStorage"}
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_UTF8, _DATE = 0x800, 0x21  # names are UTF-8; the first day that a zip file knows
_PAYLOAD = "archive/data/0"


# --- pickles: `Name`, `Call`, `Instance` and `Persistent` stand for what the pickle module would import ---


@dataclass(frozen=True, slots=True)
class Name:
    """Reference to the class, function or constant ``name`` of ``module``, for ``dumps`` to write."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """Call of ``function`` with ``arguments``, for ``dumps`` to write; made when the pickle is read."""

    function: Name
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """Object of a class with a state, for ``dumps`` to write; read without ``__init__``. Can be a dict
    key."""

    kind: Name
    state: Mapping[str, Any] | tuple[Any, ...] | None
    """Its attributes by name, or the argument of its ``__setstate__``; None for neither."""


@dataclass(frozen=True, slots=True)
class Persistent:
    """Persistent identifier, as of torch's storages, for ``dumps`` to write; resolved when it is read."""

    key: tuple[Any, ...]


def dumps(value: Any) -> bytes:
    """Return ``value`` as a pickle of protocol 2, which all torch readers accept. Raises TypeError for
    anything but plain values and the objects above."""
    out = io.BytesIO()
    pickler = _Pickler(out, protocol=2)
    pickler.fast = True  # without references to earlier values
    pickler.dump(value)
    return out.getvalue()


class _Pickler(pickle._Pickler):
    """Python's pickler, which also writes the objects above."""

    def persistent_id(self, obj: Any) -> Any:
        return obj.key if isinstance(obj, Persistent) else None

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in self.dispatch:
            return NotImplemented
        raise TypeError(f"{type(obj)} is not written to pickles here")

    def _name(self: Any, name: Name) -> None:
        self.write(pickle.GLOBAL + f"{name.module}\n{name.name}\n".encode())

    def _call(self: Any, call: Call) -> None:
        self.save(call.function)
        self.save(call.arguments)
        self.write(pickle.REDUCE)

    def _instance(self: Any, instance: Instance) -> None:
        self.save(instance.kind)
        self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        if instance.state is not None:
            self.save(instance.state)
            self.write(pickle.BUILD)

    dispatch: ClassVar[dict[type, Any]] = pickle._Pickler.dispatch | {
        Name: _name,
        Call: _call,
        Instance: _instance,
    }


# --- archives ---


@dataclass(frozen=True, slots=True)
class TensorArchive:
    """Planned archive of one tensor: the bytes before and after its elements, and their length."""

    before: bytes
    payload: int
    """Bytes of the tensor."""
    after: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole archive."""
        return len(self.before) + self.payload + len(self.after)


def tensor_archive(dtype: str, shape: Sequence[int], position: int) -> TensorArchive:
    """Return a contiguous tensor's archive for byte ``position`` of a file; aligns its first element."""
    elements = prod(shape)
    strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    storage = Persistent(("storage", Name("torch", _STORAGES[dtype]), "0", "cpu", elements))
    empty = Call(Name("collections", "OrderedDict"), ())
    rebuild = Name("torch._utils", "_rebuild_tensor_v2")
    tensor = Call(rebuild, (storage, 0, tuple(shape), strides, False, empty))
    return _archive(dumps(tensor), elements * ITEM_BYTES[dtype], position)


def object_archive(value: Any) -> bytes:
    """Return ``torch.save``'s bytes of an object without tensors; ``value`` as in ``dumps``."""
    archive = _archive(dumps(value), None, 0)
    return archive.before + archive.after


def _archive(pickled: bytes, payload: int | None, position: int) -> TensorArchive:
    out, central = bytearray(), bytearray()
    before = b""
    entries = {"archive/data.pkl": pickled, "archive/byteorder": b"little"}
    for name, data in entries.items():
        _add(out, central, len(out), name, data)
    if payload is not None:
        unaligned = position + len(out) + _LOCAL.size + len(_PAYLOAD) + 4
        padding = -unaligned % ALIGNMENT
        extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
        _add(out, central, len(out), _PAYLOAD, None, payload, extra)
        before = bytes(out)
        out.clear()
    start = len(before) + (payload or 0)
    _add(out, central, start + len(out), "archive/version", b"3\n")
    count = len(entries) + (payload is not None) + 1
    end = _END.pack(b"PK\5\6", 0, 0, count, count, len(central), start + len(out), 0)
    return TensorArchive(before, payload or 0, bytes(out + central) + end)


def _add(
    out: bytearray,
    central: bytearray,
    position: int,
    name: str,
    data: bytes | None,
    nbytes: int = 0,
    extra: bytes = b"",
) -> None:
    """Append an entry's header, and its data if given, to the archive and its central directory."""
    encoded = name.encode()
    crc, size = (0, nbytes) if data is None else (zlib.crc32(data), len(data))
    out += _LOCAL.pack(b"PK\3\4", 0, _UTF8, 0, 0, _DATE, crc, size, size, len(encoded), len(extra))
    out += encoded + extra + (data or b"")
    central += _CENTRAL.pack(
        b"PK\1\2", 0, 0, _UTF8, 0, 0, _DATE, crc, size, size, len(encoded), 0, 0, 0, 0, 0, position
    )  # fmt: skip
    central += encoded
