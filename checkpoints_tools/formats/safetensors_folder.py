"""Hugging Face folders as bytes: positions of tensors, from checked headers, and the plan of a new folder.

``read_safetensors_folder`` returns every tensor by name as a ``BlockTensor``; it reads only headers, the
index and config.json, attaches scales to fp8 tensors, and raises CheckpointError for truncated or
contradictory files. ``plan_safetensors`` returns the plan of files byte-identical to the safetensors
library's, for ``convert`` to write.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from bapo_megatron.errors import CheckpointError, ConfigError
from bapo_megatron.hf.config import ModelShape, problems_of
from bapo_megatron.hf.fp8 import BLOCK, FP8, is_quantized, scale_name, scales_problem, weight_of_scale
from bapo_megatron.hf.parameter_map import EMBEDDING, OUTPUT, expert_tensors, fused_experts, fused_rows
from bapo_megatron.hf.weight_files import (
    INDEX,
    SINGLE,
    check_shard,
    json_table,
    missing_file,
    read_weight_map,
    weight_files,
)
from bapo_megatron.runtime.files import COPY_AGAIN, FETCH_LFS, check_files_inside, is_lfs_pointer
from checkpoints_tools.core.atomic_output import PARTIAL, OutputPlan
from checkpoints_tools.core.blocks import ITEM_BYTES, Block, BlockTensor
from checkpoints_tools.core.comparing import tensor_difference

_LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library


def read_safetensors_folder(folder: Path) -> dict[str, BlockTensor]:
    """Return every tensor of the folder by name, from one file or the index's files.

    Scales are attached to their fp8 weights, not tensors of their own. Raises CheckpointError, with file and
    tensor, for anything truncated, contradictory or of an unsupported type.
    """
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
    by_name = _with_scales(by_name, folder)
    return {part.name: part for tensor in by_name.values() for part in _experts_apart(tensor)}


UNTRAINED = "untrained.safetensors"
"""File in a Megatron checkpoint's Hugging Face folder with the tensors that Megatron's model lacks."""


def untrained_tensors(folder: Path, shape: ModelShape) -> dict[str, BlockTensor]:
    """Return a folder's untrained tensors, such as those of vision, from the model or ``UNTRAINED``. Raises
    ConfigError for a folder that lacks the model's untrained tensors. fp8 ones are written as bfloat16."""
    if not shape.untrained:
        return {}
    if (folder / UNTRAINED).is_file():
        return {tensor.name: tensor for tensor in read_safetensors(folder / UNTRAINED)}
    named = any((folder / name).is_file() for name in (SINGLE, INDEX))
    if named or any(folder.glob("*-of-*.safetensors")):
        tensors = read_safetensors_folder(folder)
        return {name: tensor for name, tensor in tensors.items() if name.startswith(shape.untrained)}
    names = " and ".join(f"{prefix}*" for prefix in shape.untrained)
    raise ConfigError(
        f"{folder} has no weights, so that {names}, which are not trained, would be missing: give the "
        "model's folder as --hf-reference"
    )


def without_tied_copy(
    tensors: dict[str, BlockTensor], folder: Path, embedding: str = EMBEDDING
) -> dict[str, BlockTensor]:
    """Return a tied model's tensors without the common copy of the embedding as output layer. Raises
    CheckpointError for an unequal copy, which transformers would use."""
    kept = {name: tensor for name, tensor in tensors.items() if name != OUTPUT}
    copy, own = tensors.get(OUTPUT), kept.get(embedding)
    if copy is not None and own is not None and (difference := tensor_difference(copy, own)):
        raise CheckpointError(
            f"model folder {folder}: config.json ties {OUTPUT} to {embedding}, but it {difference}: "
            f'set "tie_word_embeddings": false there if the model was trained so, else remove {OUTPUT}'
        )
    return kept


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


def _experts_apart(tensor: BlockTensor) -> Iterator[BlockTensor]:
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
    return _whole(name, dtype, shape, path, data + begin)


def _whole(name: str, dtype: str, shape: tuple[int, ...], path: Path, position: int) -> BlockTensor:
    """Return a tensor with contiguous bytes in a file; fused experts have one row per expert row."""
    fused = expert_tensors(weight_of_scale(name) or name, shape)
    columns = shape[-1] if fused else prod(shape[1:])
    rows, stride = prod(shape) // columns, columns * ITEM_BYTES[dtype]
    return BlockTensor(name, dtype, shape, (Block(0, rows, 0, columns, path, position, stride),))


