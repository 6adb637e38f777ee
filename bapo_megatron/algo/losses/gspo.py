"""GSPO (arXiv 2507.18071, Eqs. 5 and 7): PPO-clip with the sequence ratio ``s = exp(mean_t log r_t)``.

``algorithm.loss=gspo``; ``r = pi / pi_old``. A response's ratio needs the log-ratios of all its tokens, and
a pass sees one pack, a context-parallel rank a part of a response. So they are summed over the whole update
first (the loss's ``Search``), which may cost a forward pass (``trainer/update_loss.py``).

Legend: ``_T`` tokens of a pack (a micro-batch of packed sequences).

``build_loss`` makes the loss for ``algorithm.loss``.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from annotated_types import Gt, Lt

from bapo_megatron.algo.losses import Loss, LossTerms, Search
from bapo_megatron.algo.measurements import token_mean
from bapo_megatron.algo.sequences import PerSequence, sequence_means, sequence_sums
from bapo_megatron.algo.tokens import LOG_RATIO_LIMIT, ratio, unmasked
from bapo_megatron.tensor_types import MicroBatch, TokenStats


class Gspo(Loss):
    """GSPO loss: ``-sum_t weight min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)``, s the sequence ratio.

    ``s`` is the geometric mean of the token ratios of a response. The gradient is that of GSPO-token (Eqs. 13
    and 14): ``d loss / d log pi_t = -weight A s``, which with one weight and one advantage for all tokens of
    a response is GSPO's own (Eq. 10). A clipped response has no gradient at any of its tokens. The paper's
    mean over responses is ``algorithm.loss_mean=sequence``. Metric ``gspo/ratio``: the mean of s. Needs the
    ratios of the whole update first, which may cost a forward pass. Made by ``build_loss`` for
    ``algorithm.loss=gspo``.
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
