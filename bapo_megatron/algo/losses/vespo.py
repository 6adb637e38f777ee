"""VESPO (arXiv 2602.10693): ``-sum_t weight phi(W) A log pi``, a soft weight of the sequence ratio W.

``algorithm.loss=vespo``. The ratios of whole responses need a search over the update first, which may cost a
forward pass (``trainer/update_loss.py``).

Legend: ``_T`` tokens of a pack (a micro-batch of packed sequences).

``build_loss`` makes the loss for ``algorithm.loss``.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from annotated_types import Gt
from torch import Tensor

from bapo_megatron.algo.losses import Loss, LossTerms, Search
from bapo_megatron.algo.measurements import token_mean
from bapo_megatron.algo.sequences import PerSequence, sequence_sums
from bapo_megatron.algo.tokens import LOG_RATIO_LIMIT, unmasked
from bapo_megatron.errors import ConfigError
from bapo_megatron.tensor_types import MicroBatch, TokenStats


class Vespo(Loss):
    """VESPO loss: ``-sum_t weight stop_gradient(phi(W)) A log pi``, so ``d loss / d log pi = -weight A phi``.

    ``W = prod_t r_t``, ``r = pi / pi_old``, is the ratio of the whole response, without a length
    normalization, and ``phi(W) = W^k exp(lambda (1 - W))``, which is 1 at W = 1 and falls on both sides of
    its peak at ``k / lambda``. ``k`` and ``lambda`` depend on the sign of the advantage. No token is clipped.
    As in the authors' code (github.com/FloyedShen/VESPO) ``log W`` is clamped to +-20. Metric ``vespo/phi``:
    the mean phi. Needs the ratios of the whole update first, which may cost a forward pass. Made by
    ``build_loss`` for ``algorithm.loss=vespo``.
    """

    search: Search

    def __init__(
        self,
        algorithm: Any,
        k_positive: Annotated[float, Gt(0)] = 2.0,
        lambda_positive: Annotated[float, Gt(0)] = 3.0,
        k_negative: Annotated[float, Gt(0)] = 3.0,
        lambda_negative: Annotated[float, Gt(0)] = 2.0,
    ) -> None:
        """Defaults of the authors' runs. ConfigError with ``importance_cap``: W is the importance weight."""
        super().__init__(algorithm)
        self.k, self.rate = (k_negative, k_positive), (lambda_negative, lambda_positive)
        if algorithm.importance_cap is not None:
            raise ConfigError(
                f"algorithm.importance_cap={algorithm.importance_cap} would weigh vespo's loss beside W: "
                f"leave it out, and with algorithm.old_log_probs=rollout W is pi / pi_rollout"
            )
        self.search = Search(
            sequence_sums, lambda sums: PerSequence(sums.chunk(2)[0]), "update", is_ratio=True
        )
        self.measurements = (token_mean("vespo/phi", lambda view: view.terms.gradient_T),)

    def terms(self, stats: TokenStats, batch: MicroBatch, found: PerSequence) -> LossTerms:
        """``-sum_t weight phi A log pi``. ``found``: the sum of log r of each sequence."""
        fields = (stats.log_prob_T, batch.advantage_T, batch.weight_T)
        log_prob_T, advantage_T, weight_T = unmasked(batch.mask_T, *fields)
        live_T = batch.mask_T != 0
        phi_T = torch.where(live_T, self._phi(found.of_tokens(batch), advantage_T), 0.0)
        loss = -(weight_T * advantage_T * phi_T * log_prob_T).sum()
        return LossTerms(loss, phi_T, torch.zeros_like(live_T))

    def _phi(self, log_weight_T: Tensor, advantage_T: Tensor) -> Tensor:
        """``phi(W) = W^k exp(lambda (1 - W))`` of each token's sequence, [T], from ``log W``."""
        log_weight_T = log_weight_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        negative, positive = (
            (k * log_weight_T - rate * torch.expm1(log_weight_T)).exp()
            for k, rate in zip(self.k, self.rate, strict=True)
        )
        return torch.where(advantage_T < 0, negative, positive)
