"""Blocks, the common model of all checkpoint formats: Hugging Face tensors cut into rectangles of files.

A reader gives the blocks of each tensor by its Hugging Face name: one block of a safetensors file, the
query rows of many KV groups of a stacked ``linear_qkv``, the column shards of eight ranks. A writer gives
the blocks of files that are yet to be filled. A conversion copies the intersections of both sides' blocks;
a verification compares them. Plain data: no element is read here. Used in ``checkpoints_tools/``,
``checkpoints_tools/archives/``, this folder and ``checkpoints_tools/formats/``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from bapo_megatron.hf.fp8 import FP8

WEIGHT_TYPES = ("BF16", "F16", "F32")
"""Types of weights, by safetensors' names."""

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, FP8: 1}
"""Bytes of an element in a file; weights in fp8 have block scales, and are read as BF16."""


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of a tensor's elements as it lies in a file; each of its rows is contiguous there.

    A tensor of shape [n] counts as n rows of one column, fused experts [e, n, m] as e n rows until they are
    taken apart. Part of a ``BlockTensor``.
    """

    row: int
    rows: int
    column: int
    columns: int
    file: Path
    position: int
    """Byte in the file at which the rectangle's first element begins."""
    stride: int
    """Bytes from the beginning of a row to that of the next."""


@dataclass(frozen=True)
class BlockTensor:
    """One tensor of a model under its Hugging Face name, as blocks that cover it, none twice.

    Made by the readers of formats, and by the writers for their files.
    """

    name: str
    dtype: str
    """Data type in the file by safetensors' name: one of WEIGHT_TYPES, or fp8."""
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    scales: BlockTensor | None = None
    """Scales of its blocks of 128 x 128; of a tensor in fp8 alone."""

    @property
    def weight_type(self) -> str:
        """Type of the weights that are read from it: BF16 for fp8."""
        return "BF16" if self.scales is not None else self.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all elements in the file, without scales."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]
