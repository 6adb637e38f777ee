"""Derived series of a report: ratio profiles, entropy changes, event marks, final results.

Entropy changes are those that the Entropy-Clip Rule (Eq. 6) predicts, and the measured ones. Metrics that
an older log lacks give NaN or None. Used in this folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Literal

import numpy as np

from bapo_megatron.algo.bins import BUCKETS, RATIO_BINS, RATIO_EDGES
from bapo_megatron.commands.report.data import RunRecord, Series, headline, known_values, mean
from bapo_megatron.runtime.jsonl_log import Row

LOSS_EVENTS = ("engine_lost", "server_ended", "sampler_died", "broadcast_failed", "engine_gap")
"""The kinds of events that count as losses."""

RATIO_CENTRES = np.array(
    [0.45, *np.sqrt(np.multiply(RATIO_EDGES[:-1], RATIO_EDGES[1:])), 3.5]  # the outer bins have no end
)


FEW_TOKENS = 100
"""The number of tokens below which a mean is drawn pale. The standard error of a share is then above 0.05 at
the most, and single tokens make spikes."""


@dataclass(frozen=True)
class Mark:
    """An event marked on the axis of steps: a resume, or a loss."""

    position: float
    loss: bool
    """Whether it is a loss (of an engine or the like) or a resume."""


@dataclass(frozen=True)
class Prediction:
    """Entropy changes between updates, in nats: predicted by the Entropy-Clip Rule (Eq. 6), and measured.

    Two arrays of one length, a pair for each two measurements.
    """

    predicted: np.ndarray
    """Learning rate times minus the covariance, or times the mean effect, summed over the updates between
    two measurements."""
    measured: np.ndarray
    """Measured changes, in nats."""
    correlation: float | None
    """Pearson's correlation; None for fewer than three pairs, or for constants."""


def ratio_profile(run: RunRecord, what: Literal["probability", "entropy"]) -> Series:
    """Mean probability or entropy (``what``) of the tokens in each bin of the ratio, over the whole run."""
    rows = run.updates or run.steps
    values = []
    for name in RATIO_BINS:
        pairs = [(row.get(f"ratio/{name}/tokens"), row.get(f"ratio/{name}/{what}"), row) for row in rows]
        known = [(share * _tokens(row), value) for share, value, row in pairs if share and value is not None]
        total = sum(tokens for tokens, _ in known)
        values.append(sum(tokens * value for tokens, value in known) / total if total else np.nan)
    return Series(RATIO_CENTRES, np.array(values))


def ratio_tokens(run: RunRecord) -> np.ndarray | None:
    """The number of tokens in each bin of the ratio, over the whole run; None if they were not counted."""
    rows = [row for row in run.updates or run.steps if row.get("policy/tokens") is not None]
    if not rows:
        return None
    shares = ((row, [row.get(f"ratio/{name}/tokens") or 0.0 for name in RATIO_BINS]) for row in rows)
    counts: np.ndarray = np.sum([_tokens(row) * np.array(found) for row, found in shares], axis=0)
    return counts


def tokens_averaged(rows: Sequence[Row], share: str) -> np.ndarray | None:
    """The number of tokens behind a mean in each row, with the metric ``share``; None if not counted."""
    if not any(row.get("policy/tokens") is not None and row.get(share) is not None for row in rows):
        return None
    return np.array([(row.get("policy/tokens") or 0) * (row.get(share) or 0.0) for row in rows], dtype=float)


Reading = Literal["covariance", "effect"]
"""The reading of Eq. 6: the covariance over tokens, or the mean of the tokens' effects, state by state."""


def prediction(run: RunRecord, bucket: str | None = None, reading: Reading = "covariance") -> Prediction:
    """Predicted (Eq. 6) and measured entropy changes, of all tokens or of one staleness bucket.

    If batches are reused, from each pass over a batch to the next, which has the same tokens; else from each
    update to the next, which has others.
    """
    passes = _passes(run.updates)
    pairs = [
        (sum(_predicted(row, bucket, reading) for row in now), _entropy(after) - _entropy(now))
        for now, after in passes
    ]
    known = np.array([pair for pair in pairs if np.isfinite(pair).all()]).reshape(-1, 2)
    return Prediction(known[:, 0], known[:, 1], _correlation(known[:, 0], known[:, 1]))


def _passes(rows: Sequence[Row]) -> list[tuple[list[Row], list[Row]]]:
    """Pairs of updates to compare: an epoch and the next over the same tokens, or two updates in a row."""
    if not any(row.get("epoch") for row in rows):
        return [([now], [after]) for now, after in pairwise(rows)]
    groups: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["step"], row.get("epoch", 0)), []).append(row)
    return [
        (group, groups[step, epoch + 1])
        for (step, epoch), group in groups.items()
        if (step, epoch + 1) in groups
    ]


def _predicted(row: Row, bucket: str | None, reading: Reading) -> float:
    """The entropy change that Eq. 6 predicts from the tokens of a bucket, or from all; nan if not logged."""
    rate, value, share = row.get("policy/lr"), row.get(f"entropy_rule/{reading}"), 1.0
    if bucket:
        share = row.get(f"staleness/{bucket}/tokens") or 0.0
        value = row.get(f"staleness/{bucket}/{reading}") if share else 0.0
    sign = -1.0 if reading == "covariance" else 1.0
    return np.nan if rate is None or value is None else float(sign * rate * share * value)


