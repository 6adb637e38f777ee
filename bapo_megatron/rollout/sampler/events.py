"""Sampler events: one function per kind of event returns its ``Record`` for the write-ahead log.

A record is committed to the log, then ``SamplerState.apply`` changes the state. ``journal_start`` returns the
first records of a journal that begins at a checkpoint (a fork of another run, or after journal loss). A
checkpoint holds the dataset position and the prompts of unfinished groups without their tokens; these prompts
are resampled first. A fork with a different prompt order instead starts at the beginning of the dataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bapo_megatron.rollout.sampler.response import Answer, SegmentEnd
from bapo_megatron.rollout.sampler.state import TEACHER_LOG_PROBS, OpenGroup
from bapo_megatron.rollout.sampler.write_ahead_log import Record
from bapo_megatron.types import Generation, ResponseTokens

MOST_BYTES = 2**30
"""Maximum segment bytes in a record of several segments; a record's byte count has 32 bits."""
OUTSTANDING = "outstanding"
"""Checkpoint state key: number, epoch and prompt index of each unfinished group."""
FORKED = "forked"
"""State key of a fork: why its dataset restarts; None if it continues."""
_NO_ORDER = ("model.", "rollout.", "environment.")
"""Prefixes of identity keys that do not affect the prompt order."""


@dataclass(frozen=True)
class Segment:
    """A response segment to be logged: an engine's answer to one request, and its place in the response."""

    group: OpenGroup
    sample: int
    """Position of the response in its group."""
    start: int
    """Response tokens before the segment."""
    generation: Generation
    finish_reason: SegmentEnd | None
    """Finish reason if the segment completes the response, ``turn`` if it ends a turn, otherwise None."""


@dataclass(frozen=True)
class Given:
    """An environment's answer to a turn, to be logged, and its place in the response."""

    group: OpenGroup
    sample: int
    start: int
    """Response tokens before the answer."""
    attempt: int
    """Number of earlier restarts of the response."""
    answer: Answer


def groups_opened(groups: Sequence[tuple[int, int, int]], taken: int | None) -> Record:
    """Event: groups were opened, each given as (number, epoch, prompt index). ``taken``: number of prompts
    taken from the dataset so far; None if these prompts are resampled."""
    return Record("open", {"groups": [list(group) for group in groups], "taken": taken}, {})


