"""Tensor copy from the blocks of one checkpoint into the blocks of another, in bounded memory.

A tensor is copied in bands: as many whole rows as a buffer holds, within which no block begins or ends. The
source's blocks are read into the buffer, the destination's are written from it; holes are skipped, and the
kernel copies what is contiguous in both. So a byte moves once, however the two are cut, and memory is one
buffer, of at least a row, for each thread. A cast to bfloat16 rounds to nearest even, bit for bit as torch
does (a NaN has one bit pattern). Used by ``checkpoints_tools/conversion.py`` and ``comparing.py``.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from bapo_megatron.errors import CheckpointError
from checkpoints_tools.core.blocks import ITEM_BYTES, Block, BlockTensor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_NAN = 0x7FC0  # torch's kernels make 0x7FC0 or 0xFFFF of every NaN, by the machine


def to_bfloat16(data: memoryview, dtype: str) -> memoryview:
    """The values of ``data``, of type F32 or F16, as BF16: to nearest, ties to even, NaN to 0x7FC0.

    A float16 becomes a float32 first, which loses nothing.
    """
    import numpy as np  # a conversion that keeps its type starts without it

    if dtype == "F16":
        with np.errstate(invalid="ignore"):
            bits = np.frombuffer(data, np.float16).astype(np.float32).view(np.uint32)
    elif dtype == "F32":
        bits = np.frombuffer(data, np.uint32)
    else:
        raise ValueError(f"{dtype} is not converted to BF16")
    return _rounded(bits).data.cast("B")


def _rounded(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    import numpy as np

    nearest = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, np.uint32(_NAN), nearest).astype(np.uint16)


BUFFER_BYTES = 1 << 20
_WRITE_BEHIND_BYTES = 32 << 20
_NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
_VECTORS = 1024  # of one readv or writev: Linux' IOV_MAX
Moved = Callable[[int], None]
"""Progress callback: takes the number of bytes that were copied, from any thread."""


def copy_tensors(
    source: Mapping[str, BlockTensor],
    destination: Mapping[str, BlockTensor],
    threads: int,
    moved: Moved = lambda nbytes: None,
) -> None:
    """Copy the source's blocks into the destination's, with a cast to BF16 where the types differ.

    The destination's files must exist at their full size and hold zeros: holes of the source are skipped.
    Raises CheckpointError if a source file ends early, OSError as the system does.
    """
    # One thread for each destination file: two writers of one file would wait for each other in the file
    # system. The largest file first, so that the last thread to end does not begin late.
    by_file: dict[Path, list[str]] = {}
    for name, tensor in destination.items():
        by_file.setdefault(tensor.blocks[0].file, []).append(name)
    largest_first = sorted(by_file, key=lambda file: -sum(destination[n].nbytes for n in by_file[file]))
    failed = threading.Event()

    def work(file: Path) -> None:
        buffer = memoryview(bytearray(BUFFER_BYTES))
        behind = _WriteBehind(files)
        try:
            for name in by_file[file]:
                for band in row_bands(source[name], destination[name]):
                    if failed.is_set():
                        return
                    buffer = _copy(band, files, buffer)
                    behind.copied(band)
                    moved(band.rows * band.written_row)
            os.fsync(files.writing(file))  # here, while other threads copy, and not for all files at the end
        except BaseException:
            failed.set()
            raise

    with OpenFiles() as files, ThreadPoolExecutor(threads) as pool:
        try:
            for done in [pool.submit(work, file) for file in largest_first]:
                done.result()
        except BaseException:  # also an interrupt, of which only this thread knows
            failed.set()
            raise


class OpenFiles:
    """A cache of file descriptors by path, for any thread; a context manager, at whose end all are closed.

    For copies and comparisons.
    """

    def __init__(self) -> None:
        self.kernel_copies = True
        """Whether copy_file_range is used; False once the system has refused one."""
        self._open: dict[tuple[Path, int], int] = {}
        self._sparse: set[int] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def reading(self, path: Path) -> int:
        """A descriptor to read from."""
        return self._descriptor(path, os.O_RDONLY)

    def writing(self, path: Path) -> int:
        """A descriptor to write to; the file exists."""
        return self._descriptor(path, os.O_WRONLY)

    def is_hole(self, path: Path, position: int, nbytes: int) -> bool:
        """Whether these bytes are a hole of a sparse file, which reads as zeros."""
        descriptor = self.reading(path)
        if descriptor not in self._sparse:
            return False
        try:
            return os.lseek(descriptor, position, os.SEEK_DATA) >= position + nbytes
        except OSError:  # no data from here to the end
            return position + nbytes <= os.fstat(descriptor).st_size

    def _descriptor(self, path: Path, flags: int) -> int:
        with self._lock:
            if (path, flags) not in self._open:
                descriptor = self._open[path, flags] = os.open(path, flags | os.O_CLOEXEC)
                status = os.fstat(descriptor)
                if flags == os.O_RDONLY and status.st_blocks * 512 < status.st_size:
                    self._sparse.add(descriptor)
            return self._open[path, flags]


class _WriteBehind:
    """Write-behind of copied files: starts the system's writes early, so that the final sync is short.

    By itself the system begins only when gigabytes are waiting.
    """

    def __init__(self, files: OpenFiles) -> None:
        self._files = files
        self._spans: dict[Path, tuple[int, int]] = {}
        self._waiting = 0

    def copied(self, band: RowBand) -> None:
        """Note that ``band`` was copied into the page cache, and start its write if enough is waiting."""
        for block in band.written:
            begin = block.position + (band.row - block.row) * block.stride
            low, high = self._spans.get(block.file, (begin, begin))
            self._spans[block.file] = min(low, begin), max(high, begin + band.rows * block.stride)
        self._waiting += band.rows * band.written_row
        if self._waiting >= _WRITE_BEHIND_BYTES:
            for file, (low, high) in self._spans.items():
                # The system keeps what is not written yet, but begins to write it.
                os.posix_fadvise(self._files.writing(file), low, high - low, os.POSIX_FADV_DONTNEED)
            self._spans.clear()
            self._waiting = 0


@dataclass(frozen=True, slots=True)
class RowBand:
    """A band of whole rows of a tensor that fits into a buffer and crosses no edge of a block.

    Made by ``row_bands`` for copies and comparisons.
    """

    name: str
    row: int
    rows: int
    columns: int
    read: Sequence[Block]
    written: Sequence[Block]
    read_type: str
    written_type: str

    @property
    def read_row(self) -> int:
        """Bytes of a row as it is read."""
        return self.columns * ITEM_BYTES[self.read_type]

    @property
    def written_row(self) -> int:
        """Bytes of a row as it is written."""
        return self.columns * ITEM_BYTES[self.written_type]


def row_bands(source: BlockTensor, destination: BlockTensor) -> Iterator[RowBand]:
    """The row bands of a tensor, first to last: no block of either checkpoint begins or ends within one."""
    rows = source.shape[0]
    columns = source.shape[1] if len(source.shape) == 2 else 1
    blocks = (*source.blocks, *destination.blocks)
    edges = sorted({0, rows} | {b.row for b in blocks} | {b.row + b.rows for b in blocks})
    step = max(1, BUFFER_BYTES // (columns * ITEM_BYTES[source.dtype]))
    readers, writers = _Sweep(source.blocks), _Sweep(destination.blocks)
    for begin, end in pairwise(edges):
        read, written = readers.at(begin), writers.at(begin)
        for row in range(begin, end, step):
            yield RowBand(
                source.name,
                row,
                min(step, end - row),
                columns,
                read,
                written,
                source.dtype,
                destination.dtype,
            )


class _Sweep:
    """Sweep line over the blocks of a tensor: those that hold a row, for ascending rows."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._ahead = sorted(blocks, key=lambda block: block.row, reverse=True)
        self._here: list[Block] = []

    def at(self, row: int) -> list[Block]:
        while self._ahead and self._ahead[-1].row <= row:
            self._here.append(self._ahead.pop())
        self._here = [block for block in self._here if row < block.row + block.rows]
        return self._here


