"""The beginning of a journal at the sampler's state in a checkpoint: of a fork, or of a run that lost its
journal.

The state has the place in the dataset and the prompts that were in the making, but none of their tokens:
those prompts are sampled again, first. A fork begins its dataset anew where its order of prompts is another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from bapo_megatron.rollout.sampler.event_log.events import groups_opened
from bapo_megatron.rollout.sampler.event_log.write_ahead_log import Record

OUTSTANDING = "outstanding"
"""Entry of a checkpoint's state: number, epoch and prompt of each group in the making. Earlier versions had
none."""

FORKED = "forked"
"""Entry of the state that a fork begins at: why its dataset begins at its start; None if it goes on."""

_NO_ORDER = ("model.", "rollout.")
"""First parts of the entries of a journal's identity that do not decide which prompt comes when."""


class Beginning(NamedTuple):
    """The records that a journal begins with, and what to say of it."""

    state: Record
    opened: list[Record]
    """The prompts to sample again."""
    kind: str
    """The kind of the event to report."""
    message: str


def beginning(state: dict[str, Any], identity: dict[str, Any], step: int) -> Beginning:
    """The beginning of a journal at ``state``, that of a checkpoint after ``step``.

    ``identity``: the settings that the journal is bound to. Without an entry ``FORKED`` the state's must be
    the same (``SamplerState``).
    """
    forked = FORKED in state
    again = state.get(OUTSTANDING)
    fields = {name: value for name, value in state.items() if name not in (OUTSTANDING, FORKED)}
    fields["tokens"] = _without_outstanding(fields["tokens"])
    numbers = {number for number, _, _ in again or ()}
    fields["judged"] = [summary for summary in fields["judged"] if summary[0] not in numbers]
    if not forked:
        told = _told_again(again)
        return Beginning(Record("state", fields, {}), _opened(again), "journal_missing", told)
    fields |= {"identity": identity, "served": step, "weights_step": step, "trained": []}
    for name in ("step_of", "first_step_of"):
        fields[name] = [pair for pair in fields.get(name, fields["step_of"]) if pair[1] <= step]
    if why := state[FORKED] or _other_order(state["identity"], identity):
        fields |= {"taken": 0, "judged": [], "dropped": {}}
        told = f"the dataset begins at its start: {why}"
        return Beginning(Record("state", fields, {}), [], "fork_position", told)
    told = f"the dataset goes on after {state['taken']} prompts; {_told_again(again)}"
    if state["served"] > step:  # the other run had repeated steps, after a kill
        told += f"; those that it had sampled for the steps {step + 1} to {state['served']} are left out"
    return Beginning(Record("state", fields, {}), _opened(again), "fork_position", told)


def _without_outstanding(tokens: dict[str, int]) -> dict[str, int]:
    """The counts of tokens, those of groups in the making among the dropped ones."""
    left = tokens.get("sampled", 0) - sum(count for name, count in tokens.items() if name != "sampled")
    return {**tokens, "dropped_lost": tokens.get("dropped_lost", 0) + left} if left else dict(tokens)


def _opened(again: list[tuple[int, int, int]] | None) -> list[Record]:
    return [groups_opened(again, None)] if again else []


def _told_again(again: list[tuple[int, int, int]] | None) -> str:
    if again is None:
        return (
            "prompts that were in the making are left out: the checkpoint, of an earlier version, has no list"
        )
    return f"{len(again)} prompts that were in the making are sampled again, first"


def _other_order(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """What makes the order of the prompts another one, in words; nothing if it is the same."""
    return ", ".join(
        f"{name} is {ours.get(name)}, and was {theirs.get(name)}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name) and not name.startswith(_NO_ORDER)
    )
