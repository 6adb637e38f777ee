"""Positive share of sampled groups: what BAPO's search would see at ratios of 1, before any training.

``RolloutRecord`` logs it for each step, and says at the end of a rollout-only run whether BAPO can act.
Used by ``rollouts.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from bapo_megatron.algo.advantages import group_advantages
from bapo_megatron.algo.bounds import BoundsConfig
from bapo_megatron.types import GroupHeader

SHARE = "bapo/sampled_positive_share"
"""Metric: positive share of a step's groups at ratios of 1; None if no group has an advantage."""


def positive_share(groups: Sequence[GroupHeader], kind: Literal["grpo", "dr_grpo"]) -> float | None:
    """Share of positive tokens: the sum of A over them, divided by that of abs(A) over all trained tokens.

    The contribution of Eq. 8 with ``share="absolute"`` and ``weight="uniform"`` where all ratios are 1. In a
    group the advantages add up to 0, so only lengths move it from 1/2. None if all advantages are 0.
    """
    positive = total = 0.0
    for group in groups:
        advantages_G = group_advantages([one.reward for one in group.responses], kind).astype(np.float64)
        parts_G = advantages_G * [one.trained_tokens for one in group.responses]
        positive += float(parts_G[parts_G > 0].sum())
        total += float(np.abs(parts_G).sum())
    return positive / total if total else None


def outlook(shares: Sequence[float], bounds: BoundsConfig) -> str | None:
    """Sentence on whether BAPO can act on data with these ``shares``, one a step.

    None without shares, for fixed bounds, and where the search's contribution is not this share.
    """
    is_fixed = bounds.low_start == bounds.low_end and bounds.high_start == bounds.high_end
    if not shares or is_fixed or (bounds.share, bounds.weight) != ("absolute", "uniform"):
        return None
    below = sum(share < bounds.target for share in shares)
    pair = f"fixed({bounds.low_start:g}, {bounds.high_start:g})"
    if 2 * below >= len(shares):
        verdict = "BAPO can act on this data"
    elif below:
        verdict = f"BAPO can act on this data at times, and will mostly equal {pair}"
    else:
        verdict = f"BAPO will equal {pair} on this data, unless training changes the lengths"
    return (
        f"{verdict}: positive tokens hold {sum(shares) / len(shares):.3f} of the gradient at ratios of 1, "
        f"below the target of {bounds.target:g} in {below} of {len(shares)} steps"
    )
