"""Writer of large sparse ``torch.save`` archives for tests: the bytes around many tensors.

A legacy rank's file passes the 4 GB of a plain zip file, so positions beyond are in the 64-bit extension.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from checkpoints_tools.archives.pickle_writer import dumps
from checkpoints_tools.archives.torch_archive import ALIGNMENT

_MOST = 0xFFFFFFFF
_UTF8, _DATE = 0x800, 0x21  # names are UTF-8; the first day that a zip file knows
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")


@dataclass
class StateArchive:
    """A planned archive: what surrounds the tensors' bytes, and where these are."""

    payloads: list[int] = field(default_factory=list)
    """Byte of the file at which each tensor's elements begin."""
    around: list[tuple[int, bytes]] = field(default_factory=list)
    """Position and content of everything but the tensors."""
    nbytes: int = 0
    """Bytes of the whole file."""


def state_archive(value: Any, payloads: Sequence[int]) -> StateArchive:
    """A file of ``torch.save`` for ``value``, as ``pickle_writer.py`` has it.

    Its tensors name the entries ``data/0``, ``data/1`` and so on, whose bytes ``payloads`` counts.
    """
    archive = StateArchive()
    central = bytearray()
    count = 0
    for name, data, nbytes in _entries(value, payloads):
        header = _header(name, data, nbytes, archive.nbytes)
        central += _central(name, data, nbytes, archive.nbytes)
        count += 1
        archive.around.append((archive.nbytes, header + (data or b"")))
        if data is None:
            archive.payloads.append(archive.nbytes + len(header))
        archive.nbytes += len(header) + nbytes
    end = central + _end(count, len(central), archive.nbytes)
    archive.around.append((archive.nbytes, bytes(end)))
    archive.nbytes += len(end)
    return archive


def _entries(value: Any, payloads: Sequence[int]) -> Iterator[tuple[str, bytes | None, int]]:
    for name, data in (("data.pkl", dumps(value)), ("byteorder", b"little"), ("version", b"3\n")):
        yield f"archive/{name}", data, len(data)
    for number, nbytes in enumerate(payloads):
        yield f"archive/data/{number}", None, nbytes


def _header(name: str, data: bytes | None, nbytes: int, position: int) -> bytes:
    """The zip header before an entry's bytes; padded so that a tensor's bytes are aligned."""
    encoded = name.encode()
    extra = b""
    if data is None:
        padding = -(position + _LOCAL.size + len(encoded) + 4) % ALIGNMENT
        extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    crc = zlib.crc32(data or b"")  # torch checks none; that of a tensor is left zero
    fixed = _LOCAL.pack(
        b"PK\3\4", 0, _UTF8, 0, 0, _DATE, crc, nbytes, nbytes, len(encoded), len(extra)
    )  # fmt: skip
    return fixed + encoded + extra


def _central(name: str, data: bytes | None, nbytes: int, position: int) -> bytes:
    """The directory's record of an entry."""
    encoded = name.encode()
    far = position >= _MOST
    extra = struct.pack("<2HQ", 1, 8, position) if far else b""
    crc = zlib.crc32(data or b"")
    needed = 45 if far else 0  # of the version of the format
    fixed = _CENTRAL.pack(
        b"PK\1\2", needed, needed, _UTF8, 0, 0, _DATE, crc, nbytes, nbytes, len(encoded), len(extra),
        0, 0, 0, 0, min(position, _MOST),
    )  # fmt: skip
    return fixed + encoded + extra


def _end(count: int, nbytes: int, position: int) -> bytes:
    """The end of the directory, which begins at ``position``; with its 64-bit form in front."""
    record = _END_64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, nbytes, position)
    locator = _LOCATOR_64.pack(b"PK\6\7", 0, position + nbytes, 1)
    few = min(count, 0xFFFF)
    return record + locator + _END.pack(b"PK\5\6", 0, 0, few, few, nbytes, min(position, _MOST), 0)
