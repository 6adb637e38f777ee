"""Clip fractions, by the sign of the advantage, and raised tokens, ``r = pi / pi_old > 1.2``.

``CLIPPING`` and ``RAISED_TOKENS`` measure them in every update, whatever its loss. A higher c_high acts on
the positive ones among the raised tokens (1.2 is GRPO's upper bound): in a run without any, or with only
likely ones, no c_high can keep the entropy up (Figs. 5 and 10 of arXiv 2510.18927). Legend: ``_T`` tokens of
a pack. Used by ``algo/objective.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bapo_megatron.algo.measurements import Measurement, PackView, UpdateSums, share
from bapo_megatron.algo.tokens import unmasked
from bapo_megatron.types import Metrics


@torch.no_grad()
def clip_sums(clipped_T: Tensor, advantage_T: Tensor, mask_T: Tensor) -> Tensor:
    """Token counts for ``clip_fractions``: float64 [5], additive over packs and ranks.

    ``[tokens, positive tokens, negative tokens, positive clipped, negative clipped]``, where a token counts
    once if its mask is not 0, and positive and negative are signs of advantage.
    """
    live_T = mask_T != 0
    positive_T, negative_T = live_T & (advantage_T > 0), live_T & (advantage_T < 0)
    counted = (live_T, positive_T, negative_T, positive_T & clipped_T, negative_T & clipped_T)
    return torch.stack([flags_T.sum() for flags_T in counted]).double()


def clip_fractions(sums: Tensor | Sequence[float]) -> dict[str, float]:
    """Clip fractions, clipped tokens / all tokens, from the (reduced) ``clip_sums``; 0 without tokens."""
    tokens, positive, _, above, below = (float(number) for number in sums)
    tokens = max(tokens, 1.0)
    return {
        "bapo/clip_fraction_high": above / tokens,
        "bapo/clip_fraction_low": below / tokens,
        "bapo/positive_token_fraction": positive / tokens,
    }


def _clip_sums(view: PackView) -> Tensor:
    return clip_sums(view.terms.clipped_T, view.batch.advantage_T, view.batch.mask_T)


CLIPPING = Measurement("clipping", 5, _clip_sums, lambda sums, _update: {**clip_fractions(sums)})
"""The clip fractions of the loss in use."""


RAISED = 1.2
"""Ratio above which a token is raised."""


@torch.no_grad()
def _raised_sums(view: PackView) -> Tensor:
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


def _raised_metrics(sums: Tensor, update: UpdateSums) -> Metrics:
    """Shares of raised tokens, and their mean pi_old; None without raised tokens."""
    raised, mass, positive, positive_mass = sums.tolist()
    return {
        "raised/tokens": raised / update.tokens,
        "raised/probability": share(mass, raised),
        "raised/positive_tokens": positive / update.tokens,
        "raised/positive_probability": share(positive_mass, positive),
    }


RAISED_TOKENS = Measurement("raised", 4, _raised_sums, _raised_metrics)
"""The share of tokens above a ratio of 1.2, and their mean probability under the old policy."""
