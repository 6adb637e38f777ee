"""Tensor copy from one checkpoint's blocks into another's (``copy_tensors``), in bounded memory.

Tensors are copied in bands: as many whole rows as fit into a buffer without crossing a block edge. Source
blocks are read into the buffer and written from it to destination blocks. So each byte is read and written
once, however the two are cut. Each thread has one buffer, of at least a row, and a few times that during a
cast. fp8 weights are read as bfloat16; they are written by 128 x 128 blocks, with their scales (``fp8.py``).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.blocks import ITEM_BYTES, Block, BlockTensor
from bapo_megatron.hf.fp8 import BLOCK, FP8
from checkpoints_tools.core.fp8 import as_float32, dequantized, quantized

_NAN = 0x7FC0  # torch's kernels turn every NaN into 0x7FC0 or 0xFFFF, depending on the machine


def to_bfloat16(data: memoryview, dtype: str) -> memoryview:
    """Return the values of ``data``, of type F32 or F16, as BF16: to nearest, ties to even, NaN to 0x7FC0."""
    if dtype == "F16":
        with np.errstate(invalid="ignore"):
            bits = np.frombuffer(data, np.float16).astype(np.float32).view(np.uint32)
    else:
        bits = np.frombuffer(data, np.uint32)
    nearest = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, np.uint32(_NAN), nearest).astype(np.uint16).data.cast("B")


BUFFER_BYTES = 1 << 20
_WRITE_BEHIND_BYTES = 32 << 20
_VECTORS = 1024  # per readv or writev: Linux' IOV_MAX


def copy_tensors(
    source: Mapping[str, BlockTensor],
    destination: Mapping[str, BlockTensor],
    threads: int,
    moved: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Copy the source's tensors into the destination's blocks, casting to BF16 or fp8 where types differ.
    ``moved`` receives, from any thread, bytes copied. The destination's files must exist at full size. Raises
    OSError, and CheckpointError if a source file ends early or a weight for fp8 is not finite."""
    # One thread per destination file: two writers of one file would block each other in the file system. The
    # largest file first, so the last thread does not start late.
    by_file: dict[Path, list[str]] = {}
    for name, tensor in destination.items():
        by_file.setdefault(tensor.blocks[0].file, []).append(name)
    largest_first = sorted(by_file, key=lambda file: -sum(destination[n].nbytes for n in by_file[file]))
    failed = threading.Event()

    def work(file: Path) -> None:
        buffer = memoryview(bytearray(BUFFER_BYTES))
        waiting = 0
        try:
            for name in by_file[file]:
                quantizes = destination[name].scales is not None
                bands = block_bands if quantizes else row_bands
                for band in bands(source[name], destination[name]):
                    if failed.is_set():
                        return
                    buffer = _quantize(band, files, buffer) if quantizes else _copy(band, files, buffer)
                    nbytes = band.rows * band.written_row
                    moved(nbytes)
                    waiting += nbytes
                    if waiting >= _WRITE_BEHIND_BYTES:
                        # Keeps unwritten pages, but starts writing them, before gigabytes wait for the sync.
                        os.posix_fadvise(files.writing(file), 0, 0, os.POSIX_FADV_DONTNEED)
                        waiting = 0
            os.fsync(files.writing(file))  # here, while other threads copy, not at the end
        except BaseException:
            failed.set()
            raise

    with OpenFiles() as files, ThreadPoolExecutor(threads) as pool:
        try:
            for done in [pool.submit(work, file) for file in largest_first]:
                done.result()
        except BaseException:  # including an interrupt, which only this thread sees
            failed.set()
            raise


