"""Pickle writer that refers to torch's classes without importing torch.

The pickle module imports the classes that it writes. Here ``Name``, ``Call``, ``Instance`` and ``Persistent``
stand for them; plain values are written as they are, and TypeError is raised for any other. For the writers
of archives and of ``.metadata``. Used by ``torch_archive.py``, ``torch_dist_metadata.py`` and
``checkpoints_tools/resharding.py``.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Name:
    """A reference to the class, function or constant ``name`` of ``module``."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call of ``function`` with ``arguments``, made by the reader of the pickle."""

    function: Name
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An object of a class, made without its ``__init__``; may be the key of a dictionary."""

    kind: Name
    state: Mapping[str, Any] | tuple[Any, ...] | None
    """Its attributes by name, or what its ``__setstate__`` takes; None for neither."""


@dataclass(frozen=True, slots=True)
class Persistent:
    """A persistent identifier, which the reader of the pickle resolves; torch's storages are some."""

    key: tuple[Any, ...]


def dumps(value: Any) -> bytes:
    """``value`` as a pickle of protocol 2, which all of torch's readers accept."""
    out = bytearray(pickle.PROTO + b"\x02")
    _write(out, value)
    return bytes(out + pickle.STOP)


def _write(out: bytearray, value: Any) -> None:
    match value:
        case None:
            out += pickle.NONE
        case bool():
            out += pickle.NEWTRUE if value else pickle.NEWFALSE
        case int():
            _write_int(out, value)
        case float():
            out += pickle.BINFLOAT + struct.pack(">d", value)
        case str():
            text = value.encode()
            out += pickle.BINUNICODE + struct.pack("<I", len(text)) + text
        case Name(module, name):
            out += pickle.GLOBAL + f"{module}\n{name}\n".encode()
        case Call(function, arguments):
            _write(out, function)
            _write(out, arguments)
            out += pickle.REDUCE
        case Instance(kind, state):
            _write(out, kind)
            out += pickle.EMPTY_TUPLE + pickle.NEWOBJ
            if state is not None:
                _write(out, state)
                out += pickle.BUILD
        case Persistent(key):
            _write(out, key)
            out += pickle.BINPERSID
        case tuple():
            _write_items(out, pickle.MARK, value, pickle.TUPLE)
        case list():
            _write_items(out, pickle.EMPTY_LIST + pickle.MARK, value, pickle.APPENDS)
        case Mapping():
            pairs = [part for pair in value.items() for part in pair]
            _write_items(out, pickle.EMPTY_DICT + pickle.MARK, pairs, pickle.SETITEMS)
        case _:
            raise TypeError(f"{type(value)} is not written to pickles here")


def _write_items(out: bytearray, begin: bytes, items: Sequence[Any], end: bytes) -> None:
    out += begin
    for item in items:
        _write(out, item)
    out += end


def _write_int(out: bytearray, value: int) -> None:
    if 0 <= value < 256:
        out += pickle.BININT1 + bytes([value])
    elif -(2**31) <= value < 2**31:
        out += pickle.BININT + struct.pack("<i", value)
    else:
        out += pickle.LONG1 + b"\x08" + struct.pack("<q", value)
