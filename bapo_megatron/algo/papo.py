"""PAPO, polarity-aware policy optimization (arXiv 2605.11775): an advantage transform.

A policy-gradient step on a sampled token moves the entropy of its next-token distribution up or down. The
sign of that first-order effect is the token's polarity:

    polarity = -sign(A (log pi(y) + H))

with ``H`` the entropy of the distribution that ``y`` was sampled from. +1 expands the entropy: likely tokens
that are punished, unlikely ones that are rewarded. -1 contracts it. Both branches stay in the update, with
weights that follow the run's entropy (``papo_schedule.py``):

    A' = A w_expanding  where the polarity is +1,   A w_contracting  where it is -1

The published abstract gives the idea; polarity and weights are derived in docs/losses.md.

Legend: ``_T`` tokens of a pack.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bapo_megatron.algo.papo_schedule import BranchWeights
from bapo_megatron.algo.tokens import likely
from bapo_megatron.types import MicroBatch, TokenFn, TokenStats


@torch.no_grad()
def polarity(log_prob_T: Tensor, entropy_T: Tensor, advantage_T: Tensor) -> Tensor:
    """PAPO's polarity of each token: the sign of its first-order effect on the next-token entropy.

    Args:
        log_prob_T: log pi(y) of the sampled token, nats.
        entropy_T: entropy of pi, nats.
        advantage_T: advantage of each token.

    Returns:
        float [T]: 1 expands the entropy, -1 contracts it, 0 where the advantage is 0. A token with
        ``log pi(y) = -H`` counts as likely.
    """
    return torch.where(likely(log_prob_T, entropy_T), -1.0, 1.0) * torch.sign(advantage_T)


def reweighted(fn: TokenFn, weights: BranchWeights) -> TokenFn:
    """PAPO's advantage transform: ``fn`` with the advantages of each branch multiplied by its weight.

    The weights are constants of the loss: no gradient passes through the polarity. Advantages keep
    their signs, so every token keeps the bound that clips it.
    """

    def transformed(stats: TokenStats, batch: MicroBatch) -> Tensor:
        polarity_T = polarity(stats.log_prob_T, stats.entropy_T, batch.advantage_T)
        weight_T = torch.where(polarity_T > 0, weights.expanding, 1.0)
        weight_T = torch.where(polarity_T < 0, weights.contracting, weight_T)
        return fn(stats, replace(batch, advantage_T=batch.advantage_T * weight_T))

    return transformed
