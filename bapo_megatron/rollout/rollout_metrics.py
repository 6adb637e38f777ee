"""What the sampling of a step measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bapo_megatron.config import RewardConfig
from bapo_megatron.types import Group, Metrics


def rollout_metrics(sampled: Sequence[Group], kept: Sequence[Group], reward: RewardConfig) -> Metrics:
    """Figures over all responses that the step sampled, before uniform groups were dropped.

    So neither the filter nor the number of rounds bends them. A response is correct if its reward is nearer
    to ``reward.correct`` than to ``reward.wrong``. A mean over nothing is None. Lengths are in tokens.
    """
    rollouts = [rollout for group in sampled for rollout in group.rollouts]
    rewards = np.array([rollout.reward for rollout in rollouts])
    lengths = np.array([len(rollout.token_ids_R) for rollout in rollouts])
    correct = np.abs(rewards - reward.correct) < np.abs(rewards - reward.wrong)
    truncated = np.array([rollout.finish_reason == "length" for rollout in rollouts])
    correct_by_group = np.split(correct, np.cumsum([len(group.rollouts) for group in sampled])[:-1])
    return {
        "reward/mean": _mean(rewards),
        "reward/solved_none": _mean(np.array([not one.any() for one in correct_by_group])),
        "reward/solved_all": _mean(np.array([one.all() for one in correct_by_group])),
        "rollout/groups_sampled": float(len(sampled)),
        "rollout/groups_dropped": float(len(sampled) - len(kept)),
        "rollout/groups": float(len(kept)),
        "rollout/length_mean": _mean(lengths),
        "rollout/length_max": float(lengths.max()) if len(lengths) else None,
        "rollout/length_positive_mean": _mean(lengths[correct]),
        "rollout/length_negative_mean": _mean(lengths[~correct]),
        "rollout/truncated_fraction": _mean(truncated),
        "rollout/tokens": float(lengths.sum()),
    }


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
