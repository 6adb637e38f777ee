"""CE-GPPO (arXiv 2509.20712v5, Eqs. 8 to 10): clipped tokens keep a gradient of bounded size.

    loss = -sum_t weight A v    with    g = beta1 (1 - clip_low)    where A < 0 and r < 1 - clip_low
                                        g = beta2 (1 + clip_high)   where A > 0 and r > 1 + clip_high
                                        g = r                       elsewhere

``algorithm.loss=ce_gppo``; ``r = pi / pi_old``, ``d loss / d log pi = -weight A g``, and ``v = g``: PPO's
ratio, or a bound times beta, scaled by ``r / stop_gradient(r)``. ``beta1`` strengthens what lowers the
entropy (unlikely tokens pushed down), ``beta2`` what raises it; with both 0 it is PPO's gradient. The
defaults are those of the paper's 7B runs (0.5 and 1 at 1.5B), with its symmetric bounds. The paper's mean is
within each response first, ``algorithm.loss_mean=sequence``; the authors' code has a mean over tokens, and a
dual clip of 3 for A < 0 which the paper does not have.

``build_loss`` makes the loss for ``algorithm.loss``.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from bapo_megatron.algo.losses import TokenLoss, TokenRule, Tokens
from bapo_megatron.algo.measurements import Measurement, PackView, UpdateSums
from bapo_megatron.algo.tokens import unmasked
from bapo_megatron.types import Metrics


class CeGppo(TokenLoss):
    """CE-GPPO loss: PPO's surrogate whose clipped tokens keep a gradient. Clipped: the tokens that PPO clips.

    Metrics ``ce_gppo/preserved_low`` and ``_high``: the share of the gradient mass ``sum weight g |A|`` from
    tokens beyond the lower and the upper bound, None where the mass is 0. Needs no pass of its own over the
    update. Made by ``build_loss`` for ``algorithm.loss=ce_gppo``.
    """

    def __init__(
        self,
        algorithm: Any,
        beta1: Annotated[float, Ge(0)] = 0.75,
        beta2: Annotated[float, Ge(0)] = 1.0,
        clip_low: Annotated[float, Gt(0), Lt(1)] = 0.2,
        clip_high: Annotated[float, Gt(0)] = 0.2,
    ) -> None:
        """``beta1``, ``beta2``: factors beyond the lower and upper bound. ``clip_*``: distances from 1."""
        super().__init__(algorithm)
        self.low, self.high = 1 - clip_low, 1 + clip_high
        self.beta1, self.beta2 = beta1, beta2
        self.measurements = (Measurement("ce_gppo", 3, _mass, _shares),)

    def rule(self, tokens: Tokens) -> TokenRule:
        """Eq. 10 as factor, which is also the value of Eq. 8."""
        below_T = (tokens.advantage_T < 0) & (tokens.ratio_T < self.low)
        above_T = (tokens.advantage_T > 0) & (tokens.ratio_T > self.high)
        factor_T = torch.where(below_T, self.beta1 * self.low, tokens.ratio_T)
        factor_T = torch.where(above_T, self.beta2 * self.high, factor_T)
        return TokenRule(factor_T, factor_T, below_T | above_T)


def _mass(view: PackView) -> Tensor:
    """Gradient mass, [3]: of all tokens, of those beyond the lower bound, and beyond the upper bound."""
    weight_T, advantage_T = unmasked(view.batch.mask_T, view.batch.weight_T, view.batch.advantage_T)
    mass_T = weight_T * view.terms.gradient_T * advantage_T.abs()
    low_T, high_T = (view.terms.clipped_T & side_T for side_T in (advantage_T < 0, advantage_T > 0))
    return torch.stack([mass_T.sum(), (mass_T * low_T).sum(), (mass_T * high_T).sum()])


def _shares(sums: Tensor, _update: UpdateSums) -> Metrics:
    mass, low, high = sums.tolist()
    return {
        "ce_gppo/preserved_low": low / mass if mass else None,
        "ce_gppo/preserved_high": high / mass if mass else None,
    }
