"""Metrics of the episodes of a step: turns, given tokens, failures, and what environments reported.

Used by ``batch_builder.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args

from bapo_megatron.rollout.sampler.event_log.state import GroupSummary
from bapo_megatron.types import FinishReason, Metrics

REPORTED = "episode/"
"""Prefix of the metrics of a user's environment."""


def episode_metrics(scored: Sequence[GroupSummary]) -> Metrics:
    """Statistics of all episodes scored for the step; empty where no prompt has an environment.

    Groups without episodes, of a source without an environment, count nowhere.

    - ``environment/turns_mean``, ``.../turns_max``: turns of the model in a response
    - ``.../steps_mean``: answers of the environment in a response; ``time/environment_s``: the time of its
      steps together, mean over responses
    - ``.../given_share``: share of all tokens that were given
    - ``.../failures``: responses whose environment failed; ``.../restarts``: times that responses began again
    - ``.../finish_REASON``: share of responses that ended so, for each ``FinishReason`` of a response
    - ``.../reward_turn_N``: mean reward of the environment's N-th answer, over those with one
    - ``episode/NAME``: a metric of the environment's own, mean over the episodes that report it
    """
    scored = [group for group in scored if group.episodes]
    episodes = [one for group in scored for one in group.episodes]
    if not episodes:
        return {}
    sampled = sum(length for group in scored for length in group.lengths)
    reasons = [reason for group in scored for reason in group.reasons]
    given = sum(one["given"] for one in episodes)
    found: Metrics = {
        "environment/turns_mean": _mean(one["turns"] for one in episodes),
        "environment/turns_max": float(max(one["turns"] for one in episodes)),
        "environment/steps_mean": _mean(len(one["rewards"]) for one in episodes),
        "time/environment_s": _mean(one["seconds"] for one in episodes),
        "environment/given_share": given / max(1, given + sampled),
        "environment/failures": float(sum(one["failure"] is not None for one in episodes)),
        "environment/restarts": float(sum(one["restarts"] for one in episodes)),
    }
    for reason in get_args(FinishReason):
        if reason != "abort":  # of a request, never of a response
            found[f"environment/finish_{reason}"] = reasons.count(reason) / len(reasons)
    for turn in range(max(len(one["rewards"]) for one in episodes)):
        rewards = [one["rewards"][turn] for one in episodes if turn < len(one["rewards"])]
        if values := [reward for reward in rewards if reward is not None]:
            found[f"environment/reward_turn_{turn + 1}"] = _mean(values)
    for name in sorted({name for one in episodes for name in one["metrics"]}):
        values = [one["metrics"][name] for one in episodes if name in one["metrics"]]
        found[REPORTED + name] = _mean(values)
    return found


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return float(sum(found) / len(found))