def in_records(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Yield the segments in order, in lists for one record each, of at most ``MOST_BYTES`` or one segment. An
    abort returns the tokens of all in-flight requests together: tens of gigabytes with routes."""
    part: list[Segment] = []
    filled = 0
    for segment in segments:
        size = sum(array.nbytes for array in segment.generation.arrays.values())
        if part and filled + size > MOST_BYTES:
            yield part
            part, filled = [], 0
        part.append(segment)
        filled += size
    if part:
        yield part


def segments_arrived(segments: Sequence[Segment]) -> Record:
    """Event: segments arrived from engines; the record's arrays hold them end to end."""
    rows = []
    for segment in segments:
        group, length = segment.group, len(segment.generation.token_ids_R)
        place = (group.number, group.epoch, group.index, segment.sample)
        rows.append([*place, segment.start, length, segment.finish_reason])
    arrays = ResponseTokens.joined([segment.generation for segment in segments]).arrays
    return Record("segments", {"parts": rows}, arrays)


def answers_given(answers: Sequence[Given]) -> Record:
    """Event: environments answered turns; the record's array holds the given tokens end to end."""
    rows = []
    for one in answers:
        group, said = one.group, asdict(one.answer)
        length = len(said.pop("token_ids_R"))
        place = (group.number, group.epoch, group.index, one.sample, one.start, one.attempt)
        rows.append([*place, length, said])
    ids = [np.zeros(0, np.int32), *(one.answer.token_ids_R for one in answers)]
    return Record("given", {"parts": rows}, {"token_ids": np.concatenate(ids).astype(np.int32)})


def response_restarted(group: OpenGroup, sample: int, why: str) -> Record:
    """Event: a response restarts because its environment's state cannot be restored."""
    return Record("restarted", {"number": group.number, "sample": sample, "why": why}, {})


def group_scored(
    number: int,
    rewards: Sequence[float | None],
    failures: Sequence[str],
    teacher_log_probs: Sequence[np.ndarray] | None = None,
    scores: Sequence[float | None] = (),
    named: Sequence[Mapping[str, float]] = (),
) -> Record:
    """Event: a complete group was scored; a response whose reward is None is left out of the group.
    ``failures``: the kind of each failed score. ``teacher_log_probs``: per response or branch, if there is a
    teacher. ``scores``: rewards without penalties; empty if equal. ``named``: each response's named
    rewards."""
    arrays = {} if teacher_log_probs is None else {TEACHER_LOG_PROBS: np.concatenate(teacher_log_probs)}
    fields: dict[str, Any] = {"number": number, "rewards": list(rewards), "failures": list(failures)}
    if scores and list(scores) != fields["rewards"]:
        fields["scores"] = list(scores)
    if any(named):
        fields["named"] = list(named)
    # "judged" on disk, for compatibility with journals of earlier versions.
    return Record("judged", fields, arrays)


def group_dropped(number: int, reason: str) -> Record:
    """Event: a group is dropped from training. ``reason``: ``uniform``, ``stale``, ``refused``, ``failed``
    (too few scores), or ``untaught`` (scored before the run had a teacher)."""
    return Record("dropped", {"number": number, "reason": reason}, {})


def batch_served(step: int, numbers: Sequence[int]) -> Record:
    """Event: the batch of ``step`` consists of these groups, and its file is on disk."""
    return Record("batch", {"step": step, "groups": list(numbers)}, {})


def steps_rewound(step: int) -> Record:
    """Event: the batches of the steps after ``step`` are lost; new groups are sampled for these steps."""
    return Record("rewind", {"step": step}, {})


def weights_loaded(version: int, step: int) -> Record:
    """Event: the engines sample from weight ``version``, produced by ``step``."""
    return Record("weights", {"version": version, "step": step}, {})


def journal_start(
    state: dict[str, Any], identity: dict[str, Any], step: int
) -> tuple[list[Record], str, str]:
    """Return the first records of a journal that begins at ``state``, the checkpoint state after ``step``
    (the state, then one that reopens the unfinished groups), and the kind and message of the run event for
    it. ``identity``: settings that the journal depends on. Unless ``state`` has the key ``FORKED``, they must
    match the identity in ``state``; ``SamplerState`` checks this."""
    again = state[OUTSTANDING]
    fields = {name: value for name, value in state.items() if name not in (OUTSTANDING, FORKED)}
    fields["tokens"] = _without_outstanding(fields["tokens"])
    numbers = {number for number, _, _ in again}
    fields["judged"] = [summary for summary in fields["judged"] if summary[0] not in numbers]
    kind, told = "journal_missing", f"the prompts of {len(again)} unfinished groups are sampled again, first"
    if FORKED in state:
        kind, told = "fork_position", f"the dataset continues after {state['taken']} prompts; {told}"
        fields |= {"identity": identity, "served": step, "weights_step": step, "trained": []}
        for name in ("step_of", "first_step_of"):
            fields[name] = [pair for pair in fields[name] if pair[1] <= step]
        if why := state[FORKED] or _other_order(state["identity"], identity):
            fields |= {"taken": 0, "judged": [], "dropped": {}}
            again, told = [], f"the dataset begins at its start: {why}"
    return [Record("state", fields, {}), *([groups_opened(again, None)] if again else [])], kind, told


def _without_outstanding(tokens: dict[str, int]) -> dict[str, int]:
    """Return the token counts, with tokens of unfinished groups counted as ``dropped_lost``."""
    left = tokens.get("sampled", 0) - sum(count for name, count in tokens.items() if name != "sampled")
    return {**tokens, "dropped_lost": tokens.get("dropped_lost", 0) + left} if left else dict(tokens)


def _other_order(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} is {ours.get(name)}, and was {theirs.get(name)}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name) and not name.startswith(_NO_ORDER)
    )
