"""Packing plan (bin packing, load balancing): assigns documents to packs, and packs to data-parallel ranks.

``plan_packs`` maps document lengths to document indices for each pack of each rank. Goals: few packs, and
equal cost on all ranks. A document of n tokens costs n + quadratic * n^2, in units of one token's linear
work; the second term is attention. The plan is a pure function of lengths and layout, in integers, whose sums
do not depend on order: every rank computes the same plan without communication.

1. Best fit gives the number of packs, rounded up to the layout's multiple. Documents go longest first to the
   cheapest pack with room (longest processing time first); if one finds no room, best fit's packs are used.
2. Packs are dealt to the ranks, equally many each.
3. Exchanges of documents balance the ranks, then the packs within each rank: the heaviest group exchanges
   with a lighter one. If an exchange moves the weight s from a group of weight H to one of weight L < H, they
   then differ by |(H - L) - 2 s|; the feasible exchange with the smallest difference is made.

Packs of one length (``fixed_length``) have the same linear cost, full or not. There step 1 counts tokens,
which keeps the common length short, and the other steps count only attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bapo_megatron.types import PackLayout

Pack = list[int]
"""Indices of a pack's documents."""

MAX_WORK = 10_000_000
"""Limit of document pairs compared per call, some tenths of a second. Unlike a time limit it stops every rank
at the same plan."""
_CALL = 5_000
"""Fixed cost of comparing two groups, in document pairs."""

_NOTHING = -1


@dataclass(frozen=True)
class Documents:
    """Input of the packing: length and compute cost of each document, and a pack's capacity."""

    tokens: np.ndarray
    """Tokens of each document, padding included, int64."""
    weights: np.ndarray
    """Weight (compute) of each document, int64; groups get equal sums of it."""
    capacity: int
    """Capacity of a pack in tokens."""

    def weight(self, pack: Pack) -> int:
        return int(self.weights[pack].sum())


def balance(groups: list[list[Pack]], documents: Documents, slack: float, work: int = MAX_WORK) -> None:
    """Balance ``groups`` in place until none exceeds the mean by ``slack``, nothing helps, or ``work`` is
    done."""
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
            moved = _exchange(groups[heaviest], groups[other], totals[heaviest] - totals[other], documents)
            if moved is not None:
                totals[heaviest] -= moved
                totals[other] += moved
                break
        else:
            return


def _size(group: list[Pack]) -> int:
    return sum(len(pack) + 1 for pack in group)


def _exchange(heavy: list[Pack], light: list[Pack], gap: int, documents: Documents) -> int | None:
    """Exchange one document for another, or for none, so that the groups then differ least. Returns the
    weight that ``heavy`` lost, or None if no exchange with room in both packs helps."""
    a, b = _choices(heavy, documents), _choices(light, documents)
    longer = np.subtract.outer(a.tokens, b.tokens)
    shift = np.subtract.outer(a.weights, b.weights)
    feasible = (longer <= b.room[None, :]) & (-longer <= a.room[:, None])
    difference = np.where(feasible, abs(gap - 2 * shift), gap)
    i, j = divmod(int(difference.argmin()), difference.shape[1])
    if difference[i, j] >= gap:
        return None
    packs = heavy[a.pack[i]], light[b.pack[j]]
    for document, (source, target) in ((a.document[i], packs), (b.document[j], packs[::-1])):
        if document != _NOTHING:
            source.remove(document)
            target.append(int(document))
    return int(shift[i, j])


class _Choices(NamedTuple):
    """What a group of packs may give in an exchange, as arrays: each document, and for each pack
    ``_NOTHING``, with their tokens, weights, and the pack's free room."""

    document: np.ndarray
    pack: np.ndarray
    tokens: np.ndarray
    weights: np.ndarray
    room: np.ndarray
    """Free tokens in the candidate's pack."""


def _choices(group: Sequence[Pack], documents: Documents) -> _Choices:
    document = np.array([i for pack in group for i in (*pack, _NOTHING)])
    pack = np.repeat(np.arange(len(group)), [len(pack) + 1 for pack in group])
    room = np.array([documents.capacity - documents.tokens[pack].sum() for pack in group])
    tokens, weights = (
        np.where(document == _NOTHING, 0, values[document])
        for values in (documents.tokens, documents.weights)
    )
    return _Choices(document, pack, tokens, weights, room[pack])


# Totals within this share of their mean are balanced.
_RANK_TOLERANCE, _PACK_TOLERANCE = 0.001, 0.01


