"""Sampling metrics of a step, by name: rewards, response lengths, environment episodes, token counts.

``sampler_metrics`` returns all of them, from groups' summaries and the sampler's counts. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args

import numpy as np

from bapo_megatron.config import RewardConfig
from bapo_megatron.rollout.sampler.state import FinishedGroup, GroupSummary, SamplerState
from bapo_megatron.types import FinishReason, Metrics

REPORTED = "episode/"
"""Prefix of metrics reported by a user's environment."""
SAMPLED = "sampled/"
"""Prefix of metrics of all groups scored since the last batch, trained on or not."""


def sampler_metrics(
    sampler_state: SamplerState,
    chosen: Sequence[FinishedGroup],
    stale: int,
    reward: RewardConfig,
    sources: Sequence[str] = (),
) -> Metrics:
    """Return the metrics of a step that trains on the groups ``chosen``; ``stale``: how many are too old.
    ``group_metrics`` covers the chosen groups; under ``sampled/`` it covers all groups scored since the last
    batch, uniform ones included, so that the filter does not bias them. Token counts (``sampler/tokens_*``)
    start with the run: sampled = trained + dropped + kept."""
    trained, scored = [item.summary for item in chosen], sampler_state.scored
    tokens = sum(group.tokens for group in chosen)
    dropped = sum(count for kind, count in sampler_state.tokens.items() if kind.startswith("dropped_"))
    sampled = group_metrics(scored, reward, sources)
    return {
        **group_metrics(trained, reward, sources, trained_only=True),
        # Times appear under one name only, which run comparisons can exclude.
        **{SAMPLED + name: value for name, value in sampled.items() if not name.startswith("time/")},
        **_counts(trained, scored),
        **{
            f"source/{source}/{name}": value
            for source in sources
            for name, value in _counts(_of(trained, source), _of(scored, source)).items()
        },
        "rollout/groups_dropped": float(sampler_state.dropped["uniform"]),
        "rollout/groups_failed": float(sampler_state.dropped["failed"]),
        "rollout/groups_stale": float(sampler_state.dropped["stale"] + stale),
        "sampler/groups_kept": float(sampler_state.outstanding - len(chosen)),
        "sampler/tokens_sampled": float(sampler_state.tokens["sampled"]),
        "sampler/tokens_trained": float(sampler_state.tokens["trained"] + tokens),
        "sampler/tokens_dropped": float(dropped),
        "sampler/tokens_kept": float(sampler_state.outstanding_tokens - tokens),
    }


def _counts(trained: Sequence[GroupSummary], scored: Sequence[GroupSummary]) -> Metrics:
    return {"rollout/groups_sampled": float(len(scored)), "rollout/groups": float(len(trained))}


def _of(groups: Sequence[GroupSummary], source: str) -> list[GroupSummary]:
    return [group for group in groups if group.source == source]


def group_metrics(
    groups: Sequence[GroupSummary],
    reward: RewardConfig,
    sources: Sequence[str] = (),
    trained_only: bool = False,
) -> Metrics:
    """Return ``rollout_metrics`` and ``episode_metrics`` of scored groups, also per source as
    ``source/NAME/...``. ``trained_only``: exclude responses that are left out of their groups."""

    def metrics(groups: Sequence[GroupSummary]) -> Metrics:
        shown = [group.trained for group in groups] if trained_only else groups
        return {**rollout_metrics(groups, reward, trained_only), **episode_metrics(shown)}

    values = metrics(groups)
    for source in sources:
        own = metrics(_of(groups, source))
        named = {name: value for name, value in own.items() if not name.startswith("time/")}
        values |= {f"source/{source}/{name}": value for name, value in named.items()}
    return values