class OpenFiles:
    """Thread-safe cache of file descriptors by path; a context manager, which closes all on exit."""

    def __init__(self) -> None:
        self._open: dict[tuple[Path, int], int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def reading(self, path: Path) -> int:
        """Return a descriptor for reading."""
        return self._descriptor(path, os.O_RDONLY)

    def writing(self, path: Path) -> int:
        """Return a descriptor for writing to an existing file."""
        return self._descriptor(path, os.O_WRONLY)

    def _descriptor(self, path: Path, flags: int) -> int:
        with self._lock:
            if (path, flags) not in self._open:
                self._open[path, flags] = os.open(path, flags | os.O_CLOEXEC)
            return self._open[path, flags]


@dataclass(frozen=True, slots=True)
class RowBand:
    """Band of rows of a tensor, the unit of copying and comparing: rows, blocks to read and to write, types,
    scales. A band of ``row_bands`` crosses no block edge."""

    name: str
    row: int
    rows: int
    columns: int
    read: Sequence[Block]
    written: Sequence[Block]
    read_type: str
    written_type: str
    scales: tuple[BlockTensor | None, BlockTensor | None] = (None, None)
    """Scales of the tensors read and written, if in fp8."""

    @classmethod
    def of(
        cls,
        source: BlockTensor,
        destination: BlockTensor,
        row: int,
        rows: int,
        read: Sequence[Block],
        written: Sequence[Block],
    ) -> RowBand:
        """Return the band of ``rows`` rows from ``row`` on."""
        types, scales = (source.dtype, destination.dtype), (source.scales, destination.scales)
        return cls(source.name, row, rows, prod(source.shape[1:]), read, written, *types, scales)

    @property
    def read_row(self) -> int:
        """Bytes of a row as read."""
        return self.columns * ITEM_BYTES[self.read_type]

    @property
    def written_row(self) -> int:
        """Bytes of a row as written."""
        return self.columns * ITEM_BYTES[self.written_type]


def row_bands(source: BlockTensor, destination: BlockTensor) -> Iterator[RowBand]:
    """Yield a tensor's row bands in order; no block of either checkpoint begins or ends within one."""
    rows = source.shape[0]
    columns = prod(source.shape[1:])
    blocks = (*source.blocks, *destination.blocks)
    edges = sorted({0, rows} | {b.row for b in blocks} | {b.row + b.rows for b in blocks})
    step = max(1, BUFFER_BYTES // (columns * ITEM_BYTES[source.weight_type]))
    for begin, end in pairwise(edges):
        read, written = (
            [block for block in tensor.blocks if block.row <= begin < block.row + block.rows]
            for tensor in (source, destination)
        )
        for row in range(begin, end, step):
            yield RowBand.of(source, destination, row, min(step, end - row), read, written)


def block_bands(source: BlockTensor, destination: BlockTensor) -> Iterator[RowBand]:
    """Yield bands of one row of fp8 blocks each, read from any number of source blocks."""
    rows = source.shape[0]
    for row in range(0, rows, BLOCK):
        count = min(BLOCK, rows - row)
        read = [block for block in source.blocks if row < block.row + block.rows and block.row < row + count]
        yield RowBand.of(source, destination, row, count, read, destination.blocks)


def _copy(band: RowBand, files: OpenFiles, buffer: memoryview) -> memoryview:
    """Copy one band; return the buffer, a larger one if a single row did not fit."""
    if len(buffer) < band.rows * band.read_row:
        buffer = memoryview(bytearray(band.rows * band.read_row))
    data = buffer[: band.rows * band.read_row]
    for block in band.read:
        move_rows(os.preadv, files.reading(block.file), block, band, data, band.read_type)
    if band.read_type == FP8:
        data = from_fp8(band, band.scales[0], files, data)
    elif band.read_type != band.written_type:
        data = to_bfloat16(data, band.read_type)
    for block in band.written:
        move_rows(os.pwritev, files.writing(block.file), block, band, data, band.written_type)
    return buffer


def from_fp8(band: RowBand, scales: BlockTensor | None, files: OpenFiles, data: memoryview) -> memoryview:
    """Return a band's weights as BF16 from ``data``, its fp8 bytes. Raises CheckpointError for bad scales."""
    assert scales is not None, "a tensor in fp8 has scales"
    [block] = scales.blocks
    first, last = band.row // BLOCK, (band.row + band.rows - 1) // BLOCK + 1
    own = RowBand(scales.name, first, last - first, block.columns, (block,), (), scales.dtype, scales.dtype)
    scale_bytes = memoryview(bytearray(own.rows * own.read_row))
    move_rows(os.preadv, files.reading(block.file), block, own, scale_bytes, scales.dtype)
    scales_GB = as_float32(scale_bytes, scales.dtype).reshape(own.rows, own.columns)
    try:
        values = dequantized(data, band.columns, band.row, scales_GB)
    except CheckpointError as error:
        raise CheckpointError(f"{block.file}: tensor {band.name}: {error}") from None
    return to_bfloat16(values.data.cast("B"), "F32")


def _quantize(band: RowBand, files: OpenFiles, buffer: memoryview) -> memoryview:
    """Copy one row of blocks as fp8 with scales, as many blocks at a time as fit; return the buffer."""
    (written,), scales = band.written, band.scales[1]
    assert scales is not None, "a tensor in fp8 has scales"
    most = BUFFER_BYTES // (BLOCK * BLOCK * ITEM_BYTES[band.read_type]) * BLOCK
    for column in range(0, band.columns, most):
        part = replace(band, columns=min(most, band.columns - column))
        data = buffer[: part.rows * part.read_row]
        _read_part(part, column, files, data)
        values = as_float32(data, part.read_type).reshape(part.rows, part.columns)
        try:
            numbers, factors = quantized(values)
        except ValueError as error:
            raise CheckpointError(
                f"tensor {band.name}, rows {band.row} to {band.row + band.rows}: {error}, so it has no value "
                "in fp8; the training has diverged, or a file is damaged"
            ) from None
        place = replace(written, columns=part.columns, position=written.position + column * ITEM_BYTES[FP8])
        move_rows(os.pwritev, files.writing(place.file), place, part, numbers.data.cast("B"), FP8)
        [block] = scales.blocks
        at = block.position + band.row // BLOCK * block.stride + column // BLOCK * ITEM_BYTES[scales.dtype]
        scale_buffers = [factors.data.cast("B")]
        _transfer(os.pwritev, files.writing(block.file), scale_buffers, at, block.file, scales.name)
    return buffer


def _read_part(part: RowBand, column: int, files: OpenFiles, data: memoryview) -> None:
    """Read a band's columns from ``column`` on, from all blocks that contain some."""
    for block in part.read:
        if (piece := _within(block, part, column)) is None:
            continue
        own = replace(part, row=piece.row, rows=piece.rows)
        begin = (piece.row - part.row) * part.read_row
        target = data[begin : begin + piece.rows * part.read_row]
        move_rows(os.preadv, files.reading(piece.file), piece, own, target, part.read_type)


def _within(block: Block, part: RowBand, column: int) -> Block | None:
    """Return the piece of a block within the part that starts at ``column``; None if there is none."""
    row, end = max(block.row, part.row), min(block.row + block.rows, part.row + part.rows)
    first, last = max(block.column, column), min(block.column + block.columns, column + part.columns)
    if row >= end or first >= last:
        return None
    skipped = (row - block.row) * block.stride + (first - block.column) * ITEM_BYTES[part.read_type]
    return replace(
        block,
        row=row,
        rows=end - row,
        column=first - column,
        columns=last - first,
        position=block.position + skipped,
    )


Transfer = Callable[[int, Sequence[memoryview], int], int]
"""Positioned transfer, ``os.preadv`` or ``os.pwritev``."""


def move_rows(
    transfer: Transfer, descriptor: int, block: Block, band: RowBand, data: memoryview, dtype: str
) -> None:
    """Transfer a block's part of the band between its file and the buffer ``data``."""
    item = ITEM_BYTES[dtype]
    row, width, first = band.columns * item, block.columns * item, block.column * item
    position = block.position + (band.row - block.row) * block.stride
    if width == row and block.stride == row:
        _transfer(transfer, descriptor, [data], position, block.file, band.name)
        return
    pieces = [data[at : at + width] for at in range(first, band.rows * row, row)]
    together = _VECTORS if block.stride == width else 1
    for i in range(0, len(pieces), together):
        some = pieces[i : i + together]
        _transfer(transfer, descriptor, some, position + i * block.stride, block.file, band.name)


def _transfer(
    transfer: Transfer,
    descriptor: int,
    pieces: Sequence[memoryview],
    position: int,
    path: Path,
    name: str,
) -> None:
    """Transfer all pieces in one call; after a short transfer, repeat piece by piece."""
    if transfer(descriptor, pieces, position) == sum(len(piece) for piece in pieces):
        return
    for piece in pieces:
        at = 0
        while at < len(piece):
            count = transfer(descriptor, [piece[at:]], position)
            if count == 0:
                raise CheckpointError(f"{path} ends at byte {position}, in the middle of tensor {name}")
            at += count
            position += count
