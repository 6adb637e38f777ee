"""Hugging Face folders whose tensors are random bits: NaNs with payloads, infinities, denormals and all."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bapo_megatron.hf.config import read_model_shape
from bapo_megatron.hf.parameter_map import hf_tensors
from bapo_megatron.layers import Mapping
from bapo_megatron.runtime.written_folders import MARK
from tests.support.models import _LLAMA_ROPE

TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_BITS = {"BF16": torch.int16, "F16": torch.int16, "F32": torch.int32}
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 24},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 24,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "llama": {"architectures": ["LlamaForCausalLM"], "rope_scaling": _LLAMA_ROPE},
}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """A tiny config.json of one of the families."""
    return {
        "model_type": family,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 101,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        **_FAMILIES[family],
        **changes,
    }


def save_random_model(
    folder: Path, family: str = "qwen2", dtype: str = "BF16", files: int = 1, **changes: Any
) -> Path:
    """The folder, with a tokenizer's files; ``changes`` are fields of its config.json."""
    folder.mkdir(parents=True)
    changes = {"torch_dtype": str(TYPES[dtype]).removeprefix("torch."), **changes}
    (folder / "config.json").write_text(json.dumps(config_of(family, **changes), indent=1))
    (folder / "generation_config.json").write_text('{"eos_token_id": [2]}')
    (folder / "tokenizer.json").write_bytes(b'{"model": "\xc3\xa9"}\r\n')
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}\n\n")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tools.jinja").write_text("{{ tools }}")
    generator = torch.Generator().manual_seed(len(family) + files)
    tensors = {
        name: torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=_BITS[dtype])
        for name, shape in hf_tensors(read_model_shape(folder)).items()
    }
    if dtype == "F32":  # both halves of each number
        tensors = {name: tensor * 65537 + 12345 for name, tensor in tensors.items()}
    save_tensors(folder, {name: tensor.view(TYPES[dtype]) for name, tensor in tensors.items()}, files)
    return folder


def save_tensors(folder: Path, tensors: dict[str, torch.Tensor], files: int = 1) -> None:
    """As ``model.safetensors``, or in several files with an index."""
    if files == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {
        name: f"model-{i % files + 1:05d}-of-{files:05d}.safetensors" for i, name in enumerate(names)
    }
    for file in set(weight_map.values()):
        held = {name: tensors[name] for name in names if weight_map[name] == file}
        save_file(held, folder / file, {"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def save_changed(model: Path, folder: Path, **changes: torch.Tensor | None) -> Path:
    """A folder of the model's config.json and tensors, with other ones by name; None leaves one out."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    tensors = {**load_tensors(model), **changes}
    save_tensors(folder, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    return folder


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder, as the safetensors library reads them."""
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found.update(load_file(path))
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, so that NaNs compare as well."""
    return tensor.contiguous().view(torch.uint8)


def folder_bytes(folder: Path) -> dict[str, bytes]:
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and MARK not in p.name)
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def edit_metadata(folder: Path, change: Callable[[Any], None]) -> None:
    """Change the .metadata of a torch_dist checkpoint, as torch reads and writes it."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def join(mapping: Mapping, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """HF tensors joined into the unsharded parameter."""
    return torch.cat([tensors[s.source].narrow(0, s.row, s.rows) for s in mapping.segments])
