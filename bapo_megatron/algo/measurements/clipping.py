"""Clip fractions: shares of an update's tokens that the loss clips, by the sign of their advantage.

``CLIPPING`` measures them in every update, whatever its loss. Legend: ``_T`` tokens of a pack. Used by
``algo/objective.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bapo_megatron.algo.measurements import Measurement, PackView


@torch.no_grad()
def clip_sums(clipped_T: Tensor, advantage_T: Tensor, mask_T: Tensor) -> Tensor:
    """Token counts for ``clip_fractions``: float64 [5], additive over packs and ranks.

    Returns:
        ``[tokens, positive tokens, negative tokens, positive clipped, negative clipped]``, where a token
        counts once if its mask is not 0, and positive and negative are signs of advantage.
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


def _sums(view: PackView) -> Tensor:
    return clip_sums(view.terms.clipped_T, view.batch.advantage_T, view.batch.mask_T)


CLIPPING = Measurement("clipping", 5, _sums, lambda sums, _update: {**clip_fractions(sums)})
"""The clip fractions of the loss in use."""
