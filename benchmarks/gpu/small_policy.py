"""Small policy for GPU checks: a few layers at real widths, and an Adam step without a loss."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any, Literal

import torch

from bapo_megatron.config import BatchConfig, ModelConfig, OptimizerConfig, ParallelConfig
from bapo_megatron.policy.device import release_cached_memory
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.policy.optimizer import clipped_step
from benchmarks.gpu import memory_and_speed
from benchmarks.gpu.rows import Size

LAYERS = 4
"""With Qwen2.5-1.5B's vocabulary 0.65 billion parameters: 12 GB with moments, 9 GB of it on the host."""
CLIP = 1.0


def save(size: Size, folder: Path) -> Path:
    """Folder of the model, in Hugging Face format; the first call writes it."""
    path = folder / "small_policy"
    if not path.exists():
        memory_and_speed.save(dataclasses.replace(size, layers=min(size.layers, LAYERS)), path)
    return path


def build(
    path: Path, dtype: Literal["bfloat16", "float32"], device: Literal["model", "cpu"]
) -> MegatronPolicy:
    """The policy; ``device`` is the optimizer's. Frees the memory of earlier policies first."""
    gc.collect()  # a policy is a reference cycle
    release_cached_memory()
    optimizer = OptimizerConfig(lr=1e-3, clip_grad=CLIP, device=device)
    return MegatronPolicy(
        ModelConfig(path, dtype=dtype), ParallelConfig(), BatchConfig(pack_tokens=256), optimizer, 100
    )


def adam_step(policy: MegatronPolicy, seed: int) -> float:
    """One step on gradients drawn from ``seed``, equal for every policy of this shape. Returns their norm.

    A backward pass on a GPU adds in any order, so two policies would get different gradients.
    """
    generator = torch.Generator(policy.device).manual_seed(seed)
    for chunk in policy._model:
        buffers: list[Any] = chunk.buffers
        for buffer in buffers:
            buffer.grad_data.normal_(generator=generator)
    policy._schedule.step(increment=1)
    return clipped_step(policy._optimizer, CLIP)
