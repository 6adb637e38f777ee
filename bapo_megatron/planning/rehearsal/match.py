"""Deadlock check: whether all members of a group enter the same collectives in the same order.

Each rank is rehearsed alone, so a rank that would hang on the cluster goes on here. The first call in which
two members of a group differ is where they would deadlock. Sends are matched with the other rank's receives.
Pure functions on the results of all ranks. Used by ``commands/plan.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from bapo_megatron.planning.records import Call, RankResult

_POINT_TO_POINT = ("send", "recv")
_OWN_SIZES = ("alltoall", "alltoall_base")
"""Collectives to which each rank brings as much as it has."""


def collective_mismatches(results: Sequence[RankResult]) -> list[str]:
    """Deadlocks: one line for each rank that deviates in a group, and each pair with unmatched messages."""
    calls = {result.rank: result.calls for result in results}
    return [*_groups(calls), *_pairs(calls)]


def _groups(calls: Mapping[int, Sequence[Call]]) -> Iterator[str]:
    sequences: dict[tuple[int, ...], dict[int, list[Call]]] = {}
    for rank, made in calls.items():
        for call in made:
            if call.op not in _POINT_TO_POINT and len(call.ranks) > 1:
                sequences.setdefault(call.ranks, {}).setdefault(rank, []).append(call)
    for ranks, by_rank in sequences.items():
        present = [rank for rank in ranks if rank in calls]
        for rank in present[1:]:
            left, right = by_rank.get(present[0], []), by_rank.get(rank, [])
            if line := _first_difference(present[0], left, rank, right):
                yield line


def _first_difference(one: int, left: Sequence[Call], other: int, right: Sequence[Call]) -> str | None:
    for number, (a, b) in enumerate(zip_longest(left, right), start=1):
        if a is None or b is None or _signature(a) != _signature(b):
            kind = (a or b).group  # type: ignore[union-attr]
            return (
                f"deadlock: in group {kind} ranks {one} and {other} differ at call {number}: "
                f"{_text(a)}, and {_text(b)}"
            )
    return None


def _signature(call: Call) -> tuple[object, ...]:
    size = None if call.op in _OWN_SIZES else call.size
    return call.op, size, call.dtype, call.device, call.peer


def _text(call: Call | None) -> str:
    if call is None:
        return "no call any more"
    return f"{call.op} of {call.size:,} bytes of {call.dtype} at {call.line} ({call.phase})"


def _pairs(calls: Mapping[int, Sequence[Call]]) -> Iterator[str]:
    sent: dict[tuple[int, int], list[Call]] = {}
    received: dict[tuple[int, int], list[Call]] = {}
    for rank, made in calls.items():
        for call in made:
            if call.peer is None or call.peer not in calls:
                continue
            if call.op == "send":
                sent.setdefault((rank, call.peer), []).append(call)
            elif call.op == "recv":
                received.setdefault((call.peer, rank), []).append(call)
    for source, target in sorted({*sent, *received}):
        messages = zip_longest(sent.get((source, target), []), received.get((source, target), []))
        for number, (a, b) in enumerate(messages, start=1):
            if a is None or b is None or (a.size, a.dtype) != (b.size, b.dtype):
                yield (
                    f"deadlock: message {number} from rank {source} to rank {target}: sent {_text(a)}, "
                    f"received {_text(b)}"
                )
                break
