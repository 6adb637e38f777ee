"""Copying between any two ways to cut a tensor into blocks of files moves every element to its place."""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.blocks import Block, BlockTensor
from checkpoints_tools.core import copying
from checkpoints_tools.core.copying import copy_tensors, to_bfloat16

Rectangles = list[tuple[int, int, int, int]]


@st.composite
def cut(draw: st.DrawFn, rows: int, columns: int) -> Rectangles:
    """The rectangle, halved again and again along rows or columns."""
    pieces = [(0, rows, 0, columns)]
    for _ in range(draw(st.integers(0, 6))):
        row, height, column, width = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        if draw(st.booleans()) and height > 1:
            at = draw(st.integers(1, height - 1))
            pieces += [(row, at, column, width), (row + at, height - at, column, width)]
        elif width > 1:
            at = draw(st.integers(1, width - 1))
            pieces += [(row, height, column, at), (row, height, column + at, width - at)]
        else:
            pieces.append((row, height, column, width))
    return pieces


def lay_out(
    folder: Path, name: str, shape: tuple[int, int], pieces: Rectangles, gap: int, values: np.ndarray | None
) -> BlockTensor:
    """The pieces in two files, each row of a piece ``gap`` bytes behind the one before."""
    contents = [bytearray(b"\xab" * 3), bytearray()]
    blocks = []
    for number, (row, rows, column, columns) in enumerate(pieces):
        file = number % 2
        stride = 2 * columns + gap
        blocks.append(
            Block(row, rows, column, columns, folder / f"{name}{file}", len(contents[file]), stride)
        )
        for r in range(row, row + rows):
            held = b"" if values is None else values[r, column : column + columns].tobytes()
            contents[file] += held.ljust(2 * columns, b"\0") + b"\xcd" * gap
    for file, content in enumerate(contents):
        (folder / f"{name}{file}").write_bytes(content)
    return BlockTensor("w", "BF16", shape, tuple(blocks))


def collect(tensor: BlockTensor) -> np.ndarray:
    """The elements as the blocks say."""
    found = np.zeros(tensor.shape, np.uint16)
    for block in tensor.blocks:
        content = block.file.read_bytes()
        for r in range(block.rows):
            at = block.position + r * block.stride
            row = np.frombuffer(content[at : at + 2 * block.columns], np.uint16)
            found[block.row + r, block.column : block.column + block.columns] = row
    return found


@given(data=st.data())
@settings(max_examples=150)
def test_every_element_arrives_and_nothing_else_changes(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    values = np.arange(1, rows * columns + 1, dtype=np.uint16).reshape(rows, columns)
    gaps = data.draw(st.tuples(st.sampled_from([0, 2, 5]), st.sampled_from([0, 2, 5])))
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "BUFFER_BYTES", data.draw(st.sampled_from([1, 40, 1 << 20])))
        patch.setattr(copying, "_WRITE_BEHIND_BYTES", data.draw(st.sampled_from([1, 32 << 20])))
        patch.setattr(copying, "_VECTORS", data.draw(st.sampled_from([1, 3, 1024])))
        folder = Path(name)
        shape = (rows, columns)
        source = lay_out(folder, "source", shape, data.draw(cut(rows, columns)), gaps[0], values)
        target = lay_out(folder, "target", shape, data.draw(cut(rows, columns)), gaps[1], None)
        around = {block.file: _outside(target, block.file) for block in target.blocks}
        seen: list[int] = []
        copy_tensors({"w": source}, {"w": target}, threads=2, moved=seen.append)
        assert (collect(target) == values).all()
        assert sum(seen) == target.nbytes
        assert {block.file: _outside(target, block.file) for block in target.blocks} == around


def _outside(tensor: BlockTensor, file: Path) -> bytes:
    """The bytes of a file that belong to no block."""
    content = bytearray(file.read_bytes())
    for block in tensor.blocks:
        if block.file == file:
            for r in range(block.rows):
                at = block.position + r * block.stride
                content[at : at + 2 * block.columns] = b"\0" * (2 * block.columns)
    return bytes(content)


