"""Losses that first need a statistic of the whole update: ``Gspo``, ``Vespo``, ``M2po``, ``P3o``.

A pass sees one pack, a context-parallel rank only part of a response. So response ratios (for GSPO the
geometric mean over tokens, for VESPO the product), M2PO's mask threshold and P3O's effective sample size are
the result of the loss's ``Search``: sums over the whole update, which may cost a forward pass. ``terms`` then
receives it as ``found``. Here ``r = pi / pi_old``. Legend: ``_T`` tokens of a pack (a micro-batch of packed
sequences), ``_B`` bins.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Gt, Lt
from torch import Tensor

from bapo_megatron.algo.losses import Loss, LossTerms, Search
from bapo_megatron.algo.measurements import (
    Measurement,
    PackView,
    UpdateSums,
    effective_sample_size,
    ratio_moments,
    token_mean,
)
from bapo_megatron.algo.reference_kl import kl_estimate
from bapo_megatron.algo.sequences import PerSequence, sequence_means, sequence_sums
from bapo_megatron.algo.tokens import LOG_RATIO_LIMIT, constant_on, ratio, unmasked
from bapo_megatron.errors import ConfigError
from bapo_megatron.tensor_types import MicroBatch, TokenStats
from bapo_megatron.types import Metrics


class Gspo(Loss):
    """GSPO loss (arXiv 2507.18071, Eqs. 5 and 7): PPO-clip with a sequence's geometric-mean ratio.

        loss = -sum_t weight min(s A, clip(s, 1 - clip_low, 1 + clip_high) A),    s = exp(mean_t log r_t)

    The gradient is GSPO-token's (Eqs. 13 and 14): ``d loss / d log pi_t = -weight A s``, which equals GSPO's
    own (Eq. 10) if all tokens of a response share weight and advantage. No token of a clipped response has a
    gradient. The paper's mean over responses is ``algorithm.loss_mean=sequence``. Metric ``gspo/ratio``: the
    mean of s.
    """

    search: Search

    def __init__(
        self,
        algorithm: Any,
        clip_low: Annotated[float, Gt(0), Lt(1)] = 3e-4,
        clip_high: Annotated[float, Gt(0)] = 4e-4,
    ) -> None:
        """``clip_low``, ``clip_high``: distances of the bounds from 1; defaults from the paper's Sec. 5.1."""
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
    the advantage. Clips no token. As in the authors' code (github.com/FloyedShen/VESPO) ``log W`` is clamped
    to +-20. Metric ``vespo/phi``: the mean phi.
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
        """Defaults from the authors' runs. Raises ConfigError with ``importance_cap``: W is that weight."""
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


class P3o(Loss):
    """P3O loss (arXiv 2605.12380), with one statistic: the normalised effective sample size E of the ratios.

        E = (sum_t r_t)^2 / (n sum_t r_t^2)                                 over the n tokens of the update
        loss = -sum_t weight sg(min(r, E)) A log pi + (1 - E) sum_t weight (1 / r - 1 + log r)

    E caps the score function's weight and sets the strength of a pull towards the sampling policy: the k3
    estimate of KL(pi || pi_old). On-policy E is 1 and the loss is REINFORCE's. E is computed once per update,
    as in the paper (Eqs. 7 and 12, Algorithm 2); in the authors' code (FeynRL) per micro-batch, over the
    data-parallel ranks. There are no settings. The paper's mean is over tokens.

    The gradient factor and the gradient measures cover only the first term, as with the KL to a reference.
    Clipped: the tokens at the cap, which are most of them: their ratios are near 1, and E is below it.
    Metrics ``policy/ess``, as with every loss, and ``p3o/behavior_kl``, the mean estimate.
    """

    search: Search

    def __init__(self, algorithm: Any) -> None:
        """Raises ConfigError with ``old_log_probs=trainer``: ratios must be to the sampling policy."""
        super().__init__(algorithm)
        if algorithm.old_log_probs != "rollout":
            raise ConfigError(
                f"algorithm.old_log_probs={algorithm.old_log_probs}: p3o weighs by the ratio to the policy "
                "that sampled, stale or of another engine; set algorithm.old_log_probs=rollout"
            )
        self.search = Search(ratio_moments, effective_sample_size, "update", 3, is_ratio=True)
        self.measurements = (
            token_mean("p3o/behavior_kl", lambda view: _behavior_kl(view.stats, view.batch)),
        )

    def terms(self, stats: TokenStats, batch: MicroBatch, found: float) -> LossTerms:
        """The loss at the effective sample size ``found``."""
        log_ratio_T, advantage_T, weight_T = _fields(stats, batch)
        [log_prob_T] = unmasked(batch.mask_T, stats.log_prob_T)
        ratio_T, live_T = ratio(log_ratio_T.detach()), batch.mask_T != 0
        is_sound_T = live_T & (log_ratio_T.detach().abs() <= LOG_RATIO_LIMIT)
        factor_T = torch.where(is_sound_T, ratio_T.clamp(max=found), 0.0)
        pull = (1 - found) * (weight_T * _behavior_kl(stats, batch)).sum()
        loss = pull - (weight_T * advantage_T * factor_T * log_prob_T).sum()
        return LossTerms(loss, factor_T, live_T & (ratio_T > found))


def _behavior_kl(stats: TokenStats, batch: MicroBatch) -> Tensor:
    """k3 estimate of KL(pi || pi_old) of each token, [T], 0 where masked."""
    log_prob_T, old_log_prob_T = unmasked(batch.mask_T, stats.log_prob_T, batch.old_log_prob_T)
    return kl_estimate(log_prob_T, old_log_prob_T, "k3")


