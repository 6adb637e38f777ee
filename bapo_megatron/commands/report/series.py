"""Derived series of a report: ratio profiles, entropy changes, event marks, final results; values as text.

Functions of a ``RunRecord``: ``ratio_profile``, ``prediction``, ``event_marks`` and ``final_results``; the
``*_cells`` return table rows. Entropy changes are both predicted by the Entropy-Clip Rule (Eq. 6) and
measured. Metrics that an older log lacks are NaN or None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bapo_megatron.algo.bins import BUCKETS, RATIO_BINS, RATIO_EDGES
from bapo_megatron.commands.report.data import MetricTable, RunRecord, Series, headline, mean
from bapo_megatron.runtime.event_kinds import event_time_s
from bapo_megatron.runtime.jsonl_log import Row

LOSS_EVENTS = ("engine_lost", "server_ended", "sampler_died", "broadcast_failed", "engine_gap")
"""Event kinds that count as losses."""

RATIO_CENTRES = np.array(
    [0.45, *np.sqrt(np.multiply(RATIO_EDGES[:-1], RATIO_EDGES[1:])), 3.5]  # the outer bins are open-ended
)


FEW_TOKENS = 100
"""Ratio bins of fewer tokens are not drawn: a share's standard error can exceed 0.05."""

NO_VALUE = "–"  # noqa: RUF001, the dash is meant


@dataclass(frozen=True)
class Mark:
    """Mark of an event on the step axis: its position, and whether it is a resume or a loss (of an engine,
    for example)."""

    position: float
    loss: bool


@dataclass(frozen=True)
class Prediction:
    """Entropy changes in nats between passes over a batch or between updates, predicted by the Entropy-Clip
    Rule (Eq. 6) and measured, and their correlation."""

    predicted: np.ndarray
    """Learning rate times minus the covariance, or times the mean effect, summed over the updates between two
    measurements."""
    measured: np.ndarray
    """Measured changes, one per prediction."""
    correlation: float | None
    """Pearson correlation; None for fewer than three pairs or constants."""


def ratio_profile(run: RunRecord, what: str) -> Series:
    """Return the mean ``what`` (probability or entropy) of the tokens in each ratio bin over the run."""
    table = run.updates or run.steps
    values = []
    for name in RATIO_BINS:
        shares, column = (table.column(f"ratio/{name}/{part}") for part in ("tokens", what))
        known = (np.nan_to_num(shares) != 0) & ~np.isnan(column)
        tokens = (shares * _tokens(table))[known]
        values.append(tokens @ column[known] / tokens.sum() if tokens.sum() else np.nan)
    return Series(RATIO_CENTRES, np.array(values))


def ratio_tokens(run: RunRecord) -> np.ndarray | None:
    """Return the number of tokens in each ratio bin over the whole run; None if not counted."""
    table = run.updates or run.steps
    tokens = table.column("policy/tokens")
    if np.isnan(tokens).all():
        return None
    return np.array([np.nansum(tokens * table.column(f"ratio/{name}/tokens")) for name in RATIO_BINS])


Reading = Literal["covariance", "effect"]
"""Reading of Eq. 6: covariance over tokens, or mean effect of the tokens, state by state."""


def prediction(run: RunRecord, bucket: str | None = None, reading: Reading = "covariance") -> Prediction:
    """Return predicted (Eq. 6) and measured entropy changes, of all tokens or of one staleness bucket.
    If batches are reused, from each pass over a batch to the next, with the same tokens; otherwise from each
    update to the next, with different tokens."""
    table = run.updates
    if not table:
        return Prediction(np.zeros(0), np.zeros(0), None)
    group, follows = _passes(table)
    predicted = np.bincount(group, _predicted(table, bucket, reading))
    entropy = _entropy(table, group)
    pairs = np.stack([predicted[:-1], np.diff(entropy)], axis=1)[follows]
    known = pairs[np.isfinite(pairs).all(axis=1)]
    return Prediction(known[:, 0], known[:, 1], _correlation(known[:, 0], known[:, 1]))


def _passes(table: MetricTable) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of each update's pass over a batch, and which passes have a successor."""
    epochs = np.nan_to_num(table.column("epoch"))
    if not epochs.any():
        return np.arange(len(table)), np.ones(len(table) - 1, dtype=bool)
    keys, group = np.unique(np.stack([table.column("step"), epochs], axis=1), axis=0, return_inverse=True)
    return group.reshape(-1), (np.diff(keys, axis=0) == (0, 1)).all(axis=1)


def _predicted(table: MetricTable, bucket: str | None, reading: Reading) -> np.ndarray:
    """Return the entropy change that Eq. 6 predicts for each update, from one bucket's tokens or all."""
    rate, value = table.column("policy/lr"), table.column(f"entropy_rule/{reading}")
    if bucket:
        share = np.nan_to_num(table.column(f"staleness/{bucket}/tokens"))
        value = np.where(share != 0, share * table.column(f"staleness/{bucket}/{reading}"), 0.0)
    change: np.ndarray = -rate * value if reading == "covariance" else rate * value
    return change