def _entropy(rows: Sequence[Row]) -> float:
    """The mean entropy over the tokens of some updates; nan if not logged."""
    known = [(_tokens(row), row["policy/entropy"]) for row in rows if row.get("policy/entropy") is not None]
    total = sum(tokens for tokens, _ in known)
    return float(sum(tokens * value for tokens, value in known) / total) if total else np.nan


def _tokens(row: Row) -> float:
    """The number of tokens of an update; 1 for logs without it, so that all updates weigh the same."""
    tokens = row.get("policy/tokens")
    return 1.0 if tokens is None else float(tokens)


def event_marks(run: RunRecord) -> list[Mark]:
    """Marks of resumes and of losses (of an engine etc.); an event without a step is placed by its time."""
    timed = [(_seconds(event), event) for event in run.events]
    anchors = [(time, _finished_step(event)) for time, event in timed if time is not None]
    known = [(time, step) for time, step in anchors if step is not None]
    found = [Mark(step - 0.5, False) for step in run.resumed_at]
    for time, event in timed:
        if event.get("kind") in LOSS_EVENTS and time is not None and known:
            times, steps = zip(*sorted(known), strict=True)
            found.append(Mark(float(np.interp(time, times, steps)), True))
    return found


def final_results(run: RunRecord) -> dict[str, float | None]:
    """Final results of a run by their names in the results table; None where the log has none."""
    figures = headline(run.steps)

    def final(metric: str) -> float | None:
        return mean(known_values(run.steps, metric)[-figures["window"] :])

    high, low = final("bapo/clip_fraction_high"), final("bapo/clip_fraction_low")
    c_low, c_high = bounds_in_force(run)
    norms = np.array(known_values(run.updates or run.steps, "policy/grad_norm"), dtype=float)
    norms = norms[np.isfinite(norms)]
    return {
        "final reward": figures["reward_last"],
        "first reward": figures["reward_first"],
        "final entropy": final("policy/entropy"),
        "first entropy": mean(known_values(run.steps, "policy/entropy")[: figures["window"]]),
        "median gradient norm": float(np.median(norms)) if len(norms) else None,
        "largest gradient norm": float(norms.max()) if len(norms) else None,
        "final response length": final("rollout/length_mean"),
        "final contribution of positives": final("bapo/contribution"),
        "final share of clipped tokens": None if high is None or low is None else high + low,
        "c_high over positive tokens, after the first pass": c_high,
        "c_low over negative tokens, after the first pass": c_low,
        "updates of a batch (the paper's staleness)": updates_per_batch(run),
        "mean staleness": mean(known_values(run.steps, "staleness/mean")),
        "Eq. 6 (covariance) against measurement, correlation": prediction(run).correlation,
        "Eq. 6 (effects) against measurement, correlation": prediction(run, reading="effect").correlation,
        "steps": figures["steps"],
        "updates": len(run.updates),
        "tokens": figures["tokens"],
        "hours of training": figures["time_s"] / 3600,
        "resumes": len(run.resumed_at),
        "losses": sum(event.get("kind") in LOSS_EVENTS for event in run.events),
    }


def updates_per_batch(run: RunRecord) -> int | None:
    """The paper's staleness (2x, 4x, 8x), updates of a batch: passes over it times its mini-batches."""
    reuse, mini_batches = (
        run.config.get(f"algorithm.{name}") for name in ("reuse_epochs", "updates_per_epoch")
    )
    return int(reuse * mini_batches) if reuse and mini_batches else None


def bounds_in_force(run: RunRecord) -> tuple[float | None, float | None]:
    """Mean c_low over negative tokens and mean c_high over positive ones, over updates after the first pass.

    In the first pass over a batch ratios are near 1 and no bound acts. All updates count if there is only one
    pass. Logs of earlier versions have only one bound for each update.
    """
    rows = run.updates or run.steps
    rows = [row for row in rows if row.get("epoch")] or rows
    sums = {"low_negative": [0.0, 0.0], "high_positive": [0.0, 0.0]}
    for row in rows:
        positive = row.get("bapo/positive_token_fraction") or 0.0
        for (name, total), share in zip(sums.items(), (1 - positive, positive), strict=True):
            value = row.get(f"bapo/clip_{name}", row.get(f"bapo/clip_{name.partition('_')[0]}"))
            if value is not None:
                total[0] += share * _tokens(row) * value
                total[1] += share * _tokens(row)
    low, high = (total / tokens if tokens else None for total, tokens in sums.values())
    return low, high


def staleness_table(run: RunRecord) -> list[tuple[str, list[float | None]]]:
    """The staleness buckets with tokens: share, clipped, entropy, effect, and the correlation of Eq. 6."""
    rows = run.updates or run.steps
    table = []
    for bucket in BUCKETS:
        names = ("tokens", "clipped", "entropy", "effect")
        values = [mean(known_values(rows, f"staleness/{bucket}/{name}")) for name in names]
        if values[0]:
            table.append((bucket, [*values, prediction(run, bucket).correlation]))
    return table


def _correlation(first: np.ndarray, second: np.ndarray) -> float | None:
    if len(first) < 3 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _seconds(event: Row) -> float | None:
    try:
        return datetime.fromisoformat(str(event.get("time"))).timestamp()
    except ValueError:
        return None


def _finished_step(event: Row) -> float | None:
    """The last step that was finished at the event."""
    step = event.get("step")
    if not isinstance(step, int):
        return None
    return float(step - 1 if event.get("kind") in ("start", "resume") else step)
