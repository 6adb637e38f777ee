"""Reader of Hugging Face folders: positions of the tensors, from the checked headers of the safetensors.

It reads headers, the index and config.json alone. A tensor in fp8 has its scales with it. CheckpointError for
whatever is truncated or contradictory. Used in ``checkpoints_tools/`` and this folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.config import missing_file
from bapo_megatron.hf.fp8 import BLOCK, is_quantized, scale_name, scales_problem, weight_of_scale
from bapo_megatron.hf.parameter_map import expert_tensors, fused_rows
from bapo_megatron.runtime.files import (
    COPY_AGAIN,
    FETCH_LFS,
    check_files_inside,
    file_inside,
    is_lfs_pointer,
    read_file_inside,
)
from checkpoints_tools.core.blocks import ITEM_BYTES, Block, BlockTensor
from checkpoints_tools.core.comparing import tensor_difference

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library
_SHOWN = 8
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def read_safetensors_folder(folder: Path) -> dict[str, BlockTensor]:
    """Every tensor of the folder by its name, from one file or from those that the index lists.

    Scales are no tensors of their own: they are with the weights in fp8 that they belong to. CheckpointError,
    with file and tensor, for whatever is truncated, contradictory or of a type that these tools do not move.
    """
    check_files_inside(folder)
    found: dict[str, BlockTensor] = {}
    weight_map = read_weight_map(folder)
    for file in sorted(set(weight_map.values())) if weight_map is not None else [SINGLE]:
        if weight_map is not None and not file_inside(folder, file).is_file():
            first, *others = sorted(name for name, held in weight_map.items() if held == file)
            raise CheckpointError(missing_file(folder / file, first, len(others)))
        for tensor in read_safetensors(folder / file):
            if weight_map is not None and weight_map.get(tensor.name) != file:
                raise CheckpointError(
                    f"{folder / file} holds tensor {tensor.name}, which {INDEX} "
                    + (
                        "does not list"
                        if tensor.name not in weight_map
                        else f"places in {weight_map[tensor.name]}"
                    )
                )
            found[tensor.name] = tensor
    for name, file in (weight_map or {}).items():
        if name not in found:
            raise CheckpointError(f"{folder / file} holds no tensor {name}, which {INDEX} places there")
    found = _with_scales(found, folder)
    return {one.name: one for tensor in found.values() for one in _experts_apart(tensor)}


def without_tied_copy(tensors: dict[str, BlockTensor], folder: Path) -> dict[str, BlockTensor]:
    """The tensors of a tied model without the copy of the embedding that many have as the output layer.

    CheckpointError for one that is not equal, with which transformers would compute.
    """
    kept = {name: tensor for name, tensor in tensors.items() if name != _OUTPUT}
    copy, own = tensors.get(_OUTPUT), kept.get(_EMBEDDING)
    if copy is not None and own is not None and (difference := tensor_difference(copy, own)):
        raise CheckpointError(
            f"model folder {folder}: config.json ties {_OUTPUT} to {_EMBEDDING}, but it {difference}: "
            f'set "tie_word_embeddings": false there if the model was trained so, else remove {_OUTPUT}'
        )
    return kept


def _with_scales(found: dict[str, BlockTensor], folder: Path) -> dict[str, BlockTensor]:
    """The tensors of a folder, those in fp8 with their scales. CheckpointError if the two do not fit."""
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
        more = f"\n... and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError(f"model folder {folder}:\n" + "\n".join(wrong[:_SHOWN]) + more)
    return {name: replace(tensor, scales=scales.get(name)) for name, tensor in weights.items()}


def _experts_apart(tensor: BlockTensor) -> Iterator[BlockTensor]:
    """The tensors of each expert, where transformers has fused them: other names for the same bytes."""
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
    """The scales of one expert's tensor, whose rows begin with a block, among those of all experts."""
    [whole] = fused.blocks
    shape = (-(-(rows.stop - rows.start) // BLOCK), fused.shape[2])
    position = whole.position + (expert * fused.shape[1] + rows.start // BLOCK) * whole.stride
    block = replace(whole, rows=shape[0], position=position)
    return BlockTensor(scale_name(name), fused.dtype, shape, (block,))


def read_weight_map(folder: Path) -> dict[str, str] | None:
    """Weight map of the folder's index: the file of each tensor; None for a folder of a single file."""
    index, single = folder / INDEX, folder / SINGLE
    if not index.exists():
        if single.exists():
            return None
        raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}")
    try:
        weight_map = _parse(read_file_inside(folder, INDEX))["weight_map"]
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r:.200}") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is no table of tensors")
    for name, file in weight_map.items():
        if not isinstance(file, str) or file != Path(file).name:
            raise CheckpointError(
                f"{index}: tensor {name} is placed in {file!r}, which names no file beside it"
            )
    if single.exists() and SINGLE not in weight_map.values():
        raise CheckpointError(f"{folder} holds both {SINGLE} and {INDEX}, which does not list it: remove one")
    return weight_map


def read_safetensors(path: Path) -> list[BlockTensor]:
    """The tensors of one file, in the order of their bytes."""
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
            header = _parse(file.read(length))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header cannot be read: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is no table of tensors")
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
    if not 1 <= len(shape) <= (3 if expert_tensors(weight_of_scale(name) or name, shape) else 2):
        raise CheckpointError(f"{path}: tensor {name} has {len(shape)} dimensions; weights have one or two")
    nbytes = prod(shape) * ITEM_BYTES[dtype]
    if nbytes == 0 or end - begin != nbytes:
        raise CheckpointError(
            f"{path}: tensor {name} of shape {list(shape)} in {dtype} takes {nbytes} bytes; "
            f"the header gives it {end - begin}"
        )
    columns = shape[-1] if len(shape) > 1 else 1
    rows, stride = prod(shape) // columns, columns * ITEM_BYTES[dtype]
    return BlockTensor(name, dtype, shape, (Block(0, rows, 0, columns, path, data + begin, stride),))


def _counts(values: Iterable[Any]) -> bool:
    """Whether all values are non-negative integers that can be sizes or offsets in a file."""
    return all(type(value) is int and 0 <= value < 2**62 for value in values)


def _parse(text: bytes) -> Any:
    """Parse JSON; ValueError for a duplicate key."""

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{twice} stands there twice")
        return result

    return json.loads(text, object_pairs_hook=table)
