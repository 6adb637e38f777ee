"""Segments of fused parameters (QKV, gate and up): their blocks, split by Hugging Face tensor.

A segment is consecutive rows of one HF tensor. CheckpointError if blocks overlap or do not cover a tensor.
The readers and writers of Megatron's formats call it. Used by ``checkpoints_tools/formats/mp_rank.py``,
``checkpoints_tools/formats/torch_dist.py`` and ``checkpoints_tools/formats/torch_dist_writer.py``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.parameter_map import RowSegment
from checkpoints_tools.core.blocks import Block, BlockTensor


def cut_into_sources(
    segments: Sequence[RowSegment], sources: int, blocks: Iterable[Block]
) -> tuple[list[Block], ...]:
    """Blocks of a fused parameter, split into the blocks of each of its ``sources`` HF tensors.

    ``segments`` stack the HF tensors' rows in the parameter, from its first row on. Rows after the last
    segment (vocabulary padding) are left out.
    """
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


def shared_type(tensors: Mapping[str, BlockTensor], names: Sequence[str]) -> str:
    """The type of the tensors ``names``, which megatron-core keeps in one parameter.

    CheckpointError if they differ.
    """
    first = names[0]
    for name in names:
        if tensors[name].weight_type != tensors[first].weight_type:
            raise CheckpointError(
                f"tensor {name} is {tensors[name].weight_type} and {first} is {tensors[first].weight_type}; "
                "megatron-core keeps them in one parameter, which has one type"
            )
    return tensors[first].weight_type


def check_cover(tensor: BlockTensor) -> None:
    """Raise CheckpointError unless the blocks cover the tensor, none of it twice."""
    rows, columns = tensor.shape[0], prod(tensor.shape[1:])
    blocks = sorted(tensor.blocks, key=lambda block: (block.row, block.column))
    row = 0
    here: list[Block] = []  # those that hold the row, in the order of their columns
    for block in blocks:
        if block.row + block.rows > rows or block.column + block.columns > columns:
            raise CheckpointError(
                f"tensor {tensor.name}: {_place(block)} lies outside of {list(tensor.shape)}"
            )
        if block.row != row:
            row = block.row
            here = [other for other in here if other.row + other.rows > row]
        at = bisect_left(here, block.column, key=lambda other: other.column)
        for other in here[max(0, at - 1) : at + 1]:
            if other.column < block.column + block.columns and block.column < other.column + other.columns:
                raise CheckpointError(f"tensor {tensor.name}: {_place(other)} and {_place(block)} overlap")
        here.insert(at, block)
    held = sum(block.rows * block.columns for block in blocks)
    if held != rows * columns:
        raise CheckpointError(
            f"tensor {tensor.name}: the checkpoint holds {held} of its {rows * columns} elements; "
            "a part of it was not saved, or a file is missing"
        )


def _place(block: Block) -> str:
    return (
        f"rows {block.row} to {block.row + block.rows}, columns {block.column} to "
        f"{block.column + block.columns} in {block.file}"
    )
