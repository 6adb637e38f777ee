"""Raised tokens, ``r = pi / pi_old > 1.2`` (GRPO's upper bound): their share, and their mean pi_old.

``RAISED_TOKENS`` measures them in every update. A higher c_high acts on the positive ones among them. In a
run without raised tokens, or with only likely ones, no c_high can keep the entropy up (Figs. 5 and 10 of
arXiv 2510.18927). Used by ``algo/objective.py``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bapo_megatron.algo.measurements import Measurement, PackView, UpdateSums
from bapo_megatron.algo.tokens import unmasked
from bapo_megatron.types import Metrics

RAISED = 1.2
"""Ratio above which a token is raised."""


@torch.no_grad()
def _sums(view: PackView) -> Tensor:
    """Number and summed pi_old of the raised tokens, then of those with A > 0: [4]."""
    batch = view.batch
    log_ratio_T, old_log_prob_T, advantage_T = unmasked(
        batch.mask_T, view.log_ratio_T, batch.old_log_prob_T, batch.advantage_T
    )
    raised_T = log_ratio_T > math.log(RAISED)  # masked tokens have the ratio 1 here
    positive_T = raised_T & (advantage_T > 0)
    probability_T = old_log_prob_T.exp()
    parts = (raised_T, raised_T * probability_T, positive_T, positive_T * probability_T)
    return torch.stack([part.double().sum() for part in parts])


def _metrics(sums: Tensor, update: UpdateSums) -> Metrics:
    """Shares of raised tokens, and their mean pi_old; None without raised tokens."""
    raised, mass, positive, positive_mass = sums.tolist()
    return {
        "raised/tokens": raised / update.tokens,
        "raised/probability": mass / raised if raised else None,
        "raised/positive_tokens": positive / update.tokens,
        "raised/positive_probability": positive_mass / positive if positive else None,
    }


RAISED_TOKENS = Measurement("raised", 4, _sums, _metrics)
"""The share of tokens above a ratio of 1.2, and their mean probability under the old policy."""
