"""ASPO (arXiv 2510.06062v2): ``-sum_t weight A min(w, dual_clip)``, w = 1 / r for A > 0, w = r for A < 0.

``algorithm.loss=aspo``; ``r = pi / pi_old``, ``sg`` stop-gradient, ``weight`` the token's share in the mean.
A positive token with r < 1 gets a larger gradient, one with r > 1 a smaller one. The paper's Sec. 6 in three
steps:

1. PPO's mask: no gradient where A < 0 and ``r < 1 - clip_low``, or A > 0 and ``r > 1 + clip_high``
2. Eq. 3: ``w = r`` for A < 0, and ``w = 1 / r`` for A > 0, whose gradient is that of
   ``pi_old pi / sg(pi^2)``
3. ``w`` is at most ``dual_clip``, and keeps its gradient there

So the gradient factor (``d loss / d log pi = -weight A g``) is ``g = min(w, dual_clip)``, or 0 where masked.
A masked token has the value of its bound, as in PPO.

Defaults are those of the authors' scripts; the paper gives no numbers. The paper bounds ``w`` for A > 0
(its step 3) and for A < 0 by PPO's dual clip; that both keep their gradient is the authors' code. That code
also takes wider bounds, 0.4, for the fifth of the tokens with the highest entropy in a response, and the
log-prob for the value of a dual-clipped token (the same gradient): neither is in the paper, nor here. The
paper's mean is within each response first, ``algorithm.loss_mean=sequence``; the code's is over tokens.

``build_loss`` makes the loss for ``algorithm.loss``.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from annotated_types import Gt, Lt
from torch import Tensor

from bapo_megatron.algo.losses import TokenLoss, TokenRule, Tokens
from bapo_megatron.algo.measurements import PackView, token_mean


class Aspo(TokenLoss):
    """ASPO loss: PPO's mask, and the reciprocal ratio as weight of positive tokens. Clipped: masked tokens.

    Metric ``aspo/dual_clipped``: the share of the tokens whose weight is above ``dual_clip``. Needs no pass
    of its own over the update. Made by ``build_loss`` for ``algorithm.loss=aspo``.
    """

    def __init__(
        self,
        algorithm: Any,
        clip_low: Annotated[float, Gt(0), Lt(1)] = 0.2,
        clip_high: Annotated[float, Gt(0)] = 0.2,
        dual_clip: Annotated[float, Gt(1)] = 3.0,
    ) -> None:
        """``clip_low``, ``clip_high``: distances of the bounds from 1. ``dual_clip``: the largest weight."""
        super().__init__(algorithm)
        self.low, self.high, self.dual_clip = 1 - clip_low, 1 + clip_high, dual_clip
        self.measurements = (token_mean("aspo/dual_clipped", self._dual_clipped),)

    def rule(self, tokens: Tokens) -> TokenRule:
        """The weight, bounded; without gradient where PPO would clip."""
        ratio_T, positive_T = tokens.ratio_T, tokens.advantage_T > 0
        clipped_T = torch.where(positive_T, ratio_T > self.high, ratio_T < self.low)
        clipped_T &= tokens.advantage_T != 0
        value_T = _weight(torch.where(clipped_T, ratio_T.clamp(self.low, self.high), ratio_T), positive_T)
        value_T = value_T.clamp(max=self.dual_clip)
        return TokenRule(value_T, torch.where(clipped_T, 0.0, value_T), clipped_T)

    def _dual_clipped(self, view: PackView) -> Tensor:
        tokens = Tokens.of(view.stats, view.batch)
        return _weight(tokens.ratio_T, tokens.advantage_T > 0) > self.dual_clip


def _weight(ratio_T: Tensor, positive_T: Tensor) -> Tensor:
    """Weight of Eq. 3: ``1 / r`` for A > 0, else ``r``."""
    return torch.where(positive_T, 1 / ratio_T, ratio_T)
