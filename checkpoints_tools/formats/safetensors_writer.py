"""Writer of Hugging Face folders: output plan of safetensors files, byte for byte those of the library.

It plans; ``conversion.py`` writes. Used by ``benchmarks/checkpoint_convert.py`` and
``checkpoints_tools/to_hf.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.fp8 import FP8, scale_name
from checkpoints_tools.core.blocks import ITEM_BYTES, Block, BlockTensor
from checkpoints_tools.core.output_plan import PARTIAL, OutputPlan
from checkpoints_tools.formats.safetensors_folder import INDEX, SINGLE


@dataclass(frozen=True)
class Sharding:
    """The assignment of tensors to files: by a given weight map, else by a largest size.

    Made by ``to_hf``.
    """

    most_bytes: int
    """Largest size of a file, where ``weight_map`` does not say; a file of one tensor may be larger."""
    weight_map: Mapping[str, str] | None = None
    """The file of each tensor, as an index gives it."""
    index: bytes | None = None
    """The index that goes with ``weight_map``, kept as it is if the tensors still have the size it gives."""


def plan_safetensors(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], folder: Path, sharding: Sharding
) -> OutputPlan:
    """The files of ``folder`` for tensors given as type and shape by name, in their natural order.

    Tensors in fp8 are planned with their scales, which are among ``tensors``. ConfigError if the sharding's
    weight map is one of other tensors.
    """
    output = OutputPlan()
    weight_map = _weight_map(tensors, sharding)
    names_of: dict[str, list[str]] = {}
    for name in tensors:
        names_of.setdefault(weight_map[name], []).append(name)
    for file, names in names_of.items():
        path = folder / (file + PARTIAL)
        header, placed = _file({name: tensors[name] for name in names}, path)
        output.around.append((path, 0, header))
        output.sizes[path] = len(header) + sum(tensor.nbytes for tensor in placed)
        output.tensors.update((tensor.name, tensor) for tensor in placed)
    if set(weight_map.values()) != {SINGLE}:
        output.last[folder / INDEX] = _index(output, weight_map, sharding)
    for name, tensor in list(output.tensors.items()):
        if tensor.dtype == FP8:
            output.tensors[name] = replace(tensor, scales=output.tensors.pop(scale_name(name)))
    return output


def _index(output: OutputPlan, weight_map: Mapping[str, str], sharding: Sharding) -> bytes:
    total = sum(tensor.nbytes for tensor in output.tensors.values())
    if sharding.weight_map is not None and sharding.index is not None:
        given = json.loads(sharding.index).get("metadata")
        same = json.loads(sharding.index).get("weight_map") == weight_map
        if same and isinstance(given, dict) and given.get("total_size") == total:
            return sharding.index
    made = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(made, indent=2) + "\n").encode()


def _weight_map(tensors: Mapping[str, tuple[str, tuple[int, ...]]], sharding: Sharding) -> Mapping[str, str]:
    if sharding.weight_map is not None:
        known = sharding.weight_map
        if different := sorted(set(known) ^ set(tensors)):
            there = "is not in the index" if different[0] in tensors else "is in the index alone"
            raise ConfigError(
                f"the index is one of another model: tensor {different[0]} {there}; "
                "--shard-gb deals the tensors to files anew"
            )
        return known
    shards: list[list[str]] = [[]]
    filled = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = prod(shape) * ITEM_BYTES[dtype]
        if shards[-1] and filled + nbytes > sharding.most_bytes:
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


def _file(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], path: Path
) -> tuple[bytes, Sequence[BlockTensor]]:
    """The header of a file, and its tensors in their places."""
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
        columns = prod(shape[1:])
        block = Block(0, shape[0], 0, columns, path, data + begin, columns * ITEM_BYTES[dtype])
        placed.append(BlockTensor(name, dtype, shape, (block,)))
    return len(text).to_bytes(8, "little") + text, placed
