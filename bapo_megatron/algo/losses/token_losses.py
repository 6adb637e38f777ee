"""Per-token losses ``-sum_t weight A value``: CISPO, SAPO, DPPO, CE-GPPO, ASPO and MASPO, after their papers.

Each is a ``TokenLoss``: ``rule`` maps a pack's tokens to value, gradient factor and clipping, without an
extra pass over the update. Here ``r = pi / pi_old``, ``sg`` is stop-gradient, ``weight`` the token's share in
the mean, and ``g`` the gradient factor: ``d loss / d log pi = -weight A g``. Where a paper takes the mean
within each response first, set ``algorithm.loss_mean=sequence``. Legend: ``_T`` tokens of a pack.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from bapo_megatron.algo.losses import TokenLoss, TokenRule, Tokens
from bapo_megatron.algo.measurements import Measurement, PackView, UpdateSums, gate_mean, share, token_mean
from bapo_megatron.algo.tokens import unmasked
from bapo_megatron.errors import ConfigError
from bapo_megatron.types import Metrics


class Cispo(TokenLoss):
    """CISPO loss (MiniMax-M1, arXiv 2506.13585, Eqs. 4 and 5): clipped importance weights on REINFORCE.

        loss = -sum_t weight A sg(clip(r, ratio_low, ratio_high)) log pi

    Every token keeps a bounded gradient: ``g = clip(r, ratio_low, ratio_high)``. The paper's bounds are ``1 -
    eps_low`` and ``1 + eps_high``; it sets no effective lower bound and does not publish ``eps_high``. The
    default of 5 is from ScaleRL (arXiv 2510.13786), also recommended by TRL. The mean is over the batch's
    tokens.

    Clipped: tokens whose weight is a bound. Metric ``cispo/weight``: the mean weight.
    """

    measurements = (token_mean("cispo/weight", lambda view: view.terms.gradient_T),)

    def __init__(
        self,
        algorithm: Any,
        ratio_low: Annotated[float, Ge(0)] = 0.0,
        ratio_high: Annotated[float, Gt(0)] = 5.0,
    ) -> None:
        """``ratio_low``, ``ratio_high``: bounds of the weight. Raises ConfigError if not in order."""
        super().__init__(algorithm)
        if ratio_low >= ratio_high:
            raise ConfigError(
                f"algorithm.loss_settings.ratio_low={ratio_low} must be below ratio_high={ratio_high}"
            )
        self.ratio_low, self.ratio_high = ratio_low, ratio_high

    def rule(self, tokens: Tokens) -> TokenRule:
        """``g = clip(r, ...)`` for every token."""
        weight_T = tokens.ratio_T.clamp(self.ratio_low, self.ratio_high)
        return TokenRule(weight_T * tokens.log_prob_T, weight_T, weight_T != tokens.ratio_T)


class Sapo(TokenLoss):
    """SAPO loss (arXiv 2511.20347, Eqs. 5 and 6): a soft gate around r = 1 instead of clipping.

        loss = -sum_t weight A f(r)    with    f(r) = 4 / tau sigmoid(tau (r - 1))

    So ``g = 4 p (1 - p) r`` with ``p = sigmoid(tau (r - 1))`` (Eq. 8). The gate, ``g / r``, is 1 at r = 1 and
    falls on both sides. Its temperature ``tau`` depends on the sign of the advantage; the larger one, for
    negative advantages, makes their gradient fall faster. Defaults are the paper's, except its mean (within
    each response first).

    Clips no token. Metric ``sapo/gate``: the mean gate.
    """

    measurements = (gate_mean("sapo/gate"),)

    def __init__(
        self,
        algorithm: Any,
        temperature_positive: Annotated[float, Gt(0)] = 1.0,
        temperature_negative: Annotated[float, Gt(0)] = 1.05,
    ) -> None:
        """``temperature_*``: tau of tokens with A > 0, and of other tokens."""
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


_ROUNDING = 1e-8
"""Added to the other tokens' probability, which float32 may round to 0, as in the DPPO authors' code."""


class _Dppo(TokenLoss):
    """Base class of the DPPO losses (arXiv 2602.04879v3, Eq. 12); subclasses define the divergence.

        loss = -sum_t weight M r A

    ``M`` is 0 where the update has moved a token's probability in the direction of its advantage (A > 0 and
    pi > mu, or A < 0 and pi < mu) and the divergence of the two distributions is above
    ``divergence_threshold``; otherwise 1. So ``g = M r``. The divergence is between two-outcome
    distributions, the sampled token or any other, with ``mu = pi_rollout`` (the paper's Sec. 5.2 anchors the
    trust region to the sampling policy).

    The thresholds are from Appendix C.1, 0.15 and 0.05 (Appendix E has 0.2 for most TV runs). ``ratio_cap``
    is the ``C`` of Eq. 23, ``g = M min(r, C)``: none in Appendix C.1, 5 in Appendix E, 20 in the authors'
    code. A masked token stays in the loss's token count, as in that code; the paper's sum over tokens leaves
    this open.

    Clipped: the masked tokens. Metric ``dppo/divergence``: its mean over the tokens.
    """

    def __init__(self, algorithm: Any, divergence_threshold: float, ratio_cap: float | None) -> None:
        super().__init__(algorithm)
        self.divergence_threshold, self.ratio_cap = divergence_threshold, ratio_cap
        self.measurements = (token_mean("dppo/divergence", self._divergences),)

    @abstractmethod
    def divergence(self, tokens: Tokens) -> Tensor:
        """Divergence between rollout policy and policy at each token, [T]."""

    def rule(self, tokens: Tokens) -> TokenRule:
        """``g = M r``: the (capped) ratio, 0 where masked."""
        move_T = (tokens.log_prob_T - tokens.rollout_log_prob_T) * tokens.advantage_T
        masked_T = (move_T > 0) & (self.divergence(tokens) > self.divergence_threshold)
        ratio_T = tokens.ratio_T if self.ratio_cap is None else tokens.ratio_T.clamp(max=self.ratio_cap)
        factor_T = torch.where(masked_T, 0.0, ratio_T)
        return TokenRule(factor_T, factor_T, masked_T)

    def _divergences(self, view: PackView) -> Tensor:
        return self.divergence(Tokens.of(view.stats, view.batch))


class DppoTv(_Dppo):
    """DPPO loss ``dppo_tv``, masked by total variation, ``|mu - pi|`` (Eq. 13), ``mu = pi_rollout``."""

    def __init__(
        self,
        algorithm: Any,
        divergence_threshold: Annotated[float, Gt(0), Lt(1)] = 0.15,
        ratio_cap: Annotated[float | None, Gt(0)] = None,
    ) -> None:
        super().__init__(algorithm, divergence_threshold, ratio_cap)

    def divergence(self, tokens: Tokens) -> Tensor:
        """Eq. 13: ``|mu - pi|``, [T]."""
        return (tokens.log_prob_T.exp() - tokens.rollout_log_prob_T.exp()).abs()


class DppoKl(_Dppo):
    """DPPO loss ``dppo_kl``, masked by the binary KL(rollout || policy), in nats (Eq. 14)."""

    def __init__(
        self,
        algorithm: Any,
        divergence_threshold: Annotated[float, Gt(0)] = 0.05,
        ratio_cap: Annotated[float | None, Gt(0)] = None,
    ) -> None:
        super().__init__(algorithm, divergence_threshold, ratio_cap)

    def divergence(self, tokens: Tokens) -> Tensor:
        """Eq. 14: ``mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))``, [T]."""
        log_pi_T, log_mu_T = tokens.log_prob_T, tokens.rollout_log_prob_T
        other_pi_T, other_mu_T = (-torch.expm1(log_T) + _ROUNDING for log_T in (log_pi_T, log_mu_T))
        kept_T = log_mu_T.exp() * (log_mu_T - log_pi_T)
        return kept_T - torch.expm1(log_mu_T) * (other_mu_T / other_pi_T).log()


class CeGppo(TokenLoss):
    """CE-GPPO loss (arXiv 2509.20712v5, Eqs. 8 to 10): clipped tokens keep a bounded gradient.

        loss = -sum_t weight A v    with    g = beta1 (1 - clip_low)    where A < 0 and r < 1 - clip_low
                                            g = beta2 (1 + clip_high)   where A > 0 and r > 1 + clip_high
                                            g = r                       elsewhere

    ``v = g``: PPO's ratio, or a bound times beta, scaled by ``r / sg(r)``. ``beta1`` strengthens what lowers
    the entropy (unlikely tokens pushed down), ``beta2`` what raises it; with both 0 the gradient is PPO's.
    The defaults are from the paper's 7B runs (0.5 and 1 at 1.5B), with its symmetric bounds. The paper takes
    the mean within each response first; the authors' code has a token mean, and a dual clip of 3 for A < 0
    that is not in the paper.

    Clipped: the tokens clipped by PPO. Metrics ``ce_gppo/preserved_low`` and ``_high``: the share of the
    gradient mass ``sum weight g |A|`` beyond the lower and the upper bound, None if the mass is 0.
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
        """Eq. 10 as factor and as the value of Eq. 8."""
        below_T = (tokens.advantage_T < 0) & (tokens.ratio_T < self.low)
        above_T = (tokens.advantage_T > 0) & (tokens.ratio_T > self.high)
        factor_T = torch.where(below_T, self.beta1 * self.low, tokens.ratio_T)
        factor_T = torch.where(above_T, self.beta2 * self.high, factor_T)
        return TokenRule(factor_T, factor_T, below_T | above_T)


