"""BAPO's objective at given bounds, as the functions that tests of policies and layouts call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.algo.bapo import Bounds, BoundsConfig
from bapo_megatron.algo.diagnostics import AGE_METRICS
from bapo_megatron.algo.losses.clip import ClipLoss
from bapo_megatron.algo.objective import Objective
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.tensor_types import MicroBatch, TokenFn, TokenStats
from bapo_megatron.types import Metrics


def objective(config: BoundsConfig) -> Objective:
    return Objective(ClipLoss(AlgorithmConfig(bounds=config)))


def metric_names(objective: Objective) -> list[str]:
    """The metrics of an update, of one token here, and those of its age."""
    one = {name: torch.ones(1) for name in ("mask_T", "weight_T", "advantage_T")}
    rows, sequence_T = ((0, 0, 1),), torch.zeros(1, dtype=torch.int64)
    batch = MicroBatch.of((0, 1), rows, 1, sequence_T=sequence_T, **one)
    batch = replace(batch, trained_tokens=(1,))
    stats, search = TokenStats(torch.zeros(1), torch.zeros(1)), objective.loss.search
    found = search.find(search.measure(stats, batch)) if search else None
    return [*objective.metrics(objective.token_fn(found, 0)(stats, batch), found), *AGE_METRICS]


def loss_fn(found: Any, config: BoundsConfig, version: int) -> TokenFn:
    return objective(config).token_fn(found, version)


def update_metrics(sums: Tensor, found: Bounds | None, config: BoundsConfig) -> Metrics:
    return objective(config).metrics(sums, found)
