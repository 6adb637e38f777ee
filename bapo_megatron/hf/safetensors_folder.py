"""Hugging Face folders as places of tensors in files, from checked headers, without torch.

``stored_tensors`` returns a folder's tensors by name as ``BlockTensor``, ``read_safetensors_folder`` also a
tensor for each expert of fused ones. They read only headers, the index and config.json, attach scales to fp8
tensors, and raise CheckpointError for truncated or contradictory files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.blocks import ITEM_BYTES, Block, BlockTensor
from bapo_megatron.hf.config import problems_of
from bapo_megatron.hf.fp8 import BLOCK, is_quantized, scale_name, scales_problem, weight_of_scale
from bapo_megatron.hf.parameter_map import expert_tensors, fused_rows
from bapo_megatron.hf.weight_files import (
    INDEX,
    check_shard,
    json_table,
    missing_file,
    read_weight_map,
    weight_files,
)
from bapo_megatron.runtime.files import COPY_AGAIN, FETCH_LFS, check_files_inside, is_lfs_pointer

_LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library


def read_safetensors_folder(folder: Path) -> dict[str, BlockTensor]:
    """Return every tensor of a model folder by name, fused experts as a tensor each.

    Scales are attached to their fp8 weights, not tensors of their own. Raises CheckpointError, with file and
    tensor, for anything truncated, contradictory or of an unsupported type.
    """
    stored = stored_tensors(folder).values()
    return {part.name: part for tensor in stored for part in experts_apart(tensor)}


def stored_tensors(folder: Path) -> dict[str, BlockTensor]:
    """Return ``read_safetensors_folder`` with experts as the folder stores them, apart or fused."""
    check_files_inside(folder)
    by_name: dict[str, BlockTensor] = {}
    weight_map = read_weight_map(folder)
    for path in weight_files(folder):
        if weight_map is not None and not path.is_file():
            raise CheckpointError(missing_file(path, weight_map))
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
    """Yield each expert's tensors if transformers has fused them: other names for the same bytes."""
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
    """Return one file's tensors in the order of their bytes."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if is_lfs_pointer(path):
                raise CheckpointError(f"{path} {FETCH_LFS}")
            if size < 8 or length > min(size - 8, _LONGEST_HEADER):
                raise CheckpointError(
                    f"{path} is truncated or no safetensors file: {size} bytes; {COPY_AGAIN}"
                )
            header = json.loads(file.read(length), object_pairs_hook=json_table)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header cannot be read: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a table of tensors")
    header.pop("__metadata__", None)
    tensors = [_tensor(path, 8 + length, name, entry) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.blocks[0].position, tensor.nbytes))
    position = 8 + length
    for tensor in tensors:
        if tensor.blocks[0].position != position:
            raise CheckpointError(
                f"{path}: tensor {tensor.name} begins at byte {tensor.blocks[0].position}; the bytes from "
                f"{position} on are next"
            )
        position += tensor.nbytes
    if position != size:
        last = next((t.name for t in tensors if t.blocks[0].position + t.nbytes > size), "")
        where = f": it is truncated in tensor {last}" if last else ": it has more than its tensors"
        raise CheckpointError(
            f"{path} has {size} bytes; its header speaks of {position}{where}; {COPY_AGAIN}"
        )
    return tensors


def _tensor(path: Path, data: int, name: str, entry: Any) -> BlockTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path}: tensor {name}: its entry in the header is malformed") from None
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(
            f"{path}: tensor {name} is of type {dtype!r}; supported are {', '.join(ITEM_BYTES)}"
        )
    if not _counts((*shape, begin, end)):
        raise CheckpointError(f"{path}: tensor {name}: shape {shape}, bytes {begin} to {end}")
    if not shape:
        raise CheckpointError(f"{path}: tensor {name} has no dimensions; weights have one or more")
    nbytes = prod(shape) * ITEM_BYTES[dtype]
    if nbytes == 0 or end - begin != nbytes:
        raise CheckpointError(
            f"{path}: tensor {name} of shape {list(shape)} in {dtype} takes {nbytes} bytes; "
            f"the header gives it {end - begin}"
        )
    return whole_tensor(name, dtype, shape, path, data + begin)


def whole_tensor(name: str, dtype: str, shape: tuple[int, ...], path: Path, position: int) -> BlockTensor:
    """Return a tensor with contiguous bytes in a file; fused experts have one row per expert row."""
    fused = expert_tensors(weight_of_scale(name) or name, shape)
    columns = shape[-1] if fused else prod(shape[1:])
    rows, stride = prod(shape) // columns, columns * ITEM_BYTES[dtype]
    return BlockTensor(name, dtype, shape, (Block(0, rows, 0, columns, path, position, stride),))


def _counts(values: Iterable[Any]) -> bool:
    """Whether all values are non-negative integers, usable as sizes or offsets in a file."""
    return all(type(value) is int and 0 <= value < 2**62 for value in values)