def plan_packs(lengths: Sequence[int], pack_tokens: int, layout: PackLayout) -> list[list[Pack]]:
    """Return the packing plan: document indices for each pack of each rank.

    Every rank has the same number of packs, a multiple of ``count_multiple``; packs may be empty. ``lengths``
    include padding. Raises ValueError if one exceeds ``pack_tokens`` rounded down to ``length_multiple``.
    """
    capacity = pack_tokens // layout.length_multiple * layout.length_multiple
    _check_fit(max(lengths, default=0), capacity, pack_tokens, layout)
    tokens = np.array(lengths, dtype=np.int64)
    costs = tokens + np.rint(layout.quadratic * np.square(tokens, dtype=np.float64)).astype(np.int64)
    packs = _fewest_packs(tokens, tokens if layout.fixed_length else costs, capacity, layout)
    documents = Documents(tokens, costs, capacity)
    if layout.fixed_length:
        documents = _one_length(packs, tokens, costs, capacity, layout.length_multiple)
    return _over_ranks(packs, documents, layout.data_size, float(costs.sum()))


def _check_fit(longest: int, capacity: int, pack_tokens: int, layout: PackLayout) -> None:
    if longest > capacity:
        raise ValueError(
            f"a sample of {longest} tokens (document_multiple={layout.document_multiple}) does not fit into "
            f"packs of {capacity} (pack_tokens={pack_tokens}, rounded down to length_multiple="
            f"{layout.length_multiple}); pack_tokens must be at least "
            f"{-(-longest // layout.length_multiple) * layout.length_multiple}"
        )


def _fewest_packs(tokens: np.ndarray, weights: np.ndarray, capacity: int, layout: PackLayout) -> list[Pack]:
    """Step 1: return packs of similar weight, as few as best fit needs, or best fit's if one overflows."""
    step = layout.data_size * layout.count_multiple
    # With weights that fall with tokens the fullest pack with room is the lightest: best fit.
    tight = [pack for pack in _fill(tokens, -tokens, len(tokens), capacity) or [] if pack]
    number = -(-max(1, len(tight)) // step) * step
    tight += [[] for _ in range(number - len(tight))]
    return _fill(tokens, weights, number, capacity) or tight


def _fill(tokens: np.ndarray, weights: np.ndarray, number: int, capacity: int) -> list[Pack] | None:
    """Deal documents longest first, each to the lightest pack with room; None if one finds no room."""
    packs: list[Pack] = [[] for _ in range(number)]
    filled, weight = np.zeros((2, number), dtype=np.int64)
    for index in np.argsort(-tokens, kind="stable").tolist():
        room = filled + tokens[index] <= capacity
        pack = int(np.where(room, weight, np.iinfo(np.int64).max).argmin())
        if not room[pack]:
            return None
        packs[pack].append(index)
        filled[pack] += tokens[index]
        weight[pack] += weights[index]
    return packs


def _one_length(
    packs: list[Pack], tokens: np.ndarray, costs: np.ndarray, capacity: int, multiple: int
) -> Documents:
    """Shorten the fullest pack as far as possible, in place; its length is the result's capacity."""
    slack = _RANK_TOLERANCE * float(tokens.sum()) / len(packs)
    balance([[pack] for pack in packs], Documents(tokens, tokens, capacity), slack)
    fullest = max(int(tokens[pack].sum()) for pack in packs)
    return Documents(tokens, costs - tokens, -(-fullest // multiple) * multiple)


def _over_ranks(packs: list[Pack], documents: Documents, ranks: int, cost: float) -> list[list[Pack]]:
    plan = _deal(packs, documents, ranks)
    balance(plan, documents, _RANK_TOLERANCE * cost / ranks)
    for rank in plan:
        balance([[pack] for pack in rank], documents, _PACK_TOLERANCE * cost / len(packs), MAX_WORK // ranks)
        for pack in rank:
            pack.sort(key=lambda index: (-documents.tokens[index], index))
        # Heaviest pack first, so that running out of memory happens in the first forward pass.
        rank.sort(key=lambda pack: (-documents.weight(pack), pack))
    return plan


def _deal(packs: list[Pack], documents: Documents, ranks: int) -> list[list[Pack]]:
    """Deal packs to ranks in rounds, heaviest first; within a round heavier packs go to lighter ranks."""
    plan: list[list[Pack]] = [[] for _ in range(ranks)]
    weights = [0] * ranks
    ordered = sorted(packs, key=documents.weight, reverse=True)
    for start in range(0, len(ordered), ranks):
        lightest = sorted(range(ranks), key=weights.__getitem__)
        for rank, pack in zip(lightest, ordered[start : start + ranks], strict=True):
            plan[rank].append(pack)
            weights[rank] += documents.weight(pack)
    return plan
