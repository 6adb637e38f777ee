"""Reference converter by torch.distributed.checkpoint, with the whole model in memory.

Slow, simple, and independent of checkpoints_tools, which benchmarks and tests compare with it.

    python -m benchmarks.dcp_convert to-megatron HF_DIR OUT
    python -m benchmarks.dcp_convert to-hf HF_DIR CHECKPOINT OUT     (HF_DIR: for config and tokenizer)
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

from bapo_megatron.hf.config import ModelShape, read_model_shape
from bapo_megatron.hf.parameter_map import checkpoint_keys, mapping_table
from bapo_megatron.policy.weight_map import join, split


def to_megatron(hf_folder: Path, output: Path) -> None:
    """Weights alone, a chunk for each key."""
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
    """One file, with the other files of ``hf_folder``."""
    shape = read_model_shape(hf_folder)
    reader = dcp.FileSystemReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata
    table = mapping_table(shape)
    state = {
        key: torch.empty(stored[key].size, dtype=stored[key].properties.dtype)
        for key in (_key(name, shape) for name in table)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    tensors = {}
    for name, mapping in table.items():
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
    {"to-megatron": to_megatron, "to-hf": to_hf}[sys.argv[1]](*map(Path, sys.argv[2:]))