def _copy(band: RowBand, files: OpenFiles, buffer: memoryview) -> memoryview:
    """Copy one band. Returns the buffer, a larger one if a single row did not fit."""
    if all(in_a_hole(band, block, files) for block in band.read) or _copy_in_kernel(band, files):
        return buffer
    if len(buffer) < band.rows * band.read_row:
        buffer = memoryview(bytearray(band.rows * band.read_row))
    data = buffer[: band.rows * band.read_row]
    for block in band.read:
        move_rows(os.preadv, files.reading(block.file), block, band, data, band.read_type)
    if band.read_type != band.written_type:
        data = to_bfloat16(data, band.read_type)
    for block in band.written:
        move_rows(os.pwritev, files.writing(block.file), block, band, data, band.written_type)
    return buffer


def _copy_in_kernel(band: RowBand, files: OpenFiles) -> bool:
    """Copy a band by copy_file_range, if it is contiguous in both files: half the work of a read and a write.

    Returns whether it was copied; the system refuses it, for one, between different file systems.
    """
    if len(band.read) != 1 or len(band.written) != 1 or band.read_type != band.written_type:
        return False
    (read,), (written,), row = band.read, band.written, band.read_row
    if not read.stride == written.stride == row or not files.kernel_copies:
        return False
    here = read.position + (band.row - read.row) * row
    there = written.position + (band.row - written.row) * row
    done, wanted = 0, band.rows * row
    while done < wanted:
        try:
            count = os.copy_file_range(
                files.reading(read.file),
                files.writing(written.file),
                wanted - done,
                here + done,
                there + done,
            )
        except OSError as error:
            if error.errno not in _NO_KERNEL_COPY:
                raise
            files.kernel_copies = False
            return False
        if count == 0:  # the source has ended; reading will say so
            return False
        done += count
    return True


def in_a_hole(band: RowBand, block: Block, files: OpenFiles) -> bool:
    """Whether a block's part of the band is a hole of a sparse file, which reads as zeros."""
    span = (band.rows - 1) * block.stride + block.columns * ITEM_BYTES[band.read_type]
    return files.is_hole(block.file, block.position + (band.row - block.row) * block.stride, span)


Transfer = Callable[[int, Sequence[memoryview], int], int]
"""A positioned transfer, ``os.preadv`` or ``os.pwritev``."""


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
    """Transfer all pieces in one call; after a short transfer again piece by piece."""
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
