"""PAPO, polarity-aware policy optimization (arXiv 2605.11775): advantages reweighted by polarity.

    polarity = -sign(A (log pi(y) + H))
    A' = A w_expanding  where the polarity is +1,   A w_contracting  where it is -1

The polarity is the sign of the first-order effect of a policy-gradient step on the token ``y`` on the entropy
``H`` of its next-token distribution. +1 expands the entropy: likely tokens with A < 0, unlikely ones with A >
0. -1 contracts it. ``polarity`` returns it for each token; ``reweighted`` wraps a token function (loss or
search) so that it sees A'. The weights w come from ``PapoSchedule``, by the run's entropy. The published
abstract gives the idea; docs/losses.md derives polarity and weights.

Legend: ``_T`` tokens of a pack (a micro-batch of packed sequences).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bapo_megatron.algo.papo_schedule import BranchWeights
from bapo_megatron.algo.tokens import likely
from bapo_megatron.tensor_types import MicroBatch, TokenFn, TokenStats


@torch.no_grad()
def polarity(log_prob_T: Tensor, entropy_T: Tensor, advantage_T: Tensor) -> Tensor:
    """Polarity of each token, ``-sign(A (log pi(y) + H))``, [T]: the sign of its effect on the entropy.

    Inputs are log pi(y) of the sampled token and the entropy of pi, in nats. 1 expands the entropy, -1
    contracts it; 0 where the advantage is 0. A token with ``log pi(y) = -H`` counts as likely.
    """
    return torch.where(likely(log_prob_T, entropy_T), -1.0, 1.0) * torch.sign(advantage_T)


def reweighted(fn: TokenFn, weights: BranchWeights) -> TokenFn:
    """Return PAPO's transform of ``fn``: on ``A' = A w``, with ``w`` by the token's polarity. The weights are
    constants without gradient. They keep the signs of advantages, so the same bound clips a token."""

    def transformed(stats: TokenStats, batch: MicroBatch) -> Tensor:
        polarity_T = polarity(stats.log_prob_T, stats.entropy_T, batch.advantage_T)
        weight_T = torch.where(polarity_T > 0, weights.expanding, 1.0)
        weight_T = torch.where(polarity_T < 0, weights.contracting, weight_T)
        return fn(stats, replace(batch, advantage_T=batch.advantage_T * weight_T))

    return transformed
