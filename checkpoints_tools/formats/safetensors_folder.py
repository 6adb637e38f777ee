"""Planner of Hugging Face folders, with files byte-identical to those of the safetensors library.

``plan_safetensors`` returns the plan, which ``conversion.convert`` writes. ``untrained_tensors`` returns the
tensors that Megatron's model lacks, such as vision's; ``without_tied_copy`` drops an output layer that copies
the embedding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from bapo_megatron.errors import CheckpointError, ConfigError
from bapo_megatron.hf.blocks import ITEM_BYTES, BlockTensor
from bapo_megatron.hf.config import ModelShape
from bapo_megatron.hf.fp8 import FP8, scale_name
from bapo_megatron.hf.parameter_map import EMBEDDING, OUTPUT, fused_experts
from bapo_megatron.hf.safetensors_folder import (
    experts_apart,
    read_safetensors,
    read_safetensors_folder,
    whole_tensor,
)
from bapo_megatron.hf.weight_files import INDEX, SINGLE
from checkpoints_tools.core.atomic_output import PARTIAL, OutputPlan
from checkpoints_tools.core.comparing import tensor_difference

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

    A fused tensor of experts is in the plan as each expert's tensors. ``most_bytes``: limit of a file with
    several tensors, unless ``given``, a weight map, assigns files. ``index``: that map's index, kept if the
    tensors still have its total size. Raises ConfigError if the weight map is of other tensors.
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
        output.tensors |= {part.name: part for tensor in placed for part in experts_apart(tensor)}
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
        placed.append(whole_tensor(name, dtype, shape, path, data + begin))
    return len(text).to_bytes(8, "little") + text, placed
