"""Losses with a ratio of the whole response: GSPO (its geometric mean) and VESPO (the product).

A response's ratio needs the log-ratios of all its tokens, and a pass sees one pack, a context-parallel rank a
part of a response. So they are summed over the whole update first (the loss's ``Search``), which may cost a
forward pass (``trainer/update_loss.py``). Here ``r = pi / pi_old``.

Legend: ``_T`` tokens of a pack (a micro-batch of packed sequences). ``build_loss`` makes them by their names
in ``algorithm.loss``.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from annotated_types import Gt, Lt
from torch import Tensor

from bapo_megatron.algo.losses import Loss, LossTerms, Search
from bapo_megatron.algo.measurements import token_mean
from bapo_megatron.algo.sequences import PerSequence, sequence_means, sequence_sums
from bapo_megatron.algo.tokens import LOG_RATIO_LIMIT, ratio, unmasked
from bapo_megatron.errors import ConfigError
from bapo_megatron.tensor_types import MicroBatch, TokenStats


class Gspo(Loss):
    """GSPO loss (arXiv 2507.18071, Eqs. 5 and 7): PPO-clip with the ratio of a sequence, its geometric mean.

        loss = -sum_t weight min(s A, clip(s, 1 - clip_low, 1 + clip_high) A),    s = exp(mean_t log r_t)

    The gradient is that of GSPO-token (Eqs. 13 and 14): ``d loss / d log pi_t = -weight A s``, which with one
    weight and one advantage for all tokens of a response is GSPO's own (Eq. 10). A clipped response has no
    gradient at any of its tokens. The paper's mean over responses is ``algorithm.loss_mean=sequence``. Metric
    ``gspo/ratio``: the mean of s.
    """

    search: Search

    def __init__(
        self,
        algorithm: Any,
        clip_low: Annotated[float, Gt(0), Lt(1)] = 3e-4,
        clip_high: Annotated[float, Gt(0)] = 4e-4,
    ) -> None:
        """``clip_low``, ``clip_high``: distances of the bounds from 1; defaults of the paper's Sec. 5.1."""
        super().__init__(algorithm)
        self.low, self.high = math.log1p(-clip_low), math.log1p(clip_high)
        self.search = Search(
            sequence_sums, lambda sums: PerSequence(sequence_means(sums)), "update", is_ratio=True
        )
        self.measurements = (token_mean("gspo/ratio", lambda view: ratio(view.found.of_tokens(view.batch))),)

    def terms(self, stats: TokenStats, batch: MicroBatch, found: PerSequence) -> LossTerms:
        """Eq. 5. ``found``: the mean log-ratio of each sequence."""
        fields = (stats.log_prob_T, batch.advantage_T, batch.weight_T)
        log_prob_T, advantage_T, weight_T = unmasked(batch.mask_T, *fields)
        mean_T = found.of_tokens(batch)
        above_T = (advantage_T > 0) & (mean_T >= self.high)
        clipped_T = above_T | ((advantage_T < 0) & (mean_T <= self.low))
        stopped_T = clipped_T | (mean_T.abs() > LOG_RATIO_LIMIT)
        ratio_T = ratio(mean_T)
        factor_T = torch.where(stopped_T | (batch.mask_T == 0), 0.0, ratio_T)
        one_T = (log_prob_T - log_prob_T.detach()).exp()  # 1, with the gradient of log pi
        value_T = torch.where(stopped_T, ratio_T, ratio_T * one_T)
        value_T = torch.where(clipped_T, mean_T.clamp(self.low, self.high).exp(), value_T)
        loss = -(weight_T * advantage_T * value_T).sum()
        return LossTerms(loss, factor_T, clipped_T)


class Vespo(Loss):
    """VESPO loss (arXiv 2602.10693): a soft weight ``phi`` of the whole response's ratio ``W = prod_t r_t``.

        loss = -sum_t weight sg(phi(W)) A log pi    so that    d loss / d log pi = -weight A phi

    ``W`` has no length normalization, ``sg`` is stop-gradient, and ``phi(W) = W^k exp(lambda (1 - W))``: 1 at
    W = 1, it falls on both sides of its peak at ``k / lambda``. ``k`` and ``lambda`` depend on the sign of
    the advantage. No token is clipped. As in the authors' code (github.com/FloyedShen/VESPO) ``log W`` is
    clamped to +-20. Metric ``vespo/phi``: the mean phi.
    """

    search: Search

    def __init__(
        self,
        algorithm: Any,
        k_positive: Annotated[float, Gt(0)] = 2.0,
        lambda_positive: Annotated[float, Gt(0)] = 3.0,
        k_negative: Annotated[float, Gt(0)] = 3.0,
        lambda_negative: Annotated[float, Gt(0)] = 2.0,
    ) -> None:
        """Defaults of the authors' runs. ConfigError with ``importance_cap``: W is the importance weight."""
        super().__init__(algorithm)
        self.k, self.rate = (k_negative, k_positive), (lambda_negative, lambda_positive)
        if algorithm.importance_cap is not None:
            raise ConfigError(
                f"algorithm.importance_cap={algorithm.importance_cap} would weigh vespo's loss beside W: "
                f"leave it out, and with algorithm.old_log_probs=rollout W is pi / pi_rollout"
            )
        self.search = Search(
            sequence_sums, lambda sums: PerSequence(sums.chunk(2)[0]), "update", is_ratio=True
        )
        self.measurements = (token_mean("vespo/phi", lambda view: view.terms.gradient_T),)

    def terms(self, stats: TokenStats, batch: MicroBatch, found: PerSequence) -> LossTerms:
        """``-sum_t weight phi A log pi``. ``found``: the sum of log r of each sequence."""
        fields = (stats.log_prob_T, batch.advantage_T, batch.weight_T)
        log_prob_T, advantage_T, weight_T = unmasked(batch.mask_T, *fields)
        live_T = batch.mask_T != 0
        phi_T = torch.where(live_T, self._phi(found.of_tokens(batch), advantage_T), 0.0)
        loss = -(weight_T * advantage_T * phi_T * log_prob_T).sum()
        return LossTerms(loss, phi_T, torch.zeros_like(live_T))

    def _phi(self, log_weight_T: Tensor, advantage_T: Tensor) -> Tensor:
        """``phi(W) = W^k exp(lambda (1 - W))`` of each token's sequence, [T], from ``log W``."""
        log_weight_T = log_weight_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        negative, positive = (
            (k * log_weight_T - rate * torch.expm1(log_weight_T)).exp()
            for k, rate in zip(self.k, self.rate, strict=True)
        )
        return torch.where(advantage_T < 0, negative, positive)
