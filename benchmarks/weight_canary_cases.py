"""Setups of ``weight_canary.py``: models, versions of their weights, and the mistakes that are planted."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from bapo_megatron.config import BatchConfig, ModelConfig, OptimizerConfig, ParallelConfig
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.policy.megatron import MegatronPolicy

Weights = dict[str, Tensor]
Scores = np.ndarray
"""Log-probs of the canary, one row for each sequence, from its second token on."""

REAL_MODEL = Path(__file__).parents[1] / "models/SmolLM2-135M-Instruct"
LEARNING_RATE, UPDATES = 1e-6, 4
ATTENTION, MLP = "model.layers.1.self_attn.", "model.layers.1.mlp."


@dataclass(frozen=True)
class Setup:
    """A model, the type of its weights on trainer and server, and the canary's size."""

    name: str
    make: Callable[[Path], Path]
    """Make the model's folder in a folder."""
    dtype: str
    sequences: int
    tokens: int
    has_experts: bool = False
    has_bias: bool = False
    in_fp8: bool = False
    """Whether the server's matrices are rounded to fp8, in blocks of 128 x 128 with a scale."""


# --- models and versions ---------------------------------------------------------------------------


def random_model(kind: type[Any], config: type[Any], **settings: Any) -> Callable[[Path], Path]:
    shape = {
        "vocab_size": 4096,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "initializer_range": 0.08,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }

    def make(folder: Path) -> Path:
        torch.manual_seed(0)
        model = kind(config(**{**shape, **settings})).float()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter.data, std=0.1)
        model.save_pretrained(folder / "random")
        return folder / "random"

    return make


DENSE = random_model(transformers.Qwen2ForCausalLM, transformers.Qwen2Config, intermediate_size=1024)
EXPERTS = random_model(
    transformers.Qwen3MoeForCausalLM,
    transformers.Qwen3MoeConfig,
    head_dim=32,
    num_experts=64,
    num_experts_per_tok=8,
    moe_intermediate_size=128,
    norm_topk_prob=True,
)
SETUPS = (
    Setup("dense, random", DENSE, "float32", 4, 128, has_bias=True),
    Setup("64 experts, random", EXPERTS, "bfloat16", 4, 128, has_experts=True),
    Setup("SmolLM2-135M", lambda _: REAL_MODEL, "float32", 2, 96),
    Setup("SmolLM2-135M", lambda _: REAL_MODEL, "bfloat16", 2, 96),
    Setup("SmolLM2-135M, fp8 server", lambda _: REAL_MODEL, "bfloat16", 2, 96, in_fp8=True),
)


def read_weights(folder: Path) -> Weights:
    """The weights as float32, without a second copy of a tied output layer."""
    weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    if json.loads((folder / "config.json").read_text()).get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)
    return weights


def canary_of(folder: Path, setup: Setup) -> np.ndarray:
    """Text for the pretrained model, random tokens for a random one."""
    count = setup.sequences * setup.tokens
    if folder == REAL_MODEL:
        text = (Path(__file__).parents[1] / "docs/losses.md").read_text()
        ids = transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"][: 2 * count]
    else:
        ids = np.random.default_rng(0).integers(0, 4096, 2 * count)
    return np.asarray(ids, dtype=np.int32).reshape(2 * setup.sequences, setup.tokens)


