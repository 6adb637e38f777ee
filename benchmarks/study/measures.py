"""Metrics of one run of a study: pure functions on its curves, and the figures of an arm.

Legend: ``_S`` steps. NaN where nothing was measured.

*Stale* updates are those after the first of their step, where every ratio is 1, whether by passes or by
mini-batches. A run of one update a step has none, and all its updates stand for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bapo_megatron.algo.bounds import paper
from bapo_megatron.commands.report.data import RunRecord, read_run
from bapo_megatron.commands.report.series import ratio_profile
from bapo_megatron.runtime.jsonl_log import Row
from bapo_megatron.trainer.records.metrics_log import evaluation_means
from benchmarks.study.plan import Arm

SPIKE_FACTOR = 3.0
SPIKE_WINDOW = 10
"""Steps of the running median that a spike is measured against."""
SPIKE_HISTORY = 4
"""Steps that must lie before one that can have a spike."""
COLLAPSE_SHARE = 0.5
TARGET = paper().target
"""Share of the gradient that BAPO's search wants the positive tokens to hold."""
_FIT_STEPS = 2
"""Least steps of each arm in a fit of the entropy."""

_UPDATE_CURVES = {
    "clip_low": "bapo/clip_low_negative",
    "clip_high": "bapo/clip_high_positive",
}
"""Curves that are means over the stale updates of each step."""


@dataclass(frozen=True)
class ArmRecord:
    """The result of a finished arm: figures and curves."""

    method: str
    passes: int
    seed: int
    figures: Mapping[str, float]
    """Numbers of ``figures_of``, and ``held_out``, the last ``eval/mean``; NaN where the run does not say."""
    curves: Mapping[str, np.ndarray]
    """Curves of ``curves_of``, one value a step; ``profile``, mean probability in each bin of the ratio."""


