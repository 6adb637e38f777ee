"""Measures of one run: pure functions on its curves, and the figures of an arm.

Legend: ``_S`` steps, ``_U`` updates. NaN where nothing was measured.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from bapo_megatron.commands.report.data import RunRecord, Series, read_run
from bapo_megatron.trainer.metrics_log import evaluation_means
from benchmarks.study.plan import Arm

SPIKE_FACTOR = 3.0
SPIKE_WINDOW = 10
"""Steps of the running median that a spike is measured against."""
SPIKE_HISTORY = 4
"""Steps that must lie before one that can have a spike."""
COLLAPSE_SHARE = 0.5
ENTROPY_SHARE = 0.1

CONTRIBUTION = "contribution/gradient_absolute_uniform"
"""P / (P + N) over tokens with a live gradient (Eq. 5): one reading for all methods."""

METRICS = {
    "reward": "reward/mean",
    "entropy": "policy/entropy",
    "grad_norm": "policy/grad_norm",
    "contribution": CONTRIBUTION,
}
"""Curves that are a metric of the steps."""


@dataclass(frozen=True)
class ArmRecord:
    """The result of a finished arm: figures and curves."""

    method: str
    setting: str
    seed: int
    figures: dict[str, float]
    """Numbers of ``figures_of``, and ``held_out``, the last ``eval/mean``; NaN where the run does not say."""
    curves: dict[str, Series]
    """Series of ``curves_of``, and ``held_out``."""


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


def first_and_last(values_S: np.ndarray) -> tuple[float, float]:
    """Means over both ends' windows; NaN of nothing."""
    means = running_means(values_S)
    return (float(means[0]), float(means[-1])) if len(means) else (np.nan, np.nan)


def drawdown(values_S: np.ndarray) -> float:
    """The deepest fall of the running mean below its best so far, in units of the values; else 0."""
    means = running_means(values_S)
    return float((np.maximum.accumulate(means) - means).max()) if len(means) else np.nan


def collapsed(values_S: np.ndarray) -> bool:
    """Whether the run ends below ``COLLAPSE_SHARE`` of its best running mean: it had learnt, and lost it."""
    means = running_means(values_S)
    return bool(len(means) and means[-1] < COLLAPSE_SHARE * means.max())


def first_entropy(run: RunRecord, steps: int) -> float:
    """Mean entropy in the first pass over the first ``steps`` batches, nats per token; NaN if not measured.

    Where a batch is used again, the mean of its step is that of a policy that has already changed.
    """
    rows = [row for row in run.updates if row["step"] <= steps and not row.get("epoch")]
    return _mean(np.array([row.get("policy/entropy") for row in rows], float))


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
    for row in run.updates:
        norm = row.get("policy/grad_norm")
        at_place.setdefault(made[row["step"]], []).append(np.nan if norm is None else norm)
        made[row["step"]] += 1
    norms = [np.array(values, float) for values in at_place.values()]
    if not any(np.isfinite(values).any() for values in norms):
        return np.nan
    return 100 * sum(map(spikes, norms)) / len(run.updates)


def in_blocks(values_S: np.ndarray, blocks: int) -> np.ndarray:
    """Means of as many equal blocks, of what exists in each. As they are if that does not divide them.

    So an arm of many small steps has as many points as the others, and their noise.
    """
    if len(values_S) == blocks or len(values_S) % blocks:
        return values_S
    return np.array([_mean(block) for block in values_S.reshape(blocks, -1)])


def figures_of(run: RunRecord, steps: int) -> dict[str, float]:
    """The figures of a run of a study of ``steps``; NaN where the run does not say."""
    curves = curves_of(run, steps)
    reward, entropy = curves["reward"].value, curves["entropy"].value
    first = first_entropy(run, max(1, len(run.steps) // steps))
    last = first_and_last(entropy)[1]
    return {
        "final_reward": first_and_last(reward)[1],
        "mean_reward": _mean(reward),
        "drawdown": drawdown(reward),
        "collapsed": float(collapsed(reward)),
        "first_entropy": first,
        "final_entropy": last,
        "entropy_kept": last / first if first > 0 else np.nan,
        "entropy_collapsed": float(last < ENTROPY_SHARE * first),
        "spikes": spike_rate(run),
        "clipped": _mean(curves["clipped"].value),
        "contribution": _mean(curves["contribution"].value),
        "moved": _moved(run.by_update("bapo/rounds").value),
        "clip_low": _mean(run.by_update("bapo/clip_low").value),
        "clip_high": _mean(run.by_update("bapo/clip_high").value),
        "staleness": _mean(run.by_step("staleness/mean").value),
    }


def curves_of(run: RunRecord, steps: int) -> dict[str, Series]:
    """The curves of a run at the share of it that is done, 0 to 1; ``steps`` points if it has more."""
    clipped = [run.by_step(f"bapo/clip_fraction_{side}").value for side in ("high", "low")]
    values = {name: run.by_step(metric).value for name, metric in METRICS.items()} | {"clipped": sum(clipped)}
    blocks = {name: in_blocks(np.asarray(value), steps) for name, value in values.items()}
    return {name: Series(np.arange(1, len(value) + 1) / len(value), value) for name, value in blocks.items()}


def read_arm(arm: Arm, steps: int) -> ArmRecord:
    """The record of an arm that is done, of a study of ``steps``."""
    run = read_run(arm.run_dir)
    evaluations = sorted(evaluation_means(arm.run_dir).items())
    places = np.array([step for step, _ in evaluations], float) / arm.steps
    held_out = Series(places, np.array([value for _, value in evaluations], float))
    figures = figures_of(run, steps)
    figures["held_out"] = float(held_out.value[-1]) if evaluations else np.nan
    curves = curves_of(run, steps) | {"held_out": held_out}
    return ArmRecord(arm.method, arm.setting, arm.seed, figures, curves)


def _moved(rounds_U: np.ndarray) -> float:
    """Share of the updates whose bounds left their starts."""
    return _mean(np.where(np.isfinite(rounds_U), rounds_U > 0, np.nan))


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else np.nan
