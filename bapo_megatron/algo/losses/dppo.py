"""DPPO (arXiv 2602.04879v3, Eq. 12): ``-sum_t weight M r A``, masked by a divergence of the policies.

``M`` is 0 where the update has moved a token's probability the way its advantage asks for (A > 0 and
pi > mu, or A < 0 and pi < mu) and the divergence of the two distributions is above ``divergence_threshold``;
else 1. So ``g = M r``, with ``r = pi / pi_old`` and ``d loss / d log pi = -weight A g``. The divergence is
that of two outcomes, the sampled token or any other, with ``mu = pi_rollout`` (the paper's Sec. 5.2: the
trust region must be anchored to the policy that sampled). ``algorithm.loss`` names it:

- ``dppo_tv``, Eq. 13: ``|mu - pi|``
- ``dppo_kl``, Eq. 14: ``mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))``

The thresholds are those of Appendix C.1, 0.15 and 0.05 (Appendix E has 0.2 for most TV runs). ``ratio_cap``
is the ``C`` of Eq. 23, ``g = M min(r, C)``: none in Appendix C.1, 5 in Appendix E, 20 in the authors' code. A
masked token stays in the count of tokens that the loss is divided by, as in that code; the paper writes a
sum over tokens and does not say.

``build_loss`` makes the loss for ``algorithm.loss``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any

import torch
from annotated_types import Gt, Lt
from torch import Tensor

from bapo_megatron.algo.losses import TokenLoss, TokenRule, Tokens
from bapo_megatron.algo.measurements import PackView, token_mean

_ROUNDING = 1e-8
"""Added to the probability of all other tokens, which float32 may round to 0; as in the authors' code."""


class _Dppo(TokenLoss):
    """Base class of the DPPO losses; a subclass gives the divergence. Clipped: the masked tokens.

    Metric ``dppo/divergence``: its mean over the tokens. Needs no pass of its own over the update.
    """

    def __init__(self, algorithm: Any, divergence_threshold: float, ratio_cap: float | None) -> None:
        super().__init__(algorithm)
        self.divergence_threshold, self.ratio_cap = divergence_threshold, ratio_cap
        self.measurements = (token_mean("dppo/divergence", self._divergences),)

    @abstractmethod
    def divergence(self, tokens: Tokens) -> Tensor:
        """Divergence of the rollout policy and the policy at each token, [T]."""

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
    """DPPO loss ``dppo_tv``, with total variation, ``|mu - pi|`` (Eq. 13). Clipped: the masked tokens.

    Metric ``dppo/divergence``: its mean over the tokens. ``mu`` is pi_rollout. Made by ``build_loss``.
    """

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
    """DPPO loss ``dppo_kl``, with the binary KL(rollout || policy), in nats (Eq. 14). Clipped: masked tokens.

    Metric ``dppo/divergence``: its mean over the tokens. Made by ``build_loss``.
    """

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
