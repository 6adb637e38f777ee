"""Types for the place of a tensor in the files of a checkpoint, in any format: ``Block``, ``BlockTensor``.

A ``BlockTensor`` is a Hugging Face tensor cut into rectangles, each a ``Block`` of one file: in a safetensors
file the whole tensor is one block; in a Megatron checkpoint ``q_proj`` may be one block per KV group of the
stacked ``linear_qkv``, and a tensor sharded by columns one block per rank. Each format's reader returns
``BlockTensor``s of existing files, its writer those of files to fill; ``checkpoints_tools/core`` copies from
one to the other (``copying.py``) and compares them (``comparing.py``). Nothing here reads a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from bapo_megatron.hf.fp8 import FP8

WEIGHT_TYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""Weight types: safetensors' names to torch's."""

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, FP8: 1}
"""Bytes of an element in a file; fp8 weights have block scales and are read as BF16."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rectangle of a tensor's elements in a file: first row and column, size, file, byte position, stride.
    Each of its rows is contiguous there. A tensor of shape [n] counts as n rows of one column, fused experts
    [e, n, m] as e n rows until taken apart."""

    row: int
    rows: int
    column: int
    columns: int
    file: Path
    position: int
    """Byte position of the rectangle's first element in the file."""
    stride: int
    """Bytes from one row's beginning to the next."""

    def __str__(self) -> str:
        return (
            f"rows {self.row} to {self.row + self.rows}, columns {self.column} to "
            f"{self.column + self.columns} in {self.file}"
        )


@dataclass(frozen=True)
class BlockTensor:
    """Tensor of a model under its Hugging Face name: dtype, shape, blocks that cover it without overlap."""

    name: str
    dtype: str
    """Dtype in the file, by safetensors' name: one of WEIGHT_TYPES, or fp8."""
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    scales: BlockTensor | None = None
    """Scales of its 128 x 128 blocks, for an fp8 tensor."""

    @property
    def weight_type(self) -> str:
        """Dtype of the weights as read: BF16 for fp8."""
        return "BF16" if self.scales is not None else self.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all elements in the file, without scales."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]
