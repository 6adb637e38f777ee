"""Interpretation of a report: sentences on what its runs show, and on what they cannot show.

The rules are fixed thresholds on logged metrics. Used by ``page.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bapo_megatron.commands.report.data import Headline, RunRecord, headline
from bapo_megatron.commands.report.header import bounds_of, search_outcome
from bapo_megatron.commands.report.text import number, percent

_SELDOM = 0.05
"""Share of updates with a moved bound below which the bounds count as fixed at their starts."""


def readings(run: RunRecord) -> list[str]:
    """Interpretation of one run in sentences; first the recipe's own note."""
    note = run.config.get("logging.note")
    reward = [*_of_reward(headline(run.steps)), *_of_sources(run)]
    return [*([str(note)] if note else []), *reward, *_of_search(run), *_of_method()]


def comparison_readings(runs: Sequence[RunRecord]) -> list[str]:
    """Interpretation of a comparison: the runs' notes, and the limits of one run of each setting."""
    notes = {run.name: str(run.config.get("logging.note") or "") for run in runs}
    said = [
        f"{name}: {note}" if len(set(notes.values())) > 1 else note for name, note in notes.items() if note
    ]
    one_each = (
        "One run of each setting: another seed gives other curves, and a difference may be luck. Only "
        "several seeds of each, paired, tell whether a method is better."
    )
    return [*dict.fromkeys(said), one_each]


def _of_reward(figures: Headline) -> Iterator[str]:
    first, last = figures["reward_first"], figures["reward_last"]
    if first is not None and last is not None and figures["steps"] > 1:
        yield f"The reward went from {number(first)} to {number(last)}."


def _of_sources(run: RunRecord) -> Iterator[str]:
    if len(run.config.get("data.sources") or []) > 1:
        yield "It is the mean of several sources, whose rewards may have different scales: see By source."


def _of_search(run: RunRecord) -> Iterator[str]:
    bounds, found = bounds_of(run), search_outcome(run)
    if bounds is None or found is None:
        return
    starts = f"{bounds.low_start:g} and {bounds.high_start:g}"
    if found.moved < _SELDOM:
        seldom = (
            f"in {percent(found.moved)} of the {found.of} only"
            if found.moved
            else f"in no {found.of.removesuffix('s')}"
        )
        yield (
            f"A bound moved {seldom}: nearly always the target of {bounds.target:g} was met at {starts}, "
            f"where the search begins. So the run shows what clipping there does, and nothing of the search."
        )
        return
    missed = ""
    if found.reached < 1 - _SELDOM:
        missed = (
            f" In {percent(1 - found.reached)} of the updates the search came to its end, {bounds.low_end:g} "
            f"and {bounds.high_end:g}, and the positive tokens still held less than the target."
        )
    yield (
        f"In {percent(found.moved)} of the {found.of} the positive tokens held less than the target of "
        f"{bounds.target:g} at {starts}, and the search moved a bound.{missed}"
    )


def _of_method() -> Iterator[str]:
    yield (
        "It does not show that this method is better than another: that takes runs of both, with several "
        "seeds. The command bapo report RUN OTHER_RUN compares two."
    )
