"""Blocks: every checkpoint format as Hugging Face tensors that are cut into rectangles of files.

A reader of a format says, for each tensor by its Hugging Face name, where its elements lie: in one block of a
safetensors file, in the query rows of many KV groups of a stacked ``linear_qkv``, in the column shards of
eight ranks. A writer says the same of files that are yet to be filled. To convert is to copy where a block of
the one meets a block of the other; to verify is to compare there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
"""Bytes of an element, by safetensors' names of data types."""


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of a tensor's elements as it lies in a file; each of its rows is contiguous there.

    A tensor of shape [n] counts as n rows of one column; one of more than two dimensions does not occur.
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
    """One tensor of a model under its Hugging Face name, as blocks that cover it, none twice."""

    name: str
    dtype: str
    """Data type by safetensors' name: BF16, F16, F32."""
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]
