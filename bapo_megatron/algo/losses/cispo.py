"""CISPO (MiniMax-M1, arXiv 2506.13585, Eqs. 4 and 5): clipped importance weights on REINFORCE.

    loss = -sum_t weight A stop_gradient(clip(r, ratio_low, ratio_high)) log pi,    r = pi / pi_old

``algorithm.loss=cispo``. Every token keeps a gradient, of bounded size: ``d loss / d log pi = -weight A g``
with ``g = clip(r, ratio_low, ratio_high)``. The paper's bounds are ``1 - eps_low`` and ``1 + eps_high`` of
the importance weight; it sets no effective lower bound and does not publish ``eps_high``. The default of 5 is
from ScaleRL (arXiv 2510.13786), which TRL recommends, too. The mean is over the tokens of the batch:
``algorithm.loss_mean=token``.

``build_loss`` makes the loss for ``algorithm.loss``.
"""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Ge, Gt

from bapo_megatron.algo.losses import TokenLoss, TokenRule, Tokens
from bapo_megatron.algo.measurements import token_mean
from bapo_megatron.errors import ConfigError


class Cispo(TokenLoss):
    """CISPO loss: REINFORCE with a clipped importance weight. Metric ``cispo/weight``, the mean weight.

    Clipped: the tokens whose weight is a bound. Needs no pass of its own over the update. ConfigError if the
    bounds are not in order. Made by ``build_loss`` for ``algorithm.loss=cispo``.
    """

    measurements = (token_mean("cispo/weight", lambda view: view.terms.gradient_T),)

    def __init__(
        self,
        algorithm: Any,
        ratio_low: Annotated[float, Ge(0)] = 0.0,
        ratio_high: Annotated[float, Gt(0)] = 5.0,
    ) -> None:
        """``ratio_low``, ``ratio_high``: bounds of the weight. ConfigError if they are not in order."""
        super().__init__(algorithm)
        if ratio_low >= ratio_high:
            raise ConfigError(
                f"algorithm.loss_settings.ratio_low={ratio_low} must be below ratio_high={ratio_high}"
            )
        self.ratio_low, self.ratio_high = ratio_low, ratio_high

    def rule(self, tokens: Tokens) -> TokenRule:
        """``g = clip(r, ...)`` for every token; clipped are the tokens whose weight is a bound."""
        weight_T = tokens.ratio_T.clamp(self.ratio_low, self.ratio_high)
        return TokenRule(weight_T * tokens.log_prob_T, weight_T, weight_T != tokens.ratio_T)
