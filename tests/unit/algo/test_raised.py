"""Raised tokens: numbers by hand, additivity, and rubbish under the mask."""

from __future__ import annotations

import math

import pytest
import torch

from bapo_megatron.algo.bounds import grpo
from bapo_megatron.algo.losses.clip import ClipLoss
from bapo_megatron.algo.measurements import RAISED_TOKENS, PackView, UpdateSums
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.types import TokenStats
from tests.unit.algo.test_objective import pack

LN = math.log
# Ratios 2, 1.5, 1.19, 0.5; pi_old 0.1, 0.4, 0.5, 0.6. The fifth does not count.
OLD = [0.1, 0.4, 0.5, 0.6]
RATIOS = [2.0, 1.5, 1.19, 0.5]


def view(tokens: list[int], masked: bool = False) -> PackView:
    advantage = [[1.0, -1.0, 2.0, -2.0][place] for place in tokens]
    old = [LN(OLD[place]) for place in tokens]
    new = [LN(OLD[place] * RATIOS[place]) for place in tokens]
    mask, age = [1.0] * len(tokens), [0] * len(tokens)
    if masked:
        advantage, old, new = [*advantage, math.nan], [*old, math.nan], [*new, math.inf]
        mask, age = [*mask, 0.0], [*age, 0]
    batch = pack(advantage, old, mask, age)
    stats = TokenStats(torch.tensor(new), torch.ones(len(new)))
    loss = ClipLoss(AlgorithmConfig(bounds=grpo()))
    return PackView(stats, batch, loss.terms(stats, batch, loss.search.known), loss.search.known, 0)


@pytest.mark.parametrize("masked", [False, True])
def test_raised_tokens_by_hand(masked: bool) -> None:
    """Two of four tokens are raised, sampled with 0.1 and 0.4; the first is positive."""
    sums = RAISED_TOKENS.sums(view([0, 1, 2, 3], masked))
    metrics = RAISED_TOKENS.metrics(sums, UpdateSums(4.0, None, {}))
    assert metrics == pytest.approx(
        {
            "raised/tokens": 0.5,
            "raised/probability": 0.25,
            "raised/positive_tokens": 0.25,
            "raised/positive_probability": 0.1,
        }
    )


def test_sums_of_packs_add_up() -> None:
    whole = RAISED_TOKENS.sums(view([0, 1, 2, 3]))
    assert len(whole) == RAISED_TOKENS.size
    assert torch.allclose(RAISED_TOKENS.sums(view([0, 3])) + RAISED_TOKENS.sums(view([1, 2])), whole)


def test_without_raised_tokens_there_is_no_probability() -> None:
    metrics = RAISED_TOKENS.metrics(RAISED_TOKENS.sums(view([2, 3])), UpdateSums(2.0, None, {}))
    assert (metrics["raised/tokens"], metrics["raised/probability"]) == (0.0, None)
