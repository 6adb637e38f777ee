"""The first records of a journal that begins at a checkpoint: of a fork, or after the journal was lost.

A checkpoint has the sampler's position in the dataset and the prompts of unfinished groups, without their
tokens: these prompts are sampled again, first. A fork with another order of prompts starts its dataset
anew. Used by ``group_sampler.py`` and ``trainer/resume.py``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from bapo_megatron.rollout.sampler.event_log.events import groups_opened
from bapo_megatron.rollout.sampler.event_log.write_ahead_log import Record

OUTSTANDING = "outstanding"
"""Key in a checkpoint's state: number, epoch and prompt of each unfinished group; none in early versions."""

FORKED = "forked"
"""Key in the state of a fork: the reason why its dataset starts anew; None if it goes on."""

_NO_ORDER = ("model.", "rollout.", "environment.")
"""Prefixes of the identity's keys that do not decide the order of prompts."""


class JournalStart(NamedTuple):
    """The first records of a journal, and the event that reports them.

    Plain data: ``GroupSampler`` commits and reports them. Made by ``journal_start`` for ``GroupSampler``.
    """

    state: Record
    opened: list[Record]
    """Records that open the unfinished groups again."""
    kind: str
    """Kind of the event."""
    message: str


def journal_start(state: dict[str, Any], identity: dict[str, Any], step: int) -> JournalStart:
    """The first records of a journal at ``state``, that of a checkpoint after ``step``.

    ``identity``: the settings that the journal depends on. Without the key ``FORKED`` they must equal those
    of the state (``SamplerState``).
    """
    forked = FORKED in state
    again = state.get(OUTSTANDING)
    fields = {name: value for name, value in state.items() if name not in (OUTSTANDING, FORKED)}
    fields["tokens"] = _without_outstanding(fields["tokens"])
    numbers = {number for number, _, _ in again or ()}
    fields["judged"] = [summary for summary in fields["judged"] if summary[0] not in numbers]
    if not forked:
        told = _told_again(again)
        return JournalStart(Record("state", fields, {}), _opened(again), "journal_missing", told)
    fields |= {"identity": identity, "served": step, "weights_step": step, "trained": []}
    for name in ("step_of", "first_step_of"):
        fields[name] = [pair for pair in fields.get(name, fields["step_of"]) if pair[1] <= step]
    if why := state[FORKED] or _other_order(state["identity"], identity):
        fields |= {"taken": 0, "judged": [], "dropped": {}}
        told = f"the dataset begins at its start: {why}"
        return JournalStart(Record("state", fields, {}), [], "fork_position", told)
    told = f"the dataset goes on after {state['taken']} prompts; {_told_again(again)}"
    if state["served"] > step:  # the other run had repeated steps, after a kill
        told += f"; those that it had sampled for the steps {step + 1} to {state['served']} are skipped"
    return JournalStart(Record("state", fields, {}), _opened(again), "fork_position", told)


def _without_outstanding(tokens: dict[str, int]) -> dict[str, int]:
    """The token counts, with those of unfinished groups counted as dropped."""
    left = tokens.get("sampled", 0) - sum(count for name, count in tokens.items() if name != "sampled")
    return {**tokens, "dropped_lost": tokens.get("dropped_lost", 0) + left} if left else dict(tokens)


def _opened(again: list[tuple[int, int, int]] | None) -> list[Record]:
    return [groups_opened(again, None)] if again else []


def _told_again(again: list[tuple[int, int, int]] | None) -> str:
    if again is None:
        return (
            "the prompts of unfinished groups are skipped: this checkpoint of an earlier version has no list"
        )
    return f"the prompts of {len(again)} unfinished groups are sampled again, first"


def _other_order(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """The changed settings that change the order of prompts, in words; empty if there are none."""
    return ", ".join(
        f"{name} is {ours.get(name)}, and was {theirs.get(name)}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name) and not name.startswith(_NO_ORDER)
    )