def rollout_metrics(
    groups: Sequence[GroupSummary], reward: RewardConfig, trained_only: bool = False
) -> Metrics:
    """Return response statistics of scored groups. Rewards cover the responses that have one; lengths, in
    tokens, cover all, or with ``trained_only`` the same ones. A response is correct if its score (without
    penalties) is nearer to ``reward.correct`` than to ``reward.wrong``. A mean over nothing is None."""
    groups = sorted(groups, key=lambda summary: summary.number)
    responses = sum(len(group.rewards) for group in groups)
    scored = [summary for group in groups if (summary := group.trained).rewards]
    rewards = np.array([value for group in scored for value in group.rewards], float)
    scores = np.array([value for group in scored for value in group.scores or group.rewards], float)
    correct = np.abs(scores - reward.correct) < np.abs(scores - reward.wrong)
    of_scored = np.array([length for group in scored for length in group.lengths])
    shown = scored if trained_only else groups
    lengths = np.array([length for group in shown for length in group.lengths])
    truncated = np.array([reason == "length" for group in shown for reason in group.reasons])
    failures = sum(len(group.failures) for group in groups)
    ends = np.cumsum([len(group.rewards) for group in scored], dtype=np.int64)
    # `np.split` of nothing gives one empty group, which would count as solved by none and by all.
    correct_by_group = np.split(correct, ends[:-1]) if scored else []
    return {
        "reward/mean": _array_mean(rewards),
        "reward/correct_fraction": _array_mean(correct),
        "reward/solved_none": _array_mean(np.array([not correct_G.any() for correct_G in correct_by_group])),
        "reward/solved_all": _array_mean(np.array([correct_G.all() for correct_G in correct_by_group])),
        "reward/failures": float(failures),
        "reward/failed_fraction": failures / responses if responses else None,
        "reward/timeouts": float(sum(group.failures.count("time") for group in groups)),
        "rollout/length_mean": _array_mean(lengths),
        "rollout/length_max": float(lengths.max()) if len(lengths) else None,
        "rollout/length_positive_mean": _array_mean(of_scored[correct]),
        "rollout/length_negative_mean": _array_mean(of_scored[~correct]),
        "rollout/truncated_fraction": _array_mean(truncated),
        "rollout/tokens": float(lengths.sum()),
    }


def _array_mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def episode_metrics(scored: Sequence[GroupSummary]) -> Metrics:
    """Return episode statistics of the groups with an environment; empty if there is no such group.

    - ``environment/turns_mean``, ``.../turns_max``: model turns per response
    - ``.../steps_mean``: environment answers per response; ``time/environment_s``: mean total step time
    - ``.../given_share``: given tokens as a share of all tokens
    - ``.../branches_mean``, ``.../branches_max``: branches per response, if any response has several;
      ``.../branches_rewritten``: branches caused by the chat template's different rendering of earlier turns
    - ``.../failures``: responses whose environment failed; ``.../restarts``: response restarts
    - ``.../finish_REASON``: share of responses per ``FinishReason``
    - ``.../reward_turn_N``: mean reward of the N-th answer, over answers with one
    - ``episode/NAME``: mean of an environment's own metric over the episodes that report it
    """
    scored = [group for group in scored if group.episodes]
    episodes = [episode for group in scored for episode in group.episodes]
    if not episodes:
        return {}
    sampled = sum(length for group in scored for length in group.lengths)
    reasons = [reason for group in scored for reason in group.reasons]
    given = sum(episode["given"] for episode in episodes)
    metrics: Metrics = {
        "environment/turns_mean": _mean(episode["turns"] for episode in episodes),
        "environment/turns_max": float(max(episode["turns"] for episode in episodes)),
        "environment/steps_mean": _mean(len(episode["rewards"]) for episode in episodes),
        "time/environment_s": _mean(episode["seconds"] for episode in episodes),
        "environment/given_share": given / max(1, given + sampled),
        "environment/failures": float(sum(episode["failure"] is not None for episode in episodes)),
        "environment/restarts": float(sum(episode["restarts"] for episode in episodes)),
    }
    if any("branches" in episode for episode in episodes):
        branches = [episode.get("branches", 1) for episode in episodes]
        metrics["environment/branches_mean"] = _mean(branches)
        metrics["environment/branches_max"] = float(max(branches))
        metrics["environment/branches_rewritten"] = float(
            sum(episode.get("rewritten", 0) for episode in episodes)
        )
    for reason in get_args(FinishReason):
        if reason != "abort":  # requests abort, responses do not
            metrics[f"environment/finish_{reason}"] = reasons.count(reason) / len(reasons)
    for turn in range(max(len(episode["rewards"]) for episode in episodes)):
        rewards = [episode["rewards"][turn] for episode in episodes if turn < len(episode["rewards"])]
        if values := [reward for reward in rewards if reward is not None]:
            metrics[f"environment/reward_turn_{turn + 1}"] = _mean(values)
    for name in sorted({name for episode in episodes for name in episode["metrics"]}):
        values = [episode["metrics"][name] for episode in episodes if name in episode["metrics"]]
        metrics[REPORTED + name] = _mean(values)
    return metrics


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return float(sum(numbers) / len(numbers))