def test_calls_that_do_a_part_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may move fewer bytes than it was asked to, wherever it likes."""
    values = np.arange(96, dtype=np.uint16).reshape(8, 12)
    source = lay_out(tmp_path, "source", (8, 12), [(0, 8, 0, 5), (0, 8, 5, 7)], 0, values)
    target = lay_out(tmp_path, "target", (8, 12), [(0, 3, 0, 12), (3, 5, 0, 4), (3, 5, 4, 8)], 0, None)
    for name in ("preadv", "pwritev"):
        whole, sizes = getattr(os, name), itertools.cycle([1, 7, 30, 3, 100])

        def partly(
            descriptor: int,
            pieces: list[memoryview],
            position: int,
            whole: Callable[..., int] = whole,
            sizes: Iterator[int] = sizes,
        ) -> int:
            left, some = next(sizes), []
            for piece in pieces:
                some.append(piece[:left])
                left -= len(some[-1])
            return whole(descriptor, some, position)

        monkeypatch.setattr(copying.os, name, partly)
    copy_tensors({"w": source}, {"w": target}, threads=1)
    assert (collect(target) == values).all()


@pytest.mark.parametrize("pieces", [[(0, 8, 0, 4)], [(0, 8, 0, 2), (0, 8, 2, 2)]])
def test_a_source_that_ends_early_is_named(pieces: Rectangles, tmp_path: Path) -> None:
    values = np.ones((8, 4), np.uint16)
    source = lay_out(tmp_path, "source", (8, 4), [(0, 8, 0, 4)], 0, values)
    target = lay_out(tmp_path, "target", (8, 4), pieces, 0, None)
    path = source.blocks[0].file
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"source0 ends at byte 62, in the middle of tensor w"):
        copy_tensors({"w": source}, {"w": target}, threads=1)


@given(data=st.binary(min_size=4, max_size=400))
@settings(max_examples=200)
def test_rounding_is_that_of_torch(data: bytes) -> None:
    import torch

    for dtype, kind in (("F32", np.float32), ("F16", np.float16)):
        values = np.frombuffer(data[: len(data) // 4 * 4], kind)
        rounded = np.frombuffer(to_bfloat16(memoryview(values.tobytes()), dtype), np.int16)
        expected = torch.from_numpy(values.copy()).bfloat16()
        ours = torch.from_numpy(rounded.copy()).view(torch.bfloat16)
        assert torch.equal(ours.isnan(), expected.isnan())
        number = ~expected.isnan()
        assert torch.equal(ours[number].view(torch.int16), expected[number].view(torch.int16))


def test_rounding_at_the_edges() -> None:
    """Ties to even both ways, the largest float, infinities, denormals, signed zero, NaNs."""
    ties = {0x3F808000: 0x3F80, 0x3F818000: 0x3F82, 0x3F808001: 0x3F81}
    large = {0x7F7FFFFF: 0x7F80, 0x7F800000: 0x7F80, 0xFF800000: 0xFF80}
    small = {0x00000001: 0, 0x00008000: 0, 0x00018000: 2, 0x80000000: 0x8000}
    expected = {**ties, **large, **small, 0x7F800001: 0x7FC0, 0xFFFFFFFF: 0x7FC0}
    bits = np.array(list(expected), np.uint32)
    rounded = np.frombuffer(to_bfloat16(memoryview(bits.tobytes()), "F32"), np.uint16)
    assert [hex(x) for x in rounded] == [hex(x) for x in expected.values()]


def test_an_interrupt_ends_the_copying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "BUFFER_BYTES", 8)
    values = np.ones((300, 4), np.uint16)
    source = lay_out(tmp_path, "source", (300, 4), [(0, 300, 0, 4)], 0, values)
    target = lay_out(tmp_path, "target", (300, 4), [(0, 300, 0, 4)], 0, None)
    bands: list[int] = []
    real = Future.result
    waits, interrupted = threading.Event(), threading.Event()
    main = threading.main_thread().ident or 0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored

    def result(future: Future[None]) -> None:
        try:
            waits.set()
            real(future)
        finally:
            interrupted.set()

    def moved(nbytes: int) -> None:
        if not bands:
            assert waits.wait(300)
            signal.pthread_kill(main, signal.SIGINT)
            assert interrupted.wait(300)
        bands.append(nbytes)
        time.sleep(0.01)

    monkeypatch.setattr(Future, "result", result)
    try:
        with pytest.raises(KeyboardInterrupt):
            copy_tensors({"w": source}, {"w": target}, threads=1, moved=moved)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(bands) < 300
