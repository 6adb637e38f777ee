"""Reader of a Hugging Face folder, ``HfReader``: tensors by name, one at a time, from safetensors files.

Raises ConfigError for an unreadable folder or file; no link may lead out of the folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import ModelShape, problems_of
from bapo_megatron.hf.fp8 import BLOCK, FP8, is_quantized, scale_name, scales_problem, weight_of_scale
from bapo_megatron.hf.parameter_map import (
    OUTPUT,
    embedding_name,
    expert_tensors,
    fused_rows,
    is_fused_experts,
    tensor_problems,
)
from bapo_megatron.hf.weight_files import INDEX, SINGLE, check_shard, missing_file, read_weight_map
from bapo_megatron.runtime.files import FETCH_LFS, check_files_inside, is_lfs_pointer

_ALL = slice(None)
_TYPES = ("BF16", "F16", "F32", FP8)
_ROWS = 4096
"""Rows of embedding and output layer per comparison."""


class TensorReader(Protocol):
    """Protocol of a source of weights: ``read`` returns (part of) a tensor by Hugging Face name."""

    def read(self, name: str, rows: slice = _ALL, columns: slice = _ALL) -> Tensor:
        """Read rows and columns of one tensor (default: all), fp8 as bfloat16."""


class HfReader:
    """Reader of one Hugging Face folder: ``names``, ``shape`` and ``read`` of its tensors, ``check`` against
    a model's shape. Files are opened on first use and stay open. Reads fused experts as separate tensors, and
    fp8 weights as q s in bfloat16 (``fp8.py``)."""

    def __init__(self, folder: Path) -> None:
        check_files_inside(folder)
        self.folder = folder
        self._open_files: dict[str, safe_open] = {}
        self._weight_map = read_weight_map(folder)
        self._file_of = self._weight_map or dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        self._scale_files = {name: file for name, file in self._file_of.items() if weight_of_scale(name)}
        """The file of each scale tensor of fp8 weights, which the model's tensors do not include."""
        for name in self._scale_files:
            del self._file_of[name]
        self._within: dict[str, tuple[str, int, slice]] = {}
        """Place of an expert's tensor within a fused one: its name, expert and rows."""
        self.fused_experts = [name for name in self._file_of if is_fused_experts(name)]
        """Names of the fused tensors, which SGLang would skip."""
        for fused in self.fused_experts:
            for name, place in expert_tensors(fused, self.shape(fused)).items():
                self._within[name] = (fused, *place)
                self._file_of[name] = self._file_of[fused]

    @property
    def names(self) -> list[str]:
        """Names of the model's tensors, sorted; separate ones for fused experts."""
        return sorted(set(self._file_of) - set(self.fused_experts))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, from its file's header."""
        if name in self._within:
            fused, _, rows = self._within[name]
            return rows.stop - rows.start, self._stored(fused).get_shape()[2]
        return tuple(self._stored(name).get_shape())

    def read(self, name: str, rows: slice = _ALL, columns: slice = _ALL) -> Tensor:
        """Read rows and columns of one tensor, as stored, fp8 as bfloat16; read no other bytes of it."""
        if name in self._within:
            fused, expert, own = self._within[name]
            first, last, _ = rows.indices(own.stop - own.start)
            part: Tensor = self._stored(fused)[expert, own.start + first : own.start + last, columns]
            if part.dtype == torch.float8_e4m3fn:
                scales = self._scales(fused)[expert, own.start // BLOCK :]
                return dequantized(part, scales, first, columns.start or 0)
            return part
        stored = self._stored(name)
        tensor: Tensor = stored[rows] if columns == _ALL else stored[rows, columns]
        if tensor.dtype == torch.float8_e4m3fn:
            return dequantized(tensor, self._scales(name)[:], rows.start or 0, columns.start or 0)
        return tensor

    def _stored(self, name: str) -> Any:
        """The slices of a stored tensor. Raises ConfigError if its file lacks it."""
        try:
            return self._file(self._file_of[name]).get_slice(name)
        except SafetensorError:
            raise ConfigError(
                f"{self.folder / self._file_of[name]} holds no tensor {name}, which {INDEX} places there: "
                "fetch the model again"
            ) from None

    def _scales(self, name: str) -> Any:
        """The slices of a stored fp8 tensor's scales. Raises ConfigError for invalid scales."""
        if problem := self._fp8_problem(name, described=True):
            raise ConfigError(problems_of(self.folder, [problem]))
        return self._file(self._scale_files[scale_name(name)]).get_slice(scale_name(name))

    def check_files(self) -> None:
        """Check that each weight file can be opened and contains no tensor outside the index."""
        for file in sorted({*self._file_of.values()}):
            self._file(file)

    def check(self, shape: ModelShape) -> None:
        """Raise ConfigError with each missing or unknown tensor, wrong shape and wrong type of the folder.

        Reads only headers, except in a tied model with two copies of its embedding: the policy computes with
        one of them, transformers with both, so they must be equal.
        """
        known = self.names
        problems = tensor_problems({name: self.shape(name) for name in known}, shape)
        problems += self._type_problems() + self._fp8_problems()
        if not problems and shape.tied and OUTPUT in known:
            problems += self._unequal_copy(embedding_name(shape))
        if problems:
            raise ConfigError(problems_of(self.folder, problems))

    def _type_problems(self) -> list[str]:
        """Problems of tensors with types that are not weights by themselves, such as a quantization's."""
        types = {name: self._stored(name).get_dtype() for name in self._file_of if name not in self._within}
        return [
            f"tensor {name} is {kind}; supported are {', '.join(_TYPES)}"
            for name, kind in types.items()
            if kind not in _TYPES
        ]

    def _unequal_copy(self, embedding: str) -> list[str]:
        """The problem of a tied output layer that differs from the embedding."""
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

    def _fp8_problems(self) -> list[str]:
        described = is_quantized(self.folder)
        weights = {weight_of_scale(name) or "" for name in self._scale_files}
        weights |= {name for name in self._file_of if name not in self._within}
        problems = (self._fp8_problem(name, described) for name in sorted(weights))
        return [problem for problem in problems if problem is not None]

    def _fp8_problem(self, name: str, described: bool) -> str | None:
        weight, scales = None, None
        if name in self._file_of:
            stored = self._stored(name)
            weight = stored.get_dtype(), tuple(stored.get_shape())
        if (file := self._scale_files.get(scale_name(name))) is not None:
            scale = self._file(file).get_slice(scale_name(name))
            scales = scale.get_dtype(), tuple(scale.get_shape())
        rows = fused_rows(name, weight[1]) if weight is not None else None
        return scales_problem(name, weight, scales, rows, described)

    def _file(self, filename: str) -> safe_open:
        if filename not in self._open_files:
            path = self.folder / filename
            if not path.is_file():
                raise ConfigError(missing_file(path, self._weight_map or {}))
            if is_lfs_pointer(path):
                raise ConfigError(f"{path} {FETCH_LFS}")
            try:
                opened = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} cannot be read: {error}") from None
            if self._weight_map is not None:
                check_shard(path, opened.keys(), self._weight_map)
            self._open_files[filename] = opened
        return self._open_files[filename]


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