def _entropy(table: MetricTable, group: np.ndarray) -> np.ndarray:
    value = table.column("policy/entropy")
    tokens = np.where(np.isnan(value), 0.0, _tokens(table))
    totals, sums = np.bincount(group, tokens), np.bincount(group, tokens * np.nan_to_num(value))
    means: np.ndarray = np.divide(sums, totals, out=np.full(len(sums), np.nan), where=totals != 0)
    return means


def _tokens(table: MetricTable) -> np.ndarray:
    """Return the number of tokens of each update; 1 if not logged, so that all updates weigh the same."""
    tokens = table.column("policy/tokens")
    return np.where(np.isnan(tokens), 1.0, tokens)


def event_marks(run: RunRecord) -> list[Mark]:
    """Return marks of resumes and losses; a loss is placed by its time."""
    timed = [(event_time_s(event), event) for event in run.events]
    anchors = [(time, _finished_step(event)) for time, event in timed if time is not None]
    known = sorted((time, step) for time, step in anchors if step is not None)
    lost = [time for time, event in timed if event.get("kind") in LOSS_EVENTS and time is not None]
    marks = [Mark(step - 0.5, False) for step in run.resumed_at]
    if known:
        times, steps = np.array(known).T
        marks += [Mark(float(place), True) for place in np.interp(lost, times, steps)]
    return marks


def final_results(run: RunRecord) -> dict[str, float | None]:
    """Return a run's final results by their names in the results table; None where the log has none."""
    figures = headline(run.steps)

    def final(metric: str) -> float | None:
        return mean(run.steps.known(metric)[-figures["window"] :])

    high, low = final("bapo/clip_fraction_high"), final("bapo/clip_fraction_low")
    norms = (run.updates or run.steps).known("policy/grad_norm")
    return {
        "final reward": figures["reward_last"],
        "first reward": figures["reward_first"],
        "final entropy": final("policy/entropy"),
        "first entropy": mean(run.steps.known("policy/entropy")[: figures["window"]]),
        "median gradient norm": float(np.median(norms)) if len(norms) else None,
        "largest gradient norm": float(norms.max()) if len(norms) else None,
        "final response length": final("rollout/length_mean"),
        "final contribution of positives": final("bapo/contribution"),
        "final share of clipped tokens": None if high is None or low is None else high + low,
        "mean staleness": mean(run.steps.known("staleness/mean")),
        "Eq. 6 (covariance) against measurement, correlation": prediction(run).correlation,
        "Eq. 6 (effects) against measurement, correlation": prediction(run, reading="effect").correlation,
        "steps": figures["steps"],
        "updates": len(run.updates),
        "tokens": figures["tokens"],
        "hours of training": figures["time_s"] / 3600,
        "resumes": len(run.resumed_at),
        "losses": sum(event.get("kind") in LOSS_EVENTS for event in run.events),
    }


def _correlation(first: np.ndarray, second: np.ndarray) -> float | None:
    if len(first) < 3 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _finished_step(event: Row) -> float | None:
    step = event.get("step")
    if not isinstance(step, int):
        return None
    return float(step - 1 if event.get("kind") in ("start", "resume") else step)


# --- values as text ---


def number(value: float | None) -> str:
    """Return a number as short text, for example 0.123 or 12.3; integers in full."""
    if value is None:
        return NO_VALUE
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 100:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.3g}" if abs(value) < 0.01 else f"{value:.3f}"


def short_count(count: float) -> str:
    """Return a short count, e.g. 12.3M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count:.0f}"


def staleness_cells(run: RunRecord) -> list[tuple[str, list[str]]]:
    """Return table rows, one per staleness bucket with tokens: mean share of tokens, clipped share, entropy
    and effect, and the correlation of Eq. 6."""
    logged, rows = run.updates or run.steps, []
    for bucket in BUCKETS:
        names = ("tokens", "clipped", "entropy", "effect")
        tokens, clipped, *others = (mean(logged.known(f"staleness/{bucket}/{name}")) for name in names)
        if tokens:
            values = (*others, prediction(run, bucket).correlation)
            rows.append((bucket, [percent(tokens), percent(clipped), *map(number, values)]))
    return rows


def percent(share: float | None) -> str:
    """Return a share as text, e.g. 12.5%."""
    return NO_VALUE if share is None else f"{100 * share:.3g}%"


def ends(
    steps: MetricTable, name: str, window: int, form: Callable[[float | None], str] = number
) -> tuple[str, str]:
    """Return means of a metric over the first and the last ``window`` steps that have it, as text."""
    known = steps.known(name)
    return form(mean(known[:window])), form(mean(known[-window:]))
