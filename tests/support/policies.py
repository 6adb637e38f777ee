"""Small policies of the real trainer, and updates of them, for tests of several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bapo_megatron.algo.bapo import grpo
from bapo_megatron.algo.bounds import search_bounds
from bapo_megatron.config import (
    AlgorithmConfig,
    BatchConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
)
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.tensor_types import UpdateResult
from tests.support.bapo_objective import loss_fn

ONE = ParallelConfig()


def small_policy(
    folder: Path, parallel: ParallelConfig = ONE, dtype: str = "float32", reader: Any = None, **optimizer: Any
) -> MegatronPolicy:
    """A policy of packs of 96 tokens, with a learning rate of 1e-3, for six updates."""
    settings = OptimizerConfig(**{"lr": 1e-3, **optimizer})
    batch = BatchConfig(pack_tokens=96)
    return MegatronPolicy(ModelConfig(folder, dtype), parallel, batch, settings, 6, reader=reader)


def updates_of(policy: MegatronPolicy, samples: list[Sample], count: int = 1) -> list[UpdateResult]:
    """The results of ``count`` updates with fixed bounds."""
    packs = pack_samples(samples, 96, "token", policy.pack_layout)
    found = search_bounds(torch.zeros(2, dtype=torch.float64), grpo())
    return [policy.update(packs, loss_fn(found, grpo(), policy.version)) for _ in range(count)]


def weights_of(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    """The weights as they are now, by the names of the model's folder."""
    return {name: tensor.clone() for name, tensor in policy.hf_weights()}


def stepping(
    folder: Path, parallel: ParallelConfig, algorithm: AlgorithmConfig, temperature: float = 1.0, **more: Any
) -> tuple[RunConfig, MegatronPolicy]:
    """A run in float32 whose steps are proportional to gradients, and its policy."""
    given = {"optimizer": OptimizerConfig(lr=1.0, eps=1.0), "batch": BatchConfig(pack_tokens=96), **more}
    model, data = ModelConfig(folder, "float32"), DataConfig(Path("none"))
    config = RunConfig("test", model, data, parallel=parallel, algorithm=algorithm, **given)
    return config, MegatronPolicy(model, parallel, config.batch, config.optimizer, 4, temperature)
