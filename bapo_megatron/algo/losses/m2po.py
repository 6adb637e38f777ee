"""M2PO (arXiv 2510.01161): ``-sum_t weight M r A``, tokens masked until ``mean (log r)^2 <= tau``.

Algorithm 1 of that paper; ``algorithm.loss=m2po``, ``r = pi / pi_old``. Its candidates, the trust-region
tokens, are those that PPO could clip: A > 0 with r > 1, and A < 0 with r < 1. While the mean of their
``(log r)^2`` is above ``tau``, the largest is masked. The others, and all tokens outside the trust region,
keep ``r A`` unclipped. A masked token stays in the count of tokens that the loss is divided by, as in the
paper's objective.

The mask needs a search over the whole update first, which may cost a forward pass. A sort of all tokens is
not additive over packs and ranks, a histogram is: the threshold is the lower edge of a bin of ``|log r|``,
0.5 % wide. So the bin in which Algorithm 1 stops is masked whole.

Legend: ``_T`` tokens of a pack (a micro-batch of packed sequences), ``_B`` bins.

``build_loss`` makes the loss for ``algorithm.loss``.
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
from bapo_megatron.algo.measurements import SEARCH, Measurement, PackView, UpdateSums
from bapo_megatron.algo.tokens import LOG_RATIO_LIMIT, constant_on, ratio, unmasked
from bapo_megatron.tensor_types import MicroBatch, TokenStats
from bapo_megatron.types import Metrics

BIN = 1.005
"""Ratio of the edges of a bin of ``|log r|``."""


@dataclass(frozen=True)
class Threshold:
    """Result of M2PO's search, as plain data: mask threshold, second moment before and after masking.

    Found by the search, before the loss of an update; ``M2po.terms`` masks by it, and the metrics show it.
    """

    threshold: float
    """Smallest masked ``|log r|``, nats; inf where no token is masked."""
    moment: float
    """Mean ``(log r)^2`` of the candidates; 0 without candidates."""
    kept: float
    """The same mean without the masked tokens: at most ``tau``."""


class M2po(Loss):
    """M2PO loss: ``-sum_t weight M r A``, with ``M`` 0 at the tokens that Algorithm 1 masks, else 1.

    Clipped: the masked tokens. Metrics ``m2po/threshold``, ``m2po/second_moment`` and ``..._kept``. Needs the
    ratios of the whole update first, which may cost a forward pass.
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
        """Histogram of ``|log r|`` of the candidates: their number and sum of ``(log r)^2`` by bin, [2 B]."""
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
        """Algorithm 1 on whole bins, the largest ``|log r|`` first."""
        counts, squares = (list(itertools.accumulate(half.tolist())) for half in sums.chunk(2))
        means_B = [square / max(count, 1.0) for count, square in zip(counts, squares, strict=True)]
        kept = max(number for number, mean in enumerate(means_B) if mean <= self.tau or number == 0)
        return Threshold((*self.edges, math.inf)[kept], means_B[-1], means_B[kept])

    def _metrics(self, _sums: Tensor, update: UpdateSums) -> Metrics:
        """The second moment of the candidates before and after masking, and the threshold in nats."""
        found: Threshold = update.found or self._find(update.parts[SEARCH])
        return {
            "m2po/second_moment": found.moment,
            "m2po/second_moment_kept": found.kept,
            "m2po/threshold": found.threshold if math.isfinite(found.threshold) else None,
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
