"""Bitwise comparison of two checkpoints' tensors, in any two formats, in bands of rows.

``compare_tensors`` yields a report per tensor. It reads in threads, which have two band buffers each.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bapo_megatron.hf.blocks import ITEM_BYTES, BlockTensor
from checkpoints_tools.core.copying import (
    BUFFER_BYTES,
    OpenFiles,
    RowBand,
    from_fp8,
    move_rows,
    row_bands,
)
from checkpoints_tools.core.fp8 import as_float32


@dataclass(frozen=True)
class Difference:
    """First difference of one tensor between two checkpoints: its kind (missing, type, shape or value), and a
    message with both sides."""

    tensor: str
    kind: str
    message: str


@dataclass(frozen=True)
class TensorReport:
    """Result of comparing one tensor: name, first ``Difference`` or None, on request both digests."""

    name: str
    difference: Difference | None
    digests: tuple[str, str] | None
    """SHA-256 of the elements in index order, in the first and the second; only on request."""


def compare_tensors(
    here: Mapping[str, BlockTensor],
    there: Mapping[str, BlockTensor],
    threads: int,
    digests: bool = False,
    done: Callable[[int], None] = lambda nbytes: None,
) -> Iterator[TensorReport]:
    """Yield a report for every tensor of either checkpoint, in the order of ``here``. A NaN equals itself if
    its bits do. Without ``digests`` a tensor is read up to its first difference. ``done`` receives, from any
    thread, the number of bytes compared. Raises CheckpointError if a file ends early."""
    names = [*here, *(name for name in there if name not in here)]
    with OpenFiles() as files, ThreadPoolExecutor(threads) as pool:

        def report(name: str) -> TensorReport:
            if (difference := _structure(name, here.get(name), there.get(name))) is not None:
                return TensorReport(name, difference, None)
            return _compare(here[name], there[name], files, digests, done)

        yield from pool.map(report, names)


def tensor_difference(here: BlockTensor, there: BlockTensor) -> str | None:
    """Return the difference of two tensors in type, shape or an element, as text; None if they are equal."""
    if (difference := _structure(here.name, here, there)) is None:
        with OpenFiles() as files:
            difference = _compare(here, there, files, False, lambda nbytes: None).difference
    return difference.message if difference is not None else None


def _structure(name: str, here: BlockTensor | None, there: BlockTensor | None) -> Difference | None:
    """Return a tensor's difference in presence, type or shape, without reading elements."""
    if here is None or there is None:
        return Difference(name, "missing", f"is missing in {'the first' if here is None else 'the second'}")
    if (ours := here.weight_type) != (theirs := there.weight_type):
        return Difference(name, "type", f"is of type {ours} in the first, {theirs} in the second")
    if here.shape != there.shape:
        message = f"has shape {list(here.shape)} in the first, {list(there.shape)} in the second"
        return Difference(name, "shape", message)
    return None


def _compare(
    here: BlockTensor, there: BlockTensor, files: OpenFiles, digests: bool, done: Callable[[int], None]
) -> TensorReport:
    difference = None
    first_hash = second_hash = hashlib.sha256()  # a single one until the tensors differ
    left, right = bytearray(BUFFER_BYTES), bytearray(BUFFER_BYTES)
    for band in row_bands(here, there):
        nbytes, other = band.rows * band.read_row, band.rows * band.written_row
        if len(left) < max(nbytes, other):
            left, right = bytearray(max(nbytes, other)), bytearray(max(nbytes, other))
        first, second = memoryview(left)[:nbytes], memoryview(right)[:other]
        for block in band.read:
            move_rows(os.preadv, files.reading(block.file), block, band, first, here.dtype)
        for block in band.written:
            move_rows(os.preadv, files.reading(block.file), block, band, second, there.dtype)
        if here.scales is not None:
            first = from_fp8(band, here.scales, files, first)
        if there.scales is not None:
            second = from_fp8(band, there.scales, files, second)
        # As bytes: memoryviews are compared by element, many times slower.
        equal = bytes(first) == bytes(second)
        if not equal and difference is None:
            difference = Difference(here.name, "value", _element(band, here.weight_type, first, second))
            second_hash = first_hash.copy()
        done(nbytes)
        if digests:
            first_hash.update(first)
            if second_hash is not first_hash:
                second_hash.update(second)
        elif difference is not None:
            break
    hashes = (first_hash.hexdigest(), second_hash.hexdigest()) if digests else None
    return TensorReport(here.name, difference, hashes)


def _element(band: RowBand, dtype: str, first: memoryview, second: memoryview) -> str:
    """Return row, column and both values of the first differing element."""
    item = ITEM_BYTES[dtype]
    pairs = enumerate(zip(first, second, strict=True))
    element = next(at for at, (here, there) in pairs if here != there) // item
    row, column = band.row + element // band.columns, element % band.columns
    bits = [data[element * item : (element + 1) * item] for data in (first, second)]
    values = [f"{as_float32(raw, dtype)[0]:.9g} (0x{raw[::-1].hex()})" for raw in bits]
    place = f"row {row}, column {column}" if band.columns > 1 else f"element {row}"
    return f"differs first at {place}: {values[0]} in the first, {values[1]} in the second"