def window_of(steps: int) -> int:
    """Steps at either end that a first or last value is the mean of: a tenth, at least 1 and at most 5."""
    return min(max(steps // 10, 1), 5)


def running_means(values_S: np.ndarray) -> np.ndarray:
    """Means over ``window_of`` neighbouring values that exist, one for each place of the window."""
    known = values_S[np.isfinite(values_S)]
    window = window_of(len(values_S))
    if len(known) < window:
        return np.zeros(0)
    return np.convolve(known, np.ones(window) / window, mode="valid")


def best_and_last(values_S: np.ndarray) -> tuple[float, float]:
    """The largest and the last running mean; NaN of nothing."""
    means = running_means(values_S)
    return (float(means.max()), float(means[-1])) if len(means) else (np.nan, np.nan)


def collapsed(values_S: np.ndarray) -> bool:
    """Whether the run ends below ``COLLAPSE_SHARE`` of its best running mean: it had learnt, and lost it."""
    best, last = best_and_last(values_S)
    return last < COLLAPSE_SHARE * best


def first_entropy(run: RunRecord) -> float:
    """Mean entropy in the first update of the run, nats per token; NaN if not measured.

    Where a batch is used again, the mean of its step is that of a policy that has already changed.
    """
    rows = [row for row in run.updates.rows() if row["step"] == 1][:1]
    return update_mean(rows, "policy/entropy")


def entropies_at_equal_reward(one: ArmRecord, other: ArmRecord) -> tuple[float, float]:
    """Entropies of two arms, each at the step where it first reaches the best reward that both reach.

    That reward is the smaller of the two best running means. An arm that learns less is so compared with the
    early part of the other, not with its end. NaN where a curve is missing.
    """
    level = float(np.min([best_and_last(arm.curves["reward"])[0] for arm in (one, other)]))
    return _entropy_at(one, level), _entropy_at(other, level)


def entropy_offset(one: ArmRecord, other: ArmRecord) -> float:
    """Entropy of ``one`` minus that of ``other`` at equal reward, over all steps of both.

    The coefficient c of the least-squares fit entropy = a + b reward + c [step of ``one``] (analysis of
    covariance). It uses every step, where ``entropies_at_equal_reward`` reads one of each arm: on the second
    study's calibration its spread over seeds is half as large. NaN unless each has two steps with both.
    """
    rows, entropies = [], []
    for arm, mark in ((one, 1.0), (other, 0.0)):
        reward, entropy = arm.curves["reward"], arm.curves["entropy"]
        exists = np.isfinite(reward) & np.isfinite(entropy)
        if exists.sum() < _FIT_STEPS:
            return np.nan
        rows += [[1.0, value, mark] for value in reward[exists]]
        entropies += entropy[exists].tolist()
    return float(np.linalg.lstsq(np.array(rows), np.array(entropies))[0][2])


def _entropy_at(arm: ArmRecord, level: float) -> float:
    """Entropy (running mean) where the running mean of the reward first is at least ``level``."""
    exists = np.isfinite(arm.curves["reward"]) & np.isfinite(arm.curves["entropy"])
    window = window_of(len(exists))
    if exists.sum() < window or not np.isfinite(level):
        return np.nan
    box = np.ones(window) / window
    reward, entropy = (np.convolve(arm.curves[name][exists], box, "valid") for name in ("reward", "entropy"))
    reached = np.flatnonzero(reward >= level - 1e-12)
    return float(entropy[reached[0]]) if len(reached) else np.nan


def spikes(norms_S: np.ndarray, factor: float = SPIKE_FACTOR) -> int:
    """Gradient norms above ``factor`` times the median of the ``SPIKE_WINDOW`` before them.

    Of updates at one place in their steps: where a batch is used again the norm falls from pass to pass, and
    each first pass would be a spike among its neighbours. The first ``SPIKE_HISTORY`` cannot be one. A norm
    that is not finite is one, and enters no median.
    """
    found = 0
    for place in range(SPIKE_HISTORY, len(norms_S)):
        before = norms_S[max(0, place - SPIKE_WINDOW) : place]
        known = before[np.isfinite(before)]
        found += bool(len(known) and not norms_S[place] <= factor * np.median(known))
    return found


def spike_rate(run: RunRecord) -> float:
    """Spikes for every hundred updates; NaN if no norm was measured."""
    at_place: dict[int, list[float]] = {}
    made: Counter[int] = Counter()
    for row in run.updates.rows():
        norm = row.get("policy/grad_norm")
        at_place.setdefault(made[row["step"]], []).append(np.nan if norm is None else norm)
        made[row["step"]] += 1
    norms = [np.array(values, float) for values in at_place.values()]
    if not any(np.isfinite(values).any() for values in norms):
        return np.nan
    return 100 * sum(map(spikes, norms)) / len(run.updates)


def stale_updates(run: RunRecord) -> list[Row]:
    """The updates after the first of their step; all of them if each step has one."""
    rows = run.updates.rows()
    steps = [row["step"] for row in rows]
    later = [row for place, row in enumerate(rows) if place and steps[place - 1] == steps[place]]
    return later or rows


def clipped(row: Row) -> float:
    """Share of an update's tokens that the loss clips."""
    return _number(row, "bapo/clip_fraction_high") + _number(row, "bapo/clip_fraction_low")


def positive_share(row: Row) -> float:
    """Positive tokens' share of the gradient's mass, P / (P + N), for any loss."""
    shares = (_number(row, f"quadrant/positive_{side}/contribution") for side in ("low", "high"))
    return sum(shares)


def raised(rows: Sequence[Row]) -> tuple[float, float]:
    """Share of the tokens with a ratio above 1.2, and the mean probability with which they were sampled.

    Shares are means over the updates; the probability is a mean over those tokens, updates by their shares.
    """
    shares = np.array([_number(row, "raised/tokens") for row in rows], float)
    chances = np.array([_number(row, "raised/probability") for row in rows], float)
    share, total = _mean(shares), np.nansum(shares)
    return share, float(np.nansum(shares * chances) / total) if total > 0 else np.nan


def update_mean(rows: Sequence[Row], metric: str) -> float:
    """Mean of a metric over the updates that have it."""
    return _mean(np.array([_number(row, metric) for row in rows], float))


def figures_of(run: RunRecord) -> dict[str, float]:
    """The figures of a run; NaN where it does not say."""
    reward, entropy = (run.by_step(name).value for name in ("sampled/reward/mean", "policy/entropy"))
    stale = stale_updates(run)
    first, (best, last) = first_entropy(run), best_and_last(reward)
    rounds = np.array([_number(row, "bapo/rounds") for row in stale], float)
    tokens, probability = raised(stale)
    shares = np.array([positive_share(row) for row in stale], float)
    return {
        "mean_reward": _mean(reward),
        "best_reward": best,
        "final_reward": last,
        "collapsed": float(collapsed(reward)),
        "first_entropy": first,
        "entropy_kept": best_and_last(entropy)[1] / first if first > 0 else np.nan,
        "spikes": spike_rate(run),
        "clipped": _mean(np.array([clipped(row) for row in stale], float)),
        "positive_share": _mean(shares),
        "raised_tokens": tokens,
        "raised_probability": probability,
        "clip_low": update_mean(stale, "bapo/clip_low_negative"),
        "clip_high": update_mean(stale, "bapo/clip_high_positive"),
        "moved": _mean(np.where(np.isfinite(rounds), rounds > 0, np.nan)),
        "below_target": _mean(np.where(np.isfinite(shares), shares < TARGET, np.nan)),
        "one_sign": update_mean(stale, "bapo/one_sign_tokens"),
        "update_tokens": update_mean(stale, "policy/tokens"),
        "response_tokens": _mean(run.by_step("sampled/rollout/length_mean").value),
    }


def curves_of(run: RunRecord) -> dict[str, np.ndarray]:
    """The curves of a run, one value a step; bounds, share and clip fraction over its stale updates."""
    curves = {
        "reward": run.by_step("sampled/reward/mean").value,
        "entropy": run.by_step("policy/entropy").value,
        "grad_norm": run.by_step("policy/grad_norm").value,
    }
    by_step: dict[int, list[Row]] = {int(step): [] for step in run.step_numbers}
    for row in stale_updates(run):
        by_step.setdefault(int(row["step"]), []).append(row)
    rows = [by_step[int(step)] for step in run.step_numbers]
    curves["clipped"] = np.array([_mean(np.array([clipped(one) for one in step], float)) for step in rows])
    curves["positive_share"] = np.array(
        [_mean(np.array([positive_share(one) for one in step], float)) for step in rows]
    )
    for name, metric in _UPDATE_CURVES.items():
        curves[name] = np.array([update_mean(step, metric) for step in rows])
    return curves


def read_arm(arm: Arm) -> ArmRecord:
    """The record of an arm that is done."""
    run = read_run(arm.run_dir)
    evaluations = evaluation_means(arm.run_dir)
    figures = figures_of(run) | {"held_out": evaluations.get(arm.steps, np.nan)}
    curves = curves_of(run) | {"profile": ratio_profile(run, "probability").value}
    return ArmRecord(arm.method, arm.passes, arm.seed, figures, curves)


def _number(row: Row, metric: str) -> float:
    value = row.get(metric)
    return np.nan if value is None else float(value)


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else np.nan
