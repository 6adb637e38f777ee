"""MASPO (arXiv 2602.17550, Sec. 4): a one-sided Gaussian gate on the ratio in place of clipping.

    loss = -sum_t weight A stop_gradient(F) r    with    F = exp(-(r - 1)^2 / (2 s^2)),    r = pi / pi_old

``algorithm.loss=maspo``. So ``d loss / d log pi = -weight A g`` with ``g = F r``. ``F`` gates only tokens
that have moved in the direction of their advantage (A > 0 and r > 1, or A < 0 and r < 1); elsewhere it is 1.
Its width

    s = clip(sigma pi_old^-alpha, sigma, 10) clip(h, 0.1, 10)
    h = 1 + beta A for A > 0, 1 / (1 - beta A) for A < 0

grows where a token was unlikely, and with the advantage, and shrinks for large negative advantages. ``sigma``
is the paper's sigma_base. Formula, clips and defaults are those of the authors' code
(github.com/FlyTune/MASPO-RL); it recommends ``alpha`` 0.3 to 0.5 and ``beta`` 0.03. The mean is over the
tokens there: ``algorithm.loss_mean=token``.

``build_loss`` makes the loss for ``algorithm.loss``.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt

from bapo_megatron.algo.losses import TokenLoss, TokenRule, Tokens
from bapo_megatron.algo.measurements import gate_mean

_WIDEST = 10.0
"""Upper clip of the width's factor from a token's probability."""
_LEAST, _MOST = 0.1, 10.0
"""Clip of the width's factor ``h`` from a token's advantage."""


class Maspo(TokenLoss):
    """MASPO loss: surrogate with a one-sided Gaussian gate F. Clips no token.

    Metric ``maspo/gate``: the mean of F. Needs no pass of its own over the update. Made by ``build_loss`` for
    ``algorithm.loss=maspo``.
    """

    measurements = (gate_mean("maspo/gate"),)

    def __init__(
        self,
        algorithm: Any,
        sigma: Annotated[float, Gt(0)] = 1.0,
        alpha: Annotated[float, Ge(0)] = 0.3,
        beta: Annotated[float, Ge(0)] = 0.03,
    ) -> None:
        """``sigma``: width at pi_old = 1. ``alpha``, ``beta``: its growth with rarity and advantage."""
        super().__init__(algorithm)
        self.sigma, self.alpha, self.beta = sigma, alpha, beta

    def rule(self, tokens: Tokens) -> TokenRule:
        """``g = F r``, with the gate F as a constant."""
        scale_T = 1 + self.beta * tokens.advantage_T.abs()
        risk_T = torch.where(tokens.advantage_T > 0, scale_T, 1 / scale_T).clamp(_LEAST, _MOST)
        width_T = self.sigma * (-self.alpha * tokens.old_log_prob_T).exp()
        width_T = width_T.clamp(self.sigma, max(self.sigma, _WIDEST)) * risk_T
        distance_T = tokens.ratio_T - 1
        gate_T = (-(distance_T**2) / (2 * width_T**2)).exp()
        factor_T = torch.where(distance_T * tokens.advantage_T > 0, gate_T, 1.0) * tokens.ratio_T
        return TokenRule(factor_T, factor_T, torch.zeros_like(factor_T, dtype=torch.bool))
