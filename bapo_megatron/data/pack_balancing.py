"""Pack balancing: equalizes the compute of data-parallel ranks by exchanging documents and packs.

The heaviest group exchanges with a lighter one. A group is the packs of a rank, or a single pack.

Two groups weighing H > L that shift the weight s from one to the other differ by |(H - L) - 2 s| afterwards.
Each exchange is the feasible one with the smallest such difference; the heaviest group never gets heavier.
Deterministic: every rank computes the same plan (``pack_plan.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Pack = list[int]
"""Indices of the documents of a pack."""

MAX_WORK = 10_000_000
"""Limit of the document pairs that a call compares: some tenths of a second. Unlike a time limit it stops
every rank at the same plan."""
_CALL = 5_000
"""Fixed cost of comparing two groups, as a number of document pairs."""

_NOTHING = -1


@dataclass(frozen=True)
class Documents:
    """Documents to pack: the lengths and weights (compute) of all, and the capacity of a pack.

    Made by ``pack_plan.py``, read by ``balance``.
    """

    tokens: np.ndarray
    """Tokens of each document in a pack, int64."""
    weights: np.ndarray
    """Weight (compute) of each document, int64; groups are brought to equal sums of it."""
    capacity: int
    """Tokens that a pack holds."""

    def weight(self, pack: Pack) -> int:
        """Weight of ``pack``: the sum over its documents."""
        return int(self.weights[pack].sum())


class _Exchange(NamedTuple):
    """An exchange between two groups: of two documents (or one and ``_NOTHING``), or of two packs."""

    difference: int
    """Difference of the two groups' weights afterwards."""
    shift: int
    """Weight that leaves the heavier group."""
    packs: tuple[int, int]
    """Numbers of the packs within their groups."""
    documents: tuple[int, int] | None
    """Documents to exchange; None: the packs themselves are exchanged."""


def balance(groups: list[list[Pack]], documents: Documents, slack: float, work: int = MAX_WORK) -> None:
    """Balance ``groups`` in place until none exceeds the mean by more than ``slack``, or nothing helps."""
    totals = [sum(documents.weight(pack) for pack in group) for group in groups]
    mean = sum(totals) / len(groups)
    while True:
        *lighter, heaviest = sorted(range(len(groups)), key=totals.__getitem__)
        if totals[heaviest] - mean <= slack:
            return
        for other in lighter:
            work -= _CALL + _size(groups[heaviest]) * _size(groups[other])
            if work < 0:
                return
            found = _best(groups[heaviest], groups[other], totals[heaviest] - totals[other], documents)
            if found is not None:
                _apply(groups[heaviest], groups[other], found)
                totals[heaviest] -= found.shift
                totals[other] += found.shift
                break
        else:
            return


def _size(group: list[Pack]) -> int:
    return sum(len(pack) + 1 for pack in group)


def _best(heavy: list[Pack], light: list[Pack], gap: int, documents: Documents) -> _Exchange | None:
    """Exchange with the smallest remaining difference, if that is below ``gap``, else None."""
    candidates = _of_packs(heavy, light, gap, documents), _of_documents(heavy, light, gap, documents)
    found = min(candidates, key=lambda exchange: exchange.difference)
    return found if found.difference < gap else None


def _of_packs(heavy: list[Pack], light: list[Pack], gap: int, documents: Documents) -> _Exchange:
    weights = [np.array([documents.weight(pack) for pack in group]) for group in (heavy, light)]
    shift = np.subtract.outer(*weights)
    a, b = _least(abs(gap - 2 * shift))
    return _Exchange(abs(gap - 2 * int(shift[a, b])), int(shift[a, b]), (a, b), None)


def _of_documents(heavy: list[Pack], light: list[Pack], gap: int, documents: Documents) -> _Exchange:
    """Best exchange of one document for another, or for none, where both packs have room."""
    a, b = _choices(heavy, documents), _choices(light, documents)
    longer = np.subtract.outer(a.tokens, b.tokens)
    shift = np.subtract.outer(a.weights, b.weights)
    feasible = (longer <= b.room[None, :]) & (-longer <= a.room[:, None])
    i, j = _least(np.where(feasible, abs(gap - 2 * shift), gap))
    difference = abs(gap - 2 * int(shift[i, j])) if feasible[i, j] else gap
    packs = int(a.pack[i]), int(b.pack[j])
    return _Exchange(difference, int(shift[i, j]), packs, (int(a.document[i]), int(b.document[j])))


class _Choices(NamedTuple):
    """Exchange candidates of a group: each document, and for each pack the empty candidate ``_NOTHING``."""

    document: np.ndarray
    pack: np.ndarray
    tokens: np.ndarray
    weights: np.ndarray
    room: np.ndarray
    """Free tokens of the candidate's pack."""


def _choices(group: Sequence[Pack], documents: Documents) -> _Choices:
    document = np.array([i for pack in group for i in (*pack, _NOTHING)])
    pack = np.repeat(np.arange(len(group)), [len(pack) + 1 for pack in group])
    room = np.array([documents.capacity - documents.tokens[pack].sum() for pack in group])
    tokens, weights = (
        np.where(document == _NOTHING, 0, values[document])
        for values in (documents.tokens, documents.weights)
    )
    return _Choices(document, pack, tokens, weights, room[pack])


def _least(values: np.ndarray) -> tuple[int, int]:
    row, column = divmod(int(values.argmin()), values.shape[1])
    return row, column


def _apply(heavy: list[Pack], light: list[Pack], exchange: _Exchange) -> None:
    a, b = exchange.packs
    if exchange.documents is None:
        heavy[a], light[b] = light[b], heavy[a]
        return
    moves = zip(exchange.documents, (heavy[a], light[b]), (light[b], heavy[a]), strict=True)
    for document, source, target in moves:
        if document != _NOTHING:
            source.remove(document)
            target.append(document)
