"""Rollouts, a run and a policy of a few numbers, for tests of one step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bapo_megatron.config import AlgorithmConfig, BatchConfig, DataConfig, ModelConfig, RunConfig
from bapo_megatron.tensor_types import MicroBatch, SearchedLoss, TokenFn, TokenStats, UpdateResult
from bapo_megatron.types import Group, PackLayout, Prompt, Rollout

LN2 = math.log(2)


def rollout(
    reward: float = 0.0, length: int = 1, log_prob: float = -1.0, version: int = 8, **more: Any
) -> Rollout:
    """A response of equal tokens."""
    ids, versions = (np.full(length, value, np.int32) for value in (3, version))
    return Rollout(ids, np.full(length, log_prob, np.float32), versions, "stop", reward, **more)


def group(*rollouts: Rollout) -> Group:
    """Responses to a prompt of two tokens."""
    return Group(Prompt(0, np.array([1, 2], np.int32), "", ""), rollouts)


def run_config(algorithm: AlgorithmConfig | None = None, pack_tokens: int = 64, **more: Any) -> RunConfig:
    """A recipe of which only these fields matter."""
    parts = {"algorithm": algorithm or AlgorithmConfig(), "batch": BatchConfig(pack_tokens=pack_tokens)}
    return RunConfig("test", ModelConfig(Path("m")), DataConfig(Path("d")), **parts, **more)  # type: ignore[arg-type]


class NotedPolicy:
    """A policy at one log-ratio to the engine, which may drift with its version; notes what it is given."""

    pack_layout = PackLayout()
    has_experts = False

    def __init__(self, log_ratio: float = LN2, entropy: float = 1.0, drift: float = 0.0) -> None:
        self.log_ratio, self.entropy, self.drift = log_ratio, entropy, drift
        self.version = 10
        self.calls: list[str] = []
        self.packs: list[Sequence[MicroBatch]] = []
        self.losses: list[torch.Tensor] = []
        self.searched: list[str] = []

    def stats(self, batch: MicroBatch) -> TokenStats:
        log_ratio = self.log_ratio + self.drift * (self.version - 10)
        return TokenStats(batch.rollout_log_prob_T + log_ratio, torch.full_like(batch.mask_T, self.entropy))

    def sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> torch.Tensor:
        return torch.stack([fn(self.stats(batch), batch) for batch in batches]).sum(0)

    def log_probs(self, batches: Sequence[MicroBatch], trained_only: bool = False) -> list[TokenStats]:
        self.calls.append("log_probs")
        return [self.stats(batch) for batch in batches]

    def sum_over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    def old_sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> torch.Tensor:
        self.calls.append("old_sums")
        stats = [TokenStats(b.old_log_prob_T, torch.full_like(b.mask_T, self.entropy)) for b in batches]
        return torch.stack([fn(*both) for both in zip(stats, batches, strict=True)]).sum(0)

    def token_sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> torch.Tensor:
        self.calls.append("token_sums")
        return self.sums(batches, fn)

    def save(self, path: Path) -> None:
        raise AssertionError("a store that writes nothing calls it never")

    def update(self, batches: Sequence[MicroBatch], loss: TokenFn | SearchedLoss) -> UpdateResult:
        self.calls.append("update")
        self.packs.append(batches)
        if isinstance(loss, SearchedLoss):
            self.searched.append(loss.over)
            loss = loss.loss_of(self.sums(batches, loss.measure))
        self.losses.append(self.sums(batches, loss))
        self.version += 1
        return UpdateResult(self.losses[-1], 0.5, 1e-6)


class ShiftedPolicy(NotedPolicy):
    """Log-probs that are the engine's plus what each token's id says: (id - 10) times ln 2 / 2."""

    def stats(self, batch: MicroBatch) -> TokenStats:
        log_ratio_T = (batch.label_T - 10) * LN2 / 2
        return TokenStats(batch.rollout_log_prob_T + log_ratio_T, torch.ones_like(batch.mask_T))