def _mass(view: PackView) -> Tensor:
    """Gradient mass, [3]: of all tokens, beyond the lower bound, and beyond the upper bound."""
    weight_T, advantage_T = unmasked(view.batch.mask_T, view.batch.weight_T, view.batch.advantage_T)
    mass_T = weight_T * view.terms.gradient_T * advantage_T.abs()
    low_T, high_T = (view.terms.clipped_T & side_T for side_T in (advantage_T < 0, advantage_T > 0))
    return torch.stack([mass_T.sum(), (mass_T * low_T).sum(), (mass_T * high_T).sum()])


def _shares(sums: Tensor, _update: UpdateSums) -> Metrics:
    mass, low, high = sums.tolist()
    return {"ce_gppo/preserved_low": share(low, mass), "ce_gppo/preserved_high": share(high, mass)}


class Aspo(TokenLoss):
    """ASPO loss (arXiv 2510.06062v2): PPO's mask, with the reciprocal ratio as weight of positive tokens.

        loss = -sum_t weight A min(w, dual_clip)    with    w = 1 / r for A > 0, w = r for A < 0

    A positive token with r < 1 gets a larger gradient, one with r > 1 a smaller one. The paper's Sec. 6 in
    three steps:

    1. PPO's mask: no gradient where A < 0 and ``r < 1 - clip_low``, or A > 0 and ``r > 1 + clip_high``
    2. Eq. 3: ``w = r`` for A < 0, and ``w = 1 / r`` for A > 0, with the gradient of ``pi_old pi / sg(pi^2)``
    3. ``w`` is at most ``dual_clip``, and keeps its gradient there

    So ``g = min(w, dual_clip)``, or 0 where masked. A masked token has the value of its bound, as in PPO.

    Defaults are from the authors' scripts; the paper gives no numbers. The paper bounds ``w`` for A > 0 (step
    3) and for A < 0 by PPO's dual clip; that both keep their gradient is the authors' code. Two details of
    that code are neither in the paper nor here: wider bounds, 0.4, for the fifth of a response's tokens with
    the highest entropy, and the log-prob as value of a dual-clipped token (the same gradient). The paper
    takes the mean within each response first, the code over tokens.

    Clipped: the masked tokens. Metric ``aspo/dual_clipped``: share of tokens with a weight above
    ``dual_clip``.
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
        """The bounded weight; no gradient where PPO would clip."""
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
    """ASPO's weight, Eq. 3: ``1 / r`` for A > 0, otherwise ``r``."""
    return torch.where(positive_T, 1 / ratio_T, ratio_T)


_WIDEST = 10.0
"""Upper clip of MASPO's width from a token's probability."""
_LEAST, _MOST = 0.1, 10.0
"""Clip of the width's factor ``h`` from a token's advantage."""


class Maspo(TokenLoss):
    """MASPO loss (arXiv 2602.17550, Sec. 4): a one-sided Gaussian gate on the ratio instead of clipping.

        loss = -sum_t weight A sg(F) r    with    F = exp(-(r - 1)^2 / (2 s^2))

    So ``g = F r``. ``F`` gates only tokens that have moved in the direction of their advantage (A > 0 and r >
    1, or A < 0 and r < 1); elsewhere it is 1. Its width

        s = clip(sigma pi_old^-alpha, sigma, 10) clip(h, 0.1, 10)
        h = 1 + beta A for A > 0, 1 / (1 - beta A) for A < 0

    grows for unlikely tokens and with the advantage, and shrinks for large negative advantages. ``sigma`` is
    the paper's sigma_base. Formula, clips, defaults and token mean are from the authors' code
    (github.com/FlyTune/MASPO-RL), which recommends ``alpha`` 0.3 to 0.5 and ``beta`` 0.03.

    Clips no token. Metric ``maspo/gate``: the mean of F.
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
