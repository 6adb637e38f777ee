"""Writer of legacy mp_rank checkpoints for tests, in torch: a ``torch.save`` file for each TP and PP rank.

It cuts the model as Megatron-LM does, with Transformer Engine's names, and shares no code with the reader.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from bapo_megatron.hf.config import ModelShape, read_model_shape
from checkpoints_tools.conversion import carried_beside
from checkpoints_tools.hf_to_megatron import arguments
from tests.support.checkpoint_models import load_tensors

Tensors = dict[str, torch.Tensor]
_STATEFUL = (
    *("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
    *("q_layernorm", "k_layernorm", "final_layernorm"),
)
"""Modules that have an ``_extra_state`` in Transformer Engine."""


def save_legacy(hf: Path, output: Path, tensor: int = 1, pipeline: int = 1, multiple: int = 128) -> None:
    """The model of a Hugging Face folder as ``output/release/mp_rank_*``, one file for each TP and PP rank.

    ``multiple``: of the vocabulary's rows on each TP rank.
    """
    shape, source, release = read_model_shape(hf), load_tensors(hf), output / "release"
    rows = -(-shape.vocab // (multiple * tensor)) * multiple * tensor
    sizes = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "padded_vocab_size": rows,
    }
    state = {
        "args": argparse.Namespace(**{**arguments(shape), **sizes}),
        "checkpoint_version": 3.0,
        "iteration": 0,
    }
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in source:
            source[name] = pad(source[name], (0, 0, 0, rows - shape.vocab))
    for stage in range(pipeline):
        for rank in range(tensor):
            folder = release / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipeline > 1 else ""))
            folder.mkdir(parents=True)
            model = _model_state(source, shape, (rank, tensor), (stage, pipeline))
            torch.save({**state, "model": model}, folder / "model_optim_rng.pt")
    for path, origin in carried_beside(hf, release).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin, path)
    (output / "latest_checkpointed_iteration.txt").write_text("release")


def _model_state(
    source: Tensors, shape: ModelShape, tensor: tuple[int, int], pipeline: tuple[int, int]
) -> dict[str, Any]:
    """State dict of one rank. ``tensor``, ``pipeline``: rank and size of each group."""
    rank, ranks = tensor
    stage, stages = pipeline

    def part(whole: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return whole.chunk(ranks, dim)[rank].clone(memory_format=torch.contiguous_format)

    state: dict[str, Any] = {}
    if stage == 0:
        state["embedding.word_embeddings.weight"] = part(source["model.embed_tokens.weight"])
    count = shape.layers // stages
    for layer in range(count):
        hf = f"model.layers.{stage * count + layer}."
        mine = {name.removeprefix(hf): value for name, value in source.items() if name.startswith(hf)}
        attention, mlp = f"decoder.layers.{layer}.self_attention.", f"decoder.layers.{layer}.mlp."
        state[f"{attention}linear_qkv.layer_norm_weight"] = mine["input_layernorm.weight"]
        state[f"{attention}linear_qkv.weight"] = part(_qkv(mine, shape, "weight"))
        if shape.attention.qkv_bias:
            state[f"{attention}linear_qkv.bias"] = part(_qkv(mine, shape, "bias"))
        if shape.attention.qk_norm:
            state[f"{attention}q_layernorm.weight"] = mine["self_attn.q_norm.weight"]
            state[f"{attention}k_layernorm.weight"] = mine["self_attn.k_norm.weight"]
        state[f"{attention}linear_proj.weight"] = part(mine["self_attn.o_proj.weight"], 1)
        state[f"{mlp}linear_fc1.layer_norm_weight"] = mine["post_attention_layernorm.weight"]
        gate, up = (part(mine[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        state[f"{mlp}linear_fc1.weight"] = torch.cat([gate, up])
        state[f"{mlp}linear_fc2.weight"] = part(mine["mlp.down_proj.weight"], 1)
    if stage == stages - 1:
        state["decoder.final_layernorm.weight"] = source["model.norm.weight"]
        # The last stage of a tied model has a copy of the embedding, unless it is the first stage, too.
        if not shape.tied or stages > 1:
            output = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
            state["output_layer.weight"] = part(source[output])
    modules = {key.rpartition(".")[0] for key in state}
    return state | {f"{module}._extra_state": None for module in modules if module.endswith(_STATEFUL)}


def _qkv(layer: Tensors, shape: ModelShape, kind: str) -> torch.Tensor:
    """Megatron's fused QKV of a layer: for each KV group its queries, key and value, [rows, ...]."""
    q, k, v = (layer[f"self_attn.{name}_proj.{kind}"] for name in "qkv")
    grouped = [whole.view(shape.attention.kv_heads, -1, *whole.shape[1:]) for whole in (q, k, v)]
    return torch.cat(grouped, 1).reshape(-1, *q.shape[1:])
