"""CISPO (MiniMax-M1, arXiv 2506.13585, Eqs. 4 and 5): the importance weight is clipped, never the token.

Every token keeps a gradient, of bounded size:

    loss = -sum_t weight A sg(clip(r, ratio_low, ratio_high)) log pi

so ``g = clip(r, ratio_low, ratio_high)``, and the value holds ``log pi``, not a ratio. The paper's bounds are
``1 - eps_low`` and ``1 + eps_high`` of the importance weight; it sets no effective lower bound and does not
publish ``eps_high``. The default of 5 is from ScaleRL (arXiv 2510.13786), which TRL recommends, too. The mean
is over the tokens of the batch: ``algorithm.loss_mean=token``.
"""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Ge, Gt

from bapo_megatron.algo.losses import TokenLoss, TokenRule, Tokens
from bapo_megatron.algo.measurements import token_mean
from bapo_megatron.errors import ConfigError


class Cispo(TokenLoss):
    """REINFORCE with a clipped importance weight; metric ``cispo/weight``, the mean weight."""

    measurements = (token_mean("cispo/weight", lambda view: view.terms.gradient_T),)

    def __init__(
        self,
        algorithm: Any,
        ratio_low: Annotated[float, Ge(0)] = 0.0,
        ratio_high: Annotated[float, Gt(0)] = 5.0,
    ) -> None:
        """Takes the bounds of the weight. ConfigError if the lower one is not below the upper one."""
        super().__init__(algorithm)
        if ratio_low >= ratio_high:
            raise ConfigError(
                f"algorithm.loss_settings.ratio_low={ratio_low} must be below ratio_high={ratio_high}"
            )
        self.ratio_low, self.ratio_high = ratio_low, ratio_high

    def rule(self, tokens: Tokens) -> TokenRule:
        """The weight as factor, for every token; clipped are those whose weight a bound sets."""
        weight_T = tokens.ratio_T.clamp(self.ratio_low, self.ratio_high)
        return TokenRule(weight_T * tokens.log_prob_T, weight_T, weight_T != tokens.ratio_T)
