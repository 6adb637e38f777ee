"""Reader of a Hugging Face folder's tensors with torch, ``HfReader``: by name, one tensor or part at a time.

Raises ConfigError for an unreadable folder or file; no link may lead out of the folder.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.blocks import ITEM_BYTES, WEIGHT_TYPES, BlockTensor
from bapo_megatron.hf.config import ModelShape, problems_of
from bapo_megatron.hf.fp8 import BLOCK, FP8
from bapo_megatron.hf.parameter_map import OUTPUT, embedding_name, is_fused_experts, tensor_problems
from bapo_megatron.hf.safetensors_folder import experts_apart, stored_tensors

_ALL = slice(None)
_TYPES = {
    FP8: torch.float8_e4m3fn,
    **{name: getattr(torch, torch_name) for name, torch_name in WEIGHT_TYPES.items()},
}
_ROWS = 4096
"""Rows of embedding and output layer per comparison."""


class TensorReader(Protocol):
    """Protocol of what a policy loads its weights from: ``read`` returns a tensor, or part of it, by name."""

    def read(self, name: str, rows: slice = _ALL, columns: slice = _ALL) -> Tensor:
        """Read rows and columns of one tensor (default: all), fp8 as bfloat16."""


class HfReader:
    """Reader of one Hugging Face folder: ``names``, ``shape`` and ``read`` of its tensors, ``check`` against
    a model's shape. The constructor checks the headers of all files (``safetensors_folder.py``). Reads fused
    experts as separate tensors, and fp8 weights as q s in bfloat16 (``fp8.py``). All other tensors that it
    returns are views of memory-mapped files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        stored = stored_tensors(folder)
        self._tensors = {part.name: part for tensor in stored.values() for part in experts_apart(tensor)}
        self._mapped: dict[Path, Any] = {}
        self.fused_experts = [name for name in stored if is_fused_experts(name)]
        """Names of the fused tensors, which SGLang would skip."""

    @property
    def names(self) -> list[str]:
        """Names of the model's tensors, sorted; separate ones for fused experts."""
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, from its file's header."""
        return self._tensors[name].shape

    def read(self, name: str, rows: slice = _ALL, columns: slice = _ALL) -> Tensor:
        """Read rows and columns of one tensor, as stored, fp8 as bfloat16; read no other bytes of it."""
        tensor = self._tensors[name]
        whole = self._view(tensor)
        part = whole[rows] if columns == _ALL else whole[rows, columns]
        if tensor.scales is None:
            return part
        return dequantized(part, self._view(tensor.scales), rows.start or 0, columns.start or 0)

    def _view(self, tensor: BlockTensor) -> Tensor:
        [block] = tensor.blocks
        if block.file not in self._mapped:
            size = block.file.stat().st_size
            self._mapped[block.file] = torch.UntypedStorage.from_file(str(block.file), False, size)
        nbytes = prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        own = self._mapped[block.file][block.position : block.position + nbytes]
        return torch.asarray(own, dtype=torch.uint8).view(_TYPES[tensor.dtype]).view(tensor.shape)

    def check(self, shape: ModelShape) -> None:
        """Raise ConfigError, with the first eight of them, for missing, unknown or misshapen tensors.

        Reads no weights, except in a tied model with two copies of its embedding: the policy computes with
        one of them, transformers with both, so they must be equal.
        """
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        problems = tensor_problems(shapes, shape)
        if not problems and shape.tied and OUTPUT in shapes:
            problems += self._unequal_copy(embedding_name(shape))
        if problems:
            raise ConfigError(problems_of(self.folder, problems))

    def _unequal_copy(self, embedding: str) -> list[str]:
        shape = self.shape(embedding)
        if self.shape(OUTPUT) == shape:
            parts = (slice(row, row + _ROWS) for row in range(0, shape[0], _ROWS))
            if all(
                torch.equal(*(self.read(name, rows).float() for name in (embedding, OUTPUT)))
                for rows in parts
            ):
                return []
        return [
            f"config.json ties {OUTPUT} to {embedding}, but the two are not equal: set "
            f'"tie_word_embeddings": false there if the model was trained so, else remove {OUTPUT}'
        ]


def dequantized(part: Tensor, scales: Tensor, row: int = 0, column: int = 0) -> Tensor:
    """Weights q s in bfloat16, from the float8_e4m3fn numbers q of part of a matrix and its scales s.

    ``row``, ``column``: start of the part in the matrix. Multiplies in float32 and rounds once, to nearest
    even. Raises ConfigError for a scale that is not finite.
    """
    scales = scales.float()
    if not scales.isfinite().all():
        raise ConfigError("a scale of the fp8 weights is not finite: fetch the model again")
    rows, columns = part.shape
    whole = torch.empty(rows, columns, dtype=torch.bfloat16)
    of_columns = torch.arange(column, column + columns) // BLOCK
    first = row // BLOCK
    for block in range(first, -(-(row + rows) // BLOCK)):
        begin, end = max(0, block * BLOCK - row), min(rows, (block + 1) * BLOCK - row)
        whole[begin:end] = part[begin:end].float() * scales[block, of_columns]
    return whole
