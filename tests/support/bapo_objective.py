"""BAPO's objective at given bounds, as the functions that tests of policies and layouts call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bapo_megatron.algo.bapo import BoundsConfig
from bapo_megatron.algo.losses.clip import ClipLoss, SearchResult
from bapo_megatron.algo.objective import Objective
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.tensor_types import TokenFn
from bapo_megatron.types import Metrics


def objective(config: BoundsConfig) -> Objective:
    return Objective(ClipLoss(AlgorithmConfig(bounds=config)))


def loss_fn(found: Any, config: BoundsConfig, version: int) -> TokenFn:
    return objective(config).token_fn(found, version)


def update_metrics(sums: Tensor, found: SearchResult | None, config: BoundsConfig) -> Metrics:
    return objective(config).metrics(sums, found)