def gradient_signs(folder: Path, ids: np.ndarray) -> Weights:
    """The signs of the gradient of the cross entropy of ``ids``, which are not the canary, by HF names."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = torch.from_numpy(ids).long()
    model(input_ids=batch, labels=batch).loss.backward()
    for parameter in model.parameters():
        parameter.data = parameter.grad.sign()
    with tempfile.TemporaryDirectory() as signs:
        model.save_pretrained(signs)  # which takes fused experts apart
        return read_weights(Path(signs))


def save_version(like: Path, folder: Path, weights: Mapping[str, Tensor], dtype: str) -> Path:
    """A Hugging Face folder with these weights alone, which may be some of the model's."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(like / "config.json", folder)
    cast = {name: one.to(getattr(torch, dtype)).contiguous() for name, one in weights.items()}
    save_file(cast, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def trainer_scores(folder: Path, dtype: Any, canary: np.ndarray) -> tuple[Scores, float]:
    """The policy's log-probs of the canary, and the seconds of its forward pass."""
    batch = BatchConfig(pack_tokens=canary.size)
    optimizer = OptimizerConfig(lr=LEARNING_RATE)
    policy = MegatronPolicy(ModelConfig(folder, dtype=dtype), ParallelConfig(), batch, optimizer, 1000)
    rows = []
    start = time.perf_counter()
    for ids in canary:
        zeros = np.zeros(len(ids) - 1)
        sample = Sample(ids, zeros.astype(np.float32), zeros.astype(np.int32), 1.0)
        [pack] = pack_samples([sample], canary.size, "token", policy.pack_layout)
        [stats] = policy.log_probs([pack])
        rows.append(stats.log_prob_T[: len(ids) - 1].float().numpy())
    return np.stack(rows), time.perf_counter() - start


def in_fp8(weights: Mapping[str, Tensor], scales_of: Mapping[str, Tensor] | None = None) -> Weights:
    """Matrices of layers after rounding to fp8. ``scales_of``: weights whose scales are multiplied back."""
    found = dict(weights)
    for name, one in weights.items():
        if one.dim() == 2 and ".layers." in name:
            own = block_scales(one)
            rounded = (one / own).to(torch.float8_e4m3fn).float()
            found[name] = rounded * (block_scales(scales_of[name]) if scales_of else own)
    return found


def block_scales(matrix: Tensor) -> Tensor:
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix.abs(), (0, -columns % 128, 0, -rows % 128))
    blocks = padded.view(padded.shape[0] // 128, 128, -1, 128).amax(dim=(1, 3)) / 448
    return blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns].clamp_min(1e-12)


# --- mistakes --------------------------------------------------------------------------------------


def not_loaded(setup: Setup) -> dict[str, tuple[str, ...]]:
    """Mistakes by which a server keeps what it had: their names, and parts of the tensors' names."""
    found = {
        "stale tensor (up_proj)": (MLP + "up_proj.weight", MLP + "experts.7.up_proj.weight"),
        "stale keys, in fused q, k, v": (ATTENTION + "k_proj.weight",),
        "stale layer norm": ("model.layers.1.input_layernorm.weight",),
        "stale embedding": ("model.embed_tokens.weight",),
    }
    if setup.has_bias:
        found["stale bias"] = (ATTENTION + "q_proj.bias",)
    if setup.has_experts:
        found["stale expert"] = (MLP + "experts.3.",)
        found["stale router"] = (MLP + "gate.weight",)
    return found


def edits(setup: Setup, weights: Weights) -> dict[str, Weights]:
    """Mistakes by which a server has other values: their names, and the tensors."""
    query, key, value = (weights[f"{ATTENTION}{name}_proj.weight"] for name in "qkv")
    expert = "experts.3." if setup.has_experts else ""
    down_name = MLP + expert + "down_proj.weight"
    down = weights[down_name]
    output = weights[name := ATTENTION + "o_proj.weight"]
    half = output.shape[1] // 2
    swapped = query.clone()
    swapped[: len(key)] = key
    found = {
        "q and k swapped": {
            ATTENTION + "q_proj.weight": swapped,
            ATTENTION + "k_proj.weight": query[: len(key)],
        },
        "k and v swapped": {ATTENTION + "k_proj.weight": value, ATTENTION + "v_proj.weight": key},
        "TP shard of another rank (o_proj)": {name: torch.cat([output[:, :half], output[:, :half]], 1)},
        "one bit: highest of the exponent": {down_name: flipped(down, setup.dtype, highest=True)},
        "one bit: lowest of the exponent": {down_name: flipped(down, setup.dtype, exponent=True)},
        "one bit: lowest of the mantissa": {down_name: flipped(down, setup.dtype)},
    }
    if setup.has_experts:
        parts = [f"{one}_proj.weight" for one in ("gate", "up", "down")]
        pairs = [(MLP + f"experts.3.{part}", MLP + f"experts.4.{part}") for part in parts]
        found["two experts swapped"] = {
            own: weights[other] for pair in pairs for own, other in (pair, pair[::-1])
        }
    return found


def flipped(matrix: Tensor, dtype: str, exponent: bool = False, highest: bool = False) -> Tensor:
    """``matrix`` with one bit of its median element flipped."""
    kind, bits = (torch.int32, 23) if dtype == "float32" else (torch.int16, 7)
    bit = 30 - 16 * (dtype != "float32") if highest else bits if exponent else 0
    made = matrix.to(getattr(torch, dtype)).clone()
    place = int(made.abs().flatten().float().median(0).indices)
    made.view(kind).view(-1)[place] ^= 1 << bit
    return made