BIN = 1.005
"""Edge ratio of a bin of ``|log r|``."""


@dataclass(frozen=True)
class Threshold:
    """Result of M2PO's search before an update: mask threshold, second moment before and after masking."""

    threshold: float
    """Smallest masked ``|log r|``, nats; inf if no token is masked."""
    moment: float
    """Mean ``(log r)^2`` of the candidates; 0 without candidates."""
    kept: float
    """The mean without the masked tokens: at most ``tau``."""


class M2po(Loss):
    """M2PO loss (arXiv 2510.01161): ``-sum_t weight M r A``, with ``M`` 0 at masked tokens, otherwise 1.

    The candidates, trust-region tokens, are those PPO could clip: A > 0 with r > 1, and A < 0 with r < 1.
    While the mean of their ``(log r)^2`` is above ``tau``, the largest is masked (the paper's Algorithm 1).
    All other tokens keep ``r A`` unclipped. A masked token stays in the loss's token count, as in the paper's
    objective.

    A sort of all tokens is not additive over packs and ranks, but a histogram is: the threshold is the lower
    edge of a bin of ``|log r|``, 0.5 % wide, and the bin in which Algorithm 1 stops is masked as a whole.

    Clipped: the masked tokens. Metrics ``m2po/threshold``, ``m2po/second_moment`` and ``..._kept``.
    """

    search: Search

    def __init__(self, algorithm: Any, tau: Annotated[float, Gt(0), Lt(LOG_RATIO_LIMIT**2)] = 0.04) -> None:
        """``tau``: largest mean of ``(log r)^2`` over the candidates; the default is the paper's."""
        super().__init__(algorithm)
        self.tau, self.edges = tau, _edges(math.sqrt(tau))
        size = 2 * (len(self.edges) + 1)
        self.search = Search(self._measure, self._find, "update", size, is_ratio=True)
        self.measurements = (Measurement("m2po", 0, _nothing, self._metrics),)

    def terms(self, stats: TokenStats, batch: MicroBatch, found: Threshold) -> LossTerms:
        """``-sum_t weight M r A`` at the threshold ``found``."""
        log_ratio_T, advantage_T, weight_T = _fields(stats, batch)
        masked_T = _candidates(log_ratio_T, advantage_T) & (log_ratio_T.abs() >= found.threshold)
        ratio_T = ratio(log_ratio_T)
        loss = -(weight_T * advantage_T * torch.where(masked_T, 0.0, ratio_T)).sum()
        no_gradient_T = masked_T | (log_ratio_T.abs() > LOG_RATIO_LIMIT) | (batch.mask_T == 0)
        return LossTerms(loss, torch.where(no_gradient_T, 0.0, ratio_T).detach(), masked_T)

    @torch.no_grad()
    def _measure(self, stats: TokenStats, batch: MicroBatch) -> Tensor:
        """Histogram over the candidates' ``|log r|``: count and sum of ``(log r)^2`` per bin, [2 B]."""
        log_ratio_T, advantage_T, _ = _fields(stats, batch)
        count_T = _candidates(log_ratio_T, advantage_T).double()
        bin_T = torch.bucketize(log_ratio_T.abs(), constant_on(count_T.device, self.edges), right=True)
        square_T = torch.where(count_T > 0, log_ratio_T, 0.0).square()
        return (
            count_T.new_zeros(2, len(self.edges) + 1)
            .index_add_(1, bin_T, torch.stack([count_T, square_T]))
            .flatten()
        )

    def _find(self, sums: Tensor) -> Threshold:
        """Run Algorithm 1 on whole bins, the largest ``|log r|`` first."""
        counts, squares = (list(itertools.accumulate(half.tolist())) for half in sums.chunk(2))
        means_B = [square / max(count, 1.0) for count, square in zip(counts, squares, strict=True)]
        kept = max(number for number, mean in enumerate(means_B) if mean <= self.tau or number == 0)
        return Threshold((*self.edges, math.inf)[kept], means_B[-1], means_B[kept])

    def _metrics(self, _sums: Tensor, update: UpdateSums) -> Metrics:
        """Second moment of the candidates before and after masking, and the threshold in nats."""
        threshold: Threshold = update.found
        return {
            "m2po/second_moment": threshold.moment,
            "m2po/second_moment_kept": threshold.kept,
            "m2po/threshold": threshold.threshold if math.isfinite(threshold.threshold) else None,
        }


def _fields(stats: TokenStats, batch: MicroBatch) -> list[Tensor]:
    """Log-ratio, advantage and weight, 0 at masked tokens."""
    log_ratio_T = stats.log_prob_T - batch.old_log_prob_T
    return unmasked(batch.mask_T, log_ratio_T, batch.advantage_T, batch.weight_T)


def _candidates(log_ratio_T: Tensor, advantage_T: Tensor) -> Tensor:
    """Trust-region tokens, bool [T]: ``A log r > 0``, moved in the direction of their advantage."""
    return log_ratio_T * advantage_T > 0


def _edges(first: float) -> tuple[float, ...]:
    """Bin edges from ``sqrt(tau)``, below which no token need be masked, to ``LOG_RATIO_LIMIT``."""
    count = math.ceil(math.log(LOG_RATIO_LIMIT / first) / math.log(BIN))
    return tuple(first * BIN**number for number in range(count + 1))


def _nothing(view: PackView) -> Tensor:
    return view.batch.mask_T.new_zeros(0, dtype=torch.float64)
