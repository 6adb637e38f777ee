"""The filter of dynamic sampling (DAPO): drops groups whose rewards are all equal, which have no gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from bapo_megatron.types import Group


def is_uniform(rewards: Sequence[float] | np.ndarray) -> bool:
    """Whether all rewards of a group are equal: every advantage is then zero."""
    return len(rewards) == 0 or bool(np.all(np.asarray(rewards) == rewards[0]))


def drop_uniform(groups: Iterable[Group]) -> list[Group]:
    """The groups whose rewards are not all equal, in their order."""
    return [group for group in groups if not is_uniform([rollout.reward for rollout in group.rollouts])]
