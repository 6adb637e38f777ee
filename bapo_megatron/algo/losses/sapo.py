"""SAPO (arXiv 2511.20347, Eqs. 5 and 6): a soft gate about r = 1 in place of clipping.

    loss = -sum_t weight A f(r)    with    f(r) = 4 / tau sigmoid(tau (r - 1)),    r = pi / pi_old

``algorithm.loss=sapo``; ``weight`` is the token's share in the mean. So ``d loss / d log pi = -weight A g``
with ``g = 4 p (1 - p) r`` and ``p = sigmoid(tau (r - 1))`` (Eq. 8). The gate, ``g / r``, is 1 at r = 1 and
falls on both sides. Its temperature ``tau`` depends on the sign of the advantage; the larger one of negative
advantages lets their gradient fall faster. Defaults are the paper's, but for its mean, which is within each
response first, then over responses: set ``algorithm.loss_mean=sequence`` for that.

``build_loss`` makes the loss for ``algorithm.loss``.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from annotated_types import Gt

from bapo_megatron.algo.losses import TokenLoss, TokenRule, Tokens
from bapo_megatron.algo.measurements import gate_mean


class Sapo(TokenLoss):
    """SAPO loss: the surrogate with a sigmoid gate. Clips no token.

    Metric ``sapo/gate``: the mean of ``g / r``, the gate. Needs no pass of its own over the update. Made by
    ``build_loss`` for ``algorithm.loss=sapo``.
    """

    measurements = (gate_mean("sapo/gate"),)

    def __init__(
        self,
        algorithm: Any,
        temperature_positive: Annotated[float, Gt(0)] = 1.0,
        temperature_negative: Annotated[float, Gt(0)] = 1.05,
    ) -> None:
        """``temperature_*``: tau of tokens with A > 0, and of the others."""
        super().__init__(algorithm)
        self.temperatures = temperature_positive, temperature_negative

    def rule(self, tokens: Tokens) -> TokenRule:
        """Eq. 6 as value, Eq. 8 as ``g``."""
        positive, negative = self.temperatures
        tau_T = torch.full_like(tokens.ratio_T, negative).masked_fill(tokens.advantage_T > 0, positive)
        logit_T = tau_T * (tokens.ratio_T - 1)
        value_T = 4 / tau_T * logit_T.sigmoid()
        factor_T = 4 * logit_T.sigmoid() * (-logit_T).sigmoid() * tokens.ratio_T
        return TokenRule(value_T, factor_T, torch.zeros_like(value_T, dtype=torch.bool))