def _counts(values: Iterable[Any]) -> bool:
    """Whether all values are non-negative integers, usable as sizes or offsets in a file."""
    return all(type(value) is int and 0 <= value < 2**62 for value in values)


# --- writer ---

Planned = Mapping[str, tuple[str, tuple[int, ...]]]
"""Types and shapes of tensors by name."""


def with_fused_experts(tensors: Planned) -> Planned:
    """Return the tensors with each layer's experts fused into one of gates and ups, and one of downs."""
    own: dict[str, str] = {}
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for fused, names in fused_experts(tensors).items():
        dtype, (rows, columns) = tensors[names[0]]
        stacked = 1 if fused.endswith(".down_proj") else 2
        shapes[fused] = dtype, (len(names) // stacked, stacked * rows, columns)
        own |= dict.fromkeys(names, fused)
    places = {own.get(name, name): tensor for name, tensor in tensors.items()}
    return {**places, **shapes}


def plan_safetensors(
    tensors: Planned,
    folder: Path,
    most_bytes: int,
    given: Mapping[str, str] | None = None,
    index: bytes | None = None,
) -> OutputPlan:
    """Return the plan of ``folder`` for ``tensors`` in natural order, fp8 ones with their scales.

    Each expert's tensors in the plan are places in a fused one. ``most_bytes``: limit of a file with several
    tensors, unless ``given``, a weight map, assigns files. ``index``: that map's index, kept if the tensors
    still have its total size. Raises ConfigError if the weight map is of other tensors.
    """
    output = OutputPlan()
    weight_map = _checked_map(tensors, given) if given is not None else _dealt(tensors, most_bytes)
    names_of: dict[str, list[str]] = {}
    for name in tensors:
        names_of.setdefault(weight_map[name], []).append(name)
    for file, names in names_of.items():
        path = folder / (file + PARTIAL)
        header, placed = _file({name: tensors[name] for name in names}, path)
        output.around[path].append((0, header))
        output.sizes[path] = len(header) + sum(tensor.nbytes for tensor in placed)
        output.tensors |= {part.name: part for tensor in placed for part in _experts_apart(tensor)}
    if set(weight_map.values()) != {SINGLE}:
        output.last[folder / INDEX] = _index(output, weight_map, index if given is not None else None)
    for name, tensor in list(output.tensors.items()):
        if tensor.dtype == FP8:
            output.tensors[name] = replace(tensor, scales=output.tensors.pop(scale_name(name)))
    return output


def _index(output: OutputPlan, weight_map: Mapping[str, str], known: bytes | None) -> bytes:
    """Return a folder's index; ``known`` if it fits these tensors."""
    total = sum(tensor.nbytes for tensor in output.tensors.values())
    if known is not None:
        stored = json.loads(known).get("metadata")
        same = json.loads(known).get("weight_map") == weight_map
        if same and isinstance(stored, dict) and stored.get("total_size") == total:
            return known
    made = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(made, indent=2) + "\n").encode()


def _checked_map(tensors: Planned, given: Mapping[str, str]) -> Mapping[str, str]:
    if different := sorted(set(given) ^ set(tensors)):
        there = "is not in the index" if different[0] in tensors else "is in the index alone"
        raise ConfigError(
            f"the index is one of another model: tensor {different[0]} {there}; "
            "--shard-gb deals the tensors to files anew"
        )
    return given


def _dealt(tensors: Planned, most_bytes: int) -> Mapping[str, str]:
    """Return each tensor's file: as many per file as fit into ``most_bytes``."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = prod(shape) * ITEM_BYTES[dtype]
        if shards[-1] and filled + nbytes > most_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
    if len(shards) == 1:
        return dict.fromkeys(tensors, SINGLE)
    count = f"{len(shards):05d}"
    return {
        name: f"model-{i:05d}-of-{count}.safetensors" for i, names in enumerate(shards, 1) for name in names
    }


def _file(tensors: Planned, path: Path) -> tuple[bytes, Sequence[BlockTensor]]:
    """Return a file's header, and its tensors in their places."""
    order = sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name][0]], name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins = []
    end = 0
    for name in order:
        dtype, shape = tensors[name]
        begins.append(end)
        end += prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begins[-1], end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    data = 8 + len(text)
    placed = []
    for name, begin in zip(order, begins, strict=True):
        dtype, shape = tensors[name]
        placed.append(_whole(name, dtype, shape, path, data + begin))
    return len(text).to_bytes(8, "little") + text, placed
