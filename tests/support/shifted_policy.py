"""A policy whose log-probs a response's token ids say."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from bapo_megatron.types import MicroBatch, PackLayout, SearchedLoss, TokenFn, TokenStats, UpdateResult

LN2 = math.log(2)


class ShiftedPolicy:
    """Log-probs that are the engine's plus what the response's first token id says, in units of ln 2 / 2."""

    version = 7
    pack_layout = PackLayout()
    has_experts = False

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.packs: list[MicroBatch] = []

    def _stats(self, batches: Sequence[MicroBatch]) -> list[TokenStats]:
        return [
            TokenStats(b.rollout_log_prob_T + (b.label_T - 10) * LN2 / 2, torch.ones_like(b.mask_T))
            for b in batches
        ]

    def log_probs(self, batches: Sequence[MicroBatch], trained_only: bool = False) -> list[TokenStats]:
        return self._stats(batches)

    def sum_over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    def old_sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> torch.Tensor:
        self.calls.append("old_sums")
        stats = [TokenStats(b.old_log_prob_T, torch.ones_like(b.mask_T)) for b in batches]
        return torch.stack([fn(*pair) for pair in zip(stats, batches, strict=True)]).sum(0)

    def token_sums(self, batches: Sequence[MicroBatch], fn: TokenFn) -> torch.Tensor:
        self.calls.append("token_sums")
        pairs = zip(self._stats(batches), batches, strict=True)
        return torch.stack([fn(*pair) for pair in pairs]).sum(0)

    def update(self, batches: Sequence[MicroBatch], loss: TokenFn | SearchedLoss) -> UpdateResult:
        self.calls.append("update")
        self.packs += batches
        if isinstance(loss, SearchedLoss):
            loss = loss.loss_of(self.token_sums(batches, loss.measure))
        pairs = zip(self._stats(batches), batches, strict=True)
        sums = torch.stack([loss(*pair) for pair in pairs]).sum(0)
        self.version += 1
        return UpdateResult(sums, 0.0, 1e-6)
