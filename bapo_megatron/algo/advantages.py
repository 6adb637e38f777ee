"""Group-relative advantages of the responses to one prompt: GRPO and Dr. GRPO, and groups that have none.

Pure functions on numpy arrays. ``data/samples.py`` computes the advantages of each group of a batch, on every
rank, ``trainer/reference.py`` again with penalized rewards. The sampler asks ``is_uniform`` once a group is
scored. Legend: ``_G`` responses of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

BranchReward = Literal["whole", "split"]
"""What each branch of an episode gets of its advantage; see ``AlgorithmConfig.branch_reward``."""

STD_EPSILON = 1e-6
"""Epsilon of GRPO's standard deviation: nearly equal rewards give no huge advantages."""

ROUNDING = 2.0**-22
"""Relative difference of rewards that counts as none, two roundings of float32: 0.1 + 0.2 and 0.3, or a score
that a model's server gave as float32 beside the same one."""

SMALLEST_DIFFERENCE = 1e-12
"""Difference of rewards that counts as none, however small they are: 0.1 + 0.2 - 0.3 and 0."""

LARGEST_REWARD = 1e18
"""Largest size of a reward: its square, which the standard deviation and losses need, is a float32."""


def group_advantages(rewards: Sequence[float] | np.ndarray, kind: Literal["grpo", "dr_grpo"]) -> np.ndarray:
    """Group-relative advantages: ``A_i = (R_i - mean(R)) / (std(R) + 1e-6)``, [G] from rewards R [G].

    - ``grpo`` (arXiv 2402.03300): as above
    - ``dr_grpo`` (arXiv 2503.20783): ``A_i = R_i - mean(R)``

    The standard deviation is that of a sample (over G - 1): GRPO's paper does not say which, and this is
    what torch.std, and with it verl, TRL and the published code of BAPO, compute.

    float32; exactly zero where all rewards are equal. ValueError if there are no rewards, or one is not
    finite or beyond ``LARGEST_REWARD``.
    """
    rewards_G = np.asarray(rewards, dtype=np.float64)
    if rewards_G.size == 0 or not np.isfinite(rewards_G).all():
        raise ValueError(f"a group needs finite rewards, got {rewards_G.tolist()}")
    if np.abs(rewards_G).max() > LARGEST_REWARD:
        raise ValueError(f"rewards may be as large as {LARGEST_REWARD:g}, got {rewards_G.tolist()}")
    if is_uniform(rewards_G):
        # The mean of equal numbers may differ from them in the last bit.
        return np.zeros(rewards_G.shape, dtype=np.float32)
    advantages_G: np.ndarray = rewards_G - rewards_G.mean()
    if kind == "grpo":
        advantages_G /= rewards_G.std(ddof=1) + STD_EPSILON
    return advantages_G.astype(np.float32)


def branch_advantages(
    rewards: Sequence[float],
    branches: Sequence[int],
    kind: Literal["grpo", "dr_grpo"],
    branch_reward: BranchReward = "whole",
) -> list[float]:
    """Advantages of a group whose episodes have branches: those of its episodes, one for each branch.

    ``rewards``: of each episode, which counts once in mean and deviation. ``branches``: of each episode.
    ValueError as of ``group_advantages``.
    """
    found = group_advantages(rewards, kind)
    return [
        float(value) / (count if branch_reward == "split" else 1)
        for value, count in zip(found, branches, strict=True)
        for _ in range(count)
    ]


def is_uniform(rewards: Sequence[float] | np.ndarray) -> bool:
    """Whether all rewards of a group are equal, but for ``ROUNDING`` and ``SMALLEST_DIFFERENCE``: every
    advantage is then zero, and so is its policy gradient.

    Dynamic sampling (DAPO): with ``rollout.drop_uniform_groups`` the sampler drops such groups.
    """
    if len(rewards) == 0:
        return True
    rewards_G = np.asarray(rewards, dtype=np.float64)
    return bool(np.ptp(rewards_G) <= max(SMALLEST_DIFFERENCE, ROUNDING * np.abs(rewards_G).max()))
