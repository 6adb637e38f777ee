"""Header of a report: a run's method, staleness and held-out score, and its note.

``facts`` returns (name, text) pairs, ``readings`` and ``comparison_readings`` sentences, from the stored
configuration and metrics. Where these lack a value, most ``facts`` are "not recorded".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bapo_megatron.algo.bounds import BoundsConfig, describe, preset_name, sum_count
from bapo_megatron.commands.report.data import RunRecord, mean
from bapo_megatron.commands.report.series import percent
from bapo_megatron.runtime.jsonl_log import Row

NOT_RECORDED = "not recorded"
_NAMES = {"grpo": "GRPO", "clip_higher": "clip-higher (DAPO)"}
_SEARCHED_FOR = {"update": "each update", "lagged": "each update, on the one before"}
Fact = tuple[str, str]
"""Name and text of one fact."""


@dataclass(frozen=True)
class SearchOutcome:
    """Outcome of a run's bounds searches: the share of updates whose searches moved a bound, and the share
    (of updates or tokens) whose search reached the target."""

    moved: float
    """Share of updates in which at least one search moved a bound."""
    reached: float
    """Share of updates whose search reached the target; with many searches per update, of tokens."""
    of: str = "updates"
    """Base of ``moved``: the stale updates, where the log tells them apart."""


def search_outcome(run: RunRecord) -> SearchOutcome | None:
    """Return a run's bounds search outcome; None for fixed bounds, other losses, or logs without it."""
    table = run.updates or run.steps
    moves, reached = table.column("bapo/rounds"), table.column("bapo/reached")
    known = np.isfinite(moves) & np.isfinite(reached)
    if not _is_searched(run, run.bounds) or not known.any():
        return None
    share = float(np.mean(reached[known]))
    if (stale := mean(table.known("bapo/bounds_moved"))) is not None:
        return SearchOutcome(stale, share, "stale updates")
    return SearchOutcome(float(np.mean(moves[known] > 0)), share)


def _is_searched(run: RunRecord, bounds: BoundsConfig | None) -> bool:
    return bounds is not None and _loss(run) == "clip" and sum_count(bounds) > 2


def _loss(run: RunRecord) -> str:
    return str(run.config.get("algorithm.loss", "clip"))


# --- the facts -----------------------------------------------------------------------------------


def facts(run: RunRecord) -> list[Fact]:
    """Return a run's algorithm, preset, target, staleness, held-out score and fork source."""
    return [
        ("algorithm", algorithm(run)),
        ("preset", _preset(run)),
        ("target", _target(run)),
        ("staleness", _staleness(run)),
        ("held-out", _held_out(run)),
        *([("forked from", run.forked)] if run.forked else []),
    ]


def algorithm(run: RunRecord) -> str:
    """Return the method's name and how its bounds are set."""
    bounds, loss = run.bounds, _loss(run)
    if bounds is None:
        return NOT_RECORDED
    if loss != "clip":
        name = f"loss {loss}"
    elif _is_searched(run, bounds):
        searched_for = _SEARCHED_FOR.get(bounds.scope, "each part of an update")
        name = f"BAPO: clipping bounds searched for {searched_for}"
    else:
        name = f"{_NAMES.get(preset_name(bounds) or '', 'PPO')}: clipping bounds {describe(bounds)}"
    return name + (", with PAPO" if run.config.get("algorithm.polarity.enabled") else "")


def _preset(run: RunRecord) -> str:
    bounds = run.bounds
    if bounds is None:
        return NOT_RECORDED
    if _loss(run) != "clip":
        return "none: the loss has its own settings"
    if not _is_searched(run, bounds):
        return preset_name(bounds) or "none"
    return f"{describe(bounds).split(', target')[0]})"


def _target(run: RunRecord) -> str:
    bounds = run.bounds
    if bounds is None:
        return NOT_RECORDED
    if not _is_searched(run, bounds):
        return "none: fixed bounds aim at nothing" if _loss(run) == "clip" else "none"
    said = f"{bounds.target:g} of the gradient from positive tokens"
    outcome = search_outcome(run)
    if outcome is None:
        return said
    of = "" if outcome.of == "updates" else f" of the {outcome.of}"
    moved = f"a bound moved in {percent(outcome.moved)}{of}"
    reached = "by searches over" if bounds.scope == "micro_batch" else "in"
    counted = "tokens" if bounds.scope == "micro_batch" else "updates"
    return f"{said}; reached {reached} {percent(outcome.reached)} of the {counted}, {moved}"


def _staleness(run: RunRecord) -> str:
    reuse, mini_batches = (
        run.config.get(f"algorithm.{name}") for name in ("reuse_epochs", "updates_per_epoch")
    )
    parts = []
    if reuse and mini_batches:
        parts.append(f"{reuse * mini_batches} updates of a batch (passes: {reuse}, of {mini_batches} each)")
    behind = run.config.get("rollout.max_staleness")
    if behind:
        parts.append(f"sampled at most {behind} step(s) before")
    average, oldest = mean(run.steps.known("staleness/mean")), run.steps.known("staleness/max")
    if average is not None:
        most = f", {oldest.max():g} at most" if len(oldest) else ""
        parts.append(f"a token is {average:.3g} updates old in the mean{most}")
    return "; ".join(parts) or NOT_RECORDED


def _held_out(run: RunRecord) -> str:
    rows = _evaluated(run)
    if not rows:
        return "not evaluated"
    first, last = rows[0], rows[-1]
    if len(rows) == 1:
        return f"{_score(first)} at step {first['step']:.0f}"
    steps = f"steps {first['step']:.0f} and {last['step']:.0f}"
    return f"{_score(first)} → {_score(last)}{_interval(last)}, {steps}"


def _evaluated(run: RunRecord) -> list[Row]:
    return [row for row in run.evaluations.rows() if "eval/mean" in row]


def _score(row: Row) -> str:
    return percent(row["eval/mean"])


def _interval(row: Row) -> str:
    """Return the 95% interval of a row's score if it comes from one suite, else ""."""
    ends = [
        [value for name, value in row.items() if "/avg@" in name and name.endswith(end)]
        for end in ("_low", "_high")
    ]
    if any(len(values) != 1 for values in ends):
        return ""
    return f" (95% interval {percent(ends[0][0])} to {percent(ends[1][0])})"


_NO_BASELINE = (
    "It does not show that this method is better than another: that takes runs of both, with several seeds. "
    "The command bapo report RUN OTHER_RUN compares two."
)


def readings(run: RunRecord) -> list[str]:
    """Return the recipe's own note, if any, and what one run cannot show."""
    note = run.config.get("logging.note")
    return [*([str(note)] if note else []), _NO_BASELINE]


def comparison_readings(runs: Sequence[RunRecord]) -> list[str]:
    """Return the interpretation of a comparison: the runs' notes, and the limits of one run per setting."""
    notes = {run.name: str(run.config.get("logging.note") or "") for run in runs}
    said = [
        f"{name}: {note}" if len(set(notes.values())) > 1 else note for name, note in notes.items() if note
    ]
    one_each = (
        "One run of each setting: another seed gives other curves, and a difference may be luck. Only "
        "several seeds of each, paired, tell whether a method is better."
    )
    return [*dict.fromkeys(said), one_each]
