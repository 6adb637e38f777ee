"""CISPO's loss (arXiv 2506.13585, Eq. 4) in one file, as a user would write it; tests load it by its path."""

from __future__ import annotations

import functools

import torch

from bapo_megatron.algo.losses import Loss, LossTerms
from bapo_megatron.algo.measurements import token_mean
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.types import MicroBatch, TokenStats


class Cispo(Loss):
    """Minus ``sum_t weight A sg(clip(r, low, high)) log pi``: every token has a gradient, of bounded size."""

    bounds = "fixed"
    measurements = (token_mean("cispo/factor", lambda view: view.terms.gradient_T[view.live_T]),)

    def __init__(self, algorithm: AlgorithmConfig, widening: float = 1.0) -> None:
        self.low = algorithm.bounds.low_start / widening
        self.high = algorithm.bounds.high_start * widening

    def terms(self, stats: TokenStats, batch: MicroBatch, found: None) -> LossTerms:
        """The loss of each token by itself."""
        live_T = batch.mask_T != 0
        log_prob_T = torch.where(live_T, stats.log_prob_T, 0.0).double()
        log_ratio_T = torch.where(live_T, stats.log_prob_T - batch.old_log_prob_T, 0.0).detach().double()
        ratio_T = log_ratio_T.exp()
        factor_T = ratio_T.clamp(self.low, self.high)
        loss = -(batch.weight_T.double() * batch.advantage_T * factor_T * log_prob_T).sum()
        return LossTerms(loss, factor_T, (ratio_T < self.low) | (ratio_T > self.high))


Wide = functools.partial(Cispo, widening=2.0)
