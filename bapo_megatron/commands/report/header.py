"""Header of a report: a run's method, staleness, held-out score and main settings, and an interpretation.

``facts`` and ``main_settings`` return (name, text) pairs, ``readings`` and ``comparison_readings`` sentences,
from the stored configuration and metrics. Where these lack a value, most ``facts`` are "not recorded", and
``main_settings`` and the readings leave out its row or sentence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bapo_megatron.algo.bounds import BoundsConfig, describe, preset_name, sum_count
from bapo_megatron.commands.report.data import RunRecord, headline, mean
from bapo_megatron.commands.report.series import number, percent
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
    """Return a run's algorithm, preset, target, staleness, held-out score, baseline and fork source."""
    return [
        ("algorithm", algorithm(run)),
        ("preset", _preset(run)),
        ("target", _target(run)),
        ("staleness", _staleness(run)),
        ("held-out", _held_out(run)),
        ("baseline", _baseline(run)),
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


def _baseline(run: RunRecord) -> str:
    begun = int(run.step_numbers[0]) - 1
    rows = [row for row in _evaluated(run) if row["step"] == begun]
    policy = f"the policy after step {begun}" if begun else "the policy before training"
    said = f"{policy}, reward {number(headline(run.steps)['reward_first'])}"
    return f"{said}, held-out {_score(rows[0])}" if rows else said


def _evaluated(run: RunRecord) -> list[Row]:
    return [row for row in run.evaluations.rows() if row.get("eval/mean") is not None]


def _score(row: Row) -> str:
    return percent(row["eval/mean"])


def _interval(row: Row) -> str:
    """Return the 95% interval of a row's score if it comes from one suite, else ""."""
    ends = [
        [value for name, value in row.items() if "/avg@" in name and name.endswith(end)]
        for end in ("_low", "_high")
    ]
    if any(len(values) != 1 or values[0] is None for values in ends):
        return ""
    return f" (95% interval {percent(ends[0][0])} to {percent(ends[1][0])})"


# --- the configuration in short -------------------------------------------------------------------


def main_settings(config: dict[str, Any]) -> list[Fact]:
    """Return a run's main settings from a resolved configuration by dotted names, without those it lacks."""
    get = config.get
    rows = [
        ("model", _joined(get("model.hf_path"), get("model.dtype"))),
        ("data", _data(config)),
        ("batch", _filled(_BATCH, [get(f"rollout.{name}") for name in _OF_BATCH])),
        ("optimizer", _filled(_OPTIMIZER, [get(f"optimizer.{name}") for name in _OF_OPTIMIZER])),
        ("evaluation", _evaluation(config)),
        ("engine", _joined(get("rollout.engine"))),
        ("seed", _joined(get("seed"))),
    ]
    return [(name, said) for name, said in rows if said]


_BATCH = "{} prompts of {} responses, at most {} tokens, temperature {}"
_OF_BATCH = ("prompts_per_step", "group_size", "max_response_tokens", "temperature")
_OPTIMIZER = "AdamW, learning rate {}, {}, warm-up of {} updates, weight decay {}"
_OF_OPTIMIZER = ("lr", "decay", "warmup_updates", "weight_decay")


def _joined(*values: Any) -> str:
    return ", ".join(str(value) for value in values if value is not None)


def _filled(form: str, values: Sequence[Any]) -> str:
    if any(value is None for value in values):
        return ""
    return form.format(*(f"{value:g}" if isinstance(value, float) else value for value in values))


def _data(config: dict[str, Any]) -> str:
    reward = config.get("reward.function")
    sources = [
        _joined(
            source["path"],
            f"weight {source['weight']:g}",
            source["reward"] or reward,
            (source.get("environment") or {}).get("function"),
        )
        for source in config.get("data.sources") or ()
    ]
    return "; ".join(sources) or _joined(config.get("data.path"))


def _evaluation(config: dict[str, Any]) -> str:
    every, suites = config.get("evaluation.every"), config.get("evaluation.suites")
    if not every or not suites:
        return ""
    samples = config.get("evaluation.samples", 1)
    return f"at every step that {every} divides, avg@{samples}: {', '.join(map(str, suites))}"


_NO_BASELINE = (
    "It does not show that this method is better than another: that takes runs of both, with several seeds. "
    "The command bapo report RUN OTHER_RUN compares two."
)
_SELDOM = 0.05
"""Below this share of updates with a moved bound, the bounds count as fixed."""


def readings(run: RunRecord) -> list[str]:
    """Return the interpretation of one run in sentences: the recipe's own note, if any, then its reward, its
    bounds search, and what one run cannot show."""
    note = run.config.get("logging.note")
    return [*([str(note)] if note else []), *_of_reward(run), *_of_search(run), _NO_BASELINE]


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


def _of_reward(run: RunRecord) -> Iterator[str]:
    figures = headline(run.steps)
    first, last = figures["reward_first"], figures["reward_last"]
    if first is not None and last is not None and figures["steps"] > 1:
        yield f"The reward went from {number(first)} to {number(last)}."
    if len(run.config.get("data.sources") or []) > 1:
        yield "It is the mean of several sources, whose rewards may have different scales: see By source."


def _of_search(run: RunRecord) -> Iterator[str]:
    bounds, outcome = run.bounds, search_outcome(run)
    if bounds is not None and outcome is not None and outcome.moved < _SELDOM:
        yield (
            f"A bound moved in {percent(outcome.moved)} of the {outcome.of}: the run shows what clipping at "
            f"{bounds.low_start:g} and {bounds.high_start:g} does, and hardly anything of the search."
        )
