"""Custom method in one file: advantage, mask, loss and term of r1_distill_qwen_7b_8k_own_method.py."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from annotated_types import Gt
from torch import Tensor

from bapo_megatron.algo.advantages import Rewards, each_group
from bapo_megatron.algo.losses import TokenLoss, TokenRule, Tokens
from bapo_megatron.algo.masks import Response
from bapo_megatron.tensor_types import MicroBatch, TokenStats


@each_group
def rloo(group: Rewards) -> np.ndarray:
    """RLOO: the reward minus the mean reward of the group's others."""
    others = (group.reward_N.sum() - group.reward_N) / max(1, len(group.reward_N) - 1)
    return group.reward_N - others


def cut(response: Response) -> bool:
    """Mask of truncated responses with a negative advantage: such a response may have been right."""
    return response.is_cut and response.advantage < 0


def entropy(stats: TokenStats, batch: MicroBatch, coefficient: float = 0.001) -> Tensor:
    """Entropy bonus as a loss term: ``-coefficient * entropy`` of each token, [T]."""
    return -coefficient * stats.entropy_T


class Capped(TokenLoss):
    """REINFORCE weighted by the ratio up to ``cap``: ``-sum_t weight A sg(min(r, cap)) log pi``."""

    def __init__(self, algorithm: Any, cap: Annotated[float, Gt(0)] = 2.0) -> None:
        super().__init__(algorithm)
        self.cap = cap

    def rule(self, tokens: Tokens) -> TokenRule:
        factor_T = tokens.ratio_T.clamp(max=self.cap)
        return TokenRule(factor_T * tokens.log_prob_T, factor_T, tokens.ratio_T > self.cap)
