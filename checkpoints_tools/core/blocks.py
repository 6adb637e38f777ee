"""Functions on blocks without reading elements: split a fused parameter's blocks, check a tensor's cover."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.blocks import Block, BlockTensor
from bapo_megatron.layers import RowSegment


def cut_into_sources(
    segments: Sequence[RowSegment], sources: int, blocks: Iterable[Block]
) -> tuple[list[Block], ...]:
    """Split a fused parameter's blocks (QKV, gate and up) into the blocks of each HF tensor. ``segments``
    stack the rows of the ``sources`` HF tensors in the parameter, from its first row on. Rows after the last
    segment (vocabulary padding) are dropped."""
    starts = [0, *accumulate(segment.rows for segment in segments)]
    cut: tuple[list[Block], ...] = tuple([] for _ in range(sources))
    for block in blocks:
        end = block.row + block.rows
        number = bisect_right(starts, block.row) - 1
        while number < len(segments) and starts[number] < end:
            segment, start = segments[number], starts[number]
            first, last = max(block.row, start), min(end, start + segment.rows)
            position = block.position + (first - block.row) * block.stride
            row = segment.row + first - start
            cut[segment.source].append(replace(block, row=row, rows=last - first, position=position))
            number += 1
    return cut


def check_cover(tensor: BlockTensor) -> None:
    """Raise CheckpointError unless the blocks cover the tensor exactly, without overlap."""
    rows, columns = tensor.shape[0], prod(tensor.shape[1:])
    blocks = sorted(tensor.blocks, key=lambda block: (block.row, block.column))
    row = 0
    here: list[Block] = []  # blocks that hold the row, by column
    for block in blocks:
        if block.row + block.rows > rows or block.column + block.columns > columns:
            raise CheckpointError(f"tensor {tensor.name}: {block} lies outside of {list(tensor.shape)}")
        if block.row != row:
            row = block.row
            here = [other for other in here if other.row + other.rows > row]
        at = bisect_left(here, block.column, key=lambda other: other.column)
        for other in here[max(0, at - 1) : at + 1]:
            if other.column < block.column + block.columns and block.column < other.column + other.columns:
                raise CheckpointError(f"tensor {tensor.name}: {other} and {block} overlap")
        here.insert(at, block)
    covered = sum(block.rows * block.columns for block in blocks)
    if covered != rows * columns:
        raise CheckpointError(
            f"tensor {tensor.name}: the checkpoint holds {covered} of its {rows * columns} elements; "
            "a part of it was not saved, or a file is missing"
        )
