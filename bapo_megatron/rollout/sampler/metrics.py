"""What the sampling of a step measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bapo_megatron.config import RewardConfig
from bapo_megatron.types import Metrics

if TYPE_CHECKING:
    from bapo_megatron.rollout.sampler.state import Finished, SamplerState


class GroupSummary(NamedTuple):
    """What the metrics need to know of a judged group, whatever became of it."""

    number: int
    rewards: list[float]
    lengths: list[int]
    """Tokens of its responses."""
    reasons: list[str]
    failures: list[str]
    """Kinds of failed judgements."""


def sampler_metrics(
    sampler_state: SamplerState, chosen: Sequence[Finished], stale: int, reward: RewardConfig
) -> Metrics:
    """What is known when a step is given the groups ``chosen``, ``stale`` of them older than allowed.

    ``sampler/tokens_*`` count from the beginning of the run: sampled = trained + dropped + kept, always.
    """
    trained = sum(group.tokens for group in chosen)
    dropped = sum(count for kind, count in sampler_state.tokens.items() if kind.startswith("dropped_"))
    return {
        **rollout_metrics(sampler_state.judged, len(chosen), reward),
        "rollout/groups_dropped": float(sampler_state.dropped["uniform"]),
        "rollout/groups_stale": float(sampler_state.dropped["stale"] + stale),
        "sampler/groups_kept": float(sampler_state.outstanding - len(chosen)),
        "sampler/tokens_sampled": float(sampler_state.tokens["sampled"]),
        "sampler/tokens_trained": float(sampler_state.tokens["trained"] + trained),
        "sampler/tokens_dropped": float(dropped),
        "sampler/tokens_kept": float(sampler_state.live_tokens - trained),
    }


def rollout_metrics(judged: Sequence[GroupSummary], kept: int, reward: RewardConfig) -> Metrics:
    """Figures over all responses that were judged for the step, before uniform groups were dropped.

    So neither the filter nor the number of groups bends them. A response is correct if its reward is nearer
    to ``reward.correct`` than to ``reward.wrong``. A mean over nothing is None. Lengths are in tokens.
    """
    groups = sorted(judged)
    rewards = np.array([value for group in groups for value in group.rewards])
    lengths = np.array([length for group in groups for length in group.lengths])
    correct = np.abs(rewards - reward.correct) < np.abs(rewards - reward.wrong)
    truncated = np.array([reason == "length" for group in groups for reason in group.reasons])
    correct_by_group = np.split(correct, np.cumsum([len(group.rewards) for group in groups])[:-1])
    return {
        "reward/mean": _mean(rewards),
        "reward/solved_none": _mean(np.array([not one.any() for one in correct_by_group])),
        "reward/solved_all": _mean(np.array([one.all() for one in correct_by_group])),
        "reward/failures": float(sum(len(group.failures) for group in groups)),
        "rollout/groups_sampled": float(len(groups)),
        "rollout/groups": float(kept),
        "rollout/length_mean": _mean(lengths),
        "rollout/length_max": float(lengths.max()) if len(lengths) else None,
        "rollout/length_positive_mean": _mean(lengths[correct]),
        "rollout/length_negative_mean": _mean(lengths[~correct]),
        "rollout/truncated_fraction": _mean(truncated),
        "rollout/tokens": float(lengths.sum()),
    }


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
