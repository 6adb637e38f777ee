"""Locations of the tensors in a Hugging Face folder's files, from checked headers, without torch.

``stored_tensors`` returns a ``BlockTensor`` for each tensor name, ``read_safetensors_folder`` the same with
fused experts split into a tensor per expert. They read only headers, the index and config.json, attach scales
to fp8 tensors, and raise CheckpointError for truncated or contradictory files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.blocks import ITEM_BYTES, Block, BlockTensor
from bapo_megatron.hf.config import problems_of
from bapo_megatron.hf.fp8 import BLOCK, is_quantized, scale_name, scales_problem, weight_of_scale
from bapo_megatron.hf.parameter_map import expert_tensors, fused_rows
from bapo_megatron.hf.weight_files import INDEX, check_shard, read_weight_map, weight_files
from bapo_megatron.runtime.files import COPY_AGAIN, FETCH_LFS, check_files_inside, is_lfs_pointer


def read_safetensors_folder(folder: Path) -> dict[str, BlockTensor]:
    """Return every tensor of a model folder by name, fused experts split into a tensor per expert.

    Scales are attached to their fp8 weights, not tensors of their own. Raises CheckpointError, with file and
    tensor, for anything truncated, contradictory or of an unsupported type.
    """
    stored = stored_tensors(folder).values()
    return {part.name: part for tensor in stored for part in experts_apart(tensor)}


def stored_tensors(folder: Path) -> dict[str, BlockTensor]:
    """Return what ``read_safetensors_folder`` does, but experts as the folder stores them, apart or fused."""
    check_files_inside(folder)
    by_name: dict[str, BlockTensor] = {}
    weight_map = read_weight_map(folder)
    for path in weight_files(folder):
        if weight_map is not None and not path.is_file():
            first = min(name for name, file in weight_map.items() if file == path.name)
            raise CheckpointError(f"{path}, which holds {first} by the index, is missing: {COPY_AGAIN}")
        tensors = read_safetensors(path)
        if weight_map is not None:
            check_shard(path, (tensor.name for tensor in tensors), weight_map)
        by_name |= {tensor.name: tensor for tensor in tensors}
    for name, file in (weight_map or {}).items():
        if name not in by_name:
            raise CheckpointError(f"{folder / file} holds no tensor {name}, which {INDEX} places there")
    return _with_scales(by_name, folder)


def _with_scales(found: dict[str, BlockTensor], folder: Path) -> dict[str, BlockTensor]:
    """Return a folder's tensors, fp8 ones with scales attached. Raises CheckpointError on mismatch."""
    scales = {weight_of_scale(name) or "": tensor for name, tensor in found.items() if weight_of_scale(name)}
    weights = {name: tensor for name, tensor in found.items() if not weight_of_scale(name)}
    described = is_quantized(folder)
    problems = []
    for name in {**weights, **scales}:
        weight, own = (
            None if tensor is None else (tensor.dtype, tensor.shape)
            for tensor in (weights.get(name), scales.get(name))
        )
        rows = fused_rows(name, weight[1]) if weight is not None else None
        problems.append(scales_problem(name, weight, own, rows, described))
    if wrong := [problem for problem in problems if problem is not None]:
        raise CheckpointError(problems_of(folder, wrong))
    return {name: replace(tensor, scales=scales.get(name)) for name, tensor in weights.items()}


def experts_apart(tensor: BlockTensor) -> Iterator[BlockTensor]:
    """Yield a tensor per expert for a fused ``tensor``, of the same bytes; any other tensor unchanged."""
    experts = expert_tensors(tensor.name, tensor.shape)
    if not experts:
        yield tensor
        return
    [whole] = tensor.blocks
    for name, (expert, rows) in experts.items():
        count = rows.stop - rows.start
        position = whole.position + (expert * tensor.shape[1] + rows.start) * whole.stride
        block = replace(whole, rows=count, position=position)
        scales = _expert_scales(tensor.scales, name, expert, rows) if tensor.scales is not None else None
        yield BlockTensor(name, tensor.dtype, (count, whole.columns), (block,), scales)


def _expert_scales(fused: BlockTensor, name: str, expert: int, rows: slice) -> BlockTensor:
    """Return the scales of one expert's tensor, whose rows begin with a block, from all experts' scales."""
    [whole] = fused.blocks
    shape = (-(-(rows.stop - rows.start) // BLOCK), fused.shape[2])
    position = whole.position + (expert * fused.shape[1] + rows.start // BLOCK) * whole.stride
    block = replace(whole, rows=shape[0], position=position)
    return BlockTensor(scale_name(name), fused.dtype, shape, (block,))


def read_safetensors(path: Path) -> list[BlockTensor]:
    """Return one file's tensors in the order of their bytes. The safetensors library checks its header."""
    try:
        if is_lfs_pointer(path):
            raise CheckpointError(f"{path} {FETCH_LFS}")
        with safe_open(path, framework="np"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {error}; {COPY_AGAIN}") from None
    header.pop("__metadata__", None)
    tensors = [_tensor(path, 8 + length, name, entry) for name, entry in header.items()]
    return sorted(tensors, key=lambda tensor: (tensor.blocks[0].position, tensor.nbytes))


def _tensor(path: Path, data: int, name: str, entry: dict[str, Any]) -> BlockTensor:
    dtype, (begin, _) = entry["dtype"], entry["data_offsets"]
    if dtype not in ITEM_BYTES:
        raise CheckpointError(
            f"{path}: tensor {name} is of type {dtype!r}; supported are {', '.join(ITEM_BYTES)}"
        )
    return whole_tensor(name, dtype, tuple(entry["shape"]), path, data + begin)


def whole_tensor(name: str, dtype: str, shape: tuple[int, ...], path: Path, position: int) -> BlockTensor:
    """Return a tensor with contiguous bytes in a file; fused experts have one row per expert row."""
    fused = expert_tensors(weight_of_scale(name) or name, shape)
    rows, columns = (prod(shape[:-1]), shape[-1]) if fused else (prod(shape[:1]), prod(shape[1:]))
    stride = columns * ITEM_BYTES[dtype]
    return BlockTensor(name, dtype, shape, (Block(0, rows, 0, columns, path, position, stride),))
