"""Reference converter through torch.distributed.checkpoint, with the whole model in memory.

Slow, simple, and independent of checkpoints_tools: benchmarks and tests compare both. A conversion to Hugging
Face copies config and tokenizer from HF_DIR; to-hf-by-megatron reads with megatron-core's
``load_plain_tensors``.

    python -m benchmarks.dcp_convert to-megatron HF_DIR OUT
    python -m benchmarks.dcp_convert to-hf HF_DIR CHECKPOINT OUT
    python -m benchmarks.dcp_convert to-hf-by-megatron HF_DIR CHECKPOINT OUT
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

from bapo_megatron.hf.config import ModelShape, read_model_shape
from bapo_megatron.hf.parameter_map import checkpoint_keys, mapping_table
from bapo_megatron.policy.weight_map import split
from tests.support.checkpoint_models import join


def to_megatron(hf_folder: Path, output: Path) -> None:
    """Write a Megatron checkpoint of the weights alone, with a chunk per key."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(hf_folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    shape = read_model_shape(hf_folder)
    state = {}
    for name, mapping in mapping_table(shape).items():
        places = mapping.places
        joined = [join(mapping, [tensors[n.format(layer=i)] for n in mapping.hf_names]) for i in places]
        state[_key(name, shape)] = joined[0] if mapping.layers is None else torch.stack(joined)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(output), no_dist=True)
    torch.save({"content_metadata": {"singleton_local_shards": False}}, output / "common.pt")


def _key(name: str, shape: ModelShape) -> str:
    return checkpoint_keys(name, shape.blocks[0])[0]


def to_hf(hf_folder: Path, checkpoint: Path, output: Path) -> None:
    """Write one safetensors file, and copy the other files of ``hf_folder``."""
    shape = read_model_shape(hf_folder)
    reader = dcp.FileSystemReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(stored[key].size, dtype=stored[key].properties.dtype)
        for key in (_key(name, shape) for name in mapping_table(shape))
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    _save_hf(state, shape, hf_folder, output)


def to_hf_by_megatron(hf_folder: Path, checkpoint: Path, output: Path) -> None:
    """Same as ``to_hf``, through megatron-core's reader."""
    from megatron.core import dist_checkpointing

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    state = dist_checkpointing.load_plain_tensors(str(checkpoint))
    _save_hf(state, read_model_shape(hf_folder), hf_folder, output)


def _save_hf(state: Mapping[str, Tensor], shape: ModelShape, hf_folder: Path, output: Path) -> None:
    tensors = {}
    for name, mapping in mapping_table(shape).items():
        for layer in mapping.places:
            value = state[_key(name, shape)]
            parts = split(mapping, value if layer is None else value[layer])
            for hf_name, tensor in zip(mapping.hf_names, parts, strict=True):
                tensors[hf_name.format(layer=layer)] = tensor.contiguous()
    output.mkdir()
    save_file(tensors, output / "model.safetensors", {"format": "pt"})
    for path in hf_folder.iterdir():
        if path.is_file() and "safetensors" not in path.name:
            shutil.copyfile(path, output / path.name)


if __name__ == "__main__":
    commands = {"to-megatron": to_megatron, "to-hf": to_hf, "to-hf-by-megatron": to_hf_by_megatron}
    commands[sys.argv[1]](*map(Path, sys.argv[2:]))
