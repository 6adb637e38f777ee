"""Packing plan (bin packing, load balancing): assigns documents to packs, and packs to data-parallel ranks.

Its goals are few packs and equal cost on all ranks. A document of n tokens costs n + quadratic * n^2, in
units of one token's linear work; the second term is attention's. The plan is a pure function of lengths and
layout, in integers, whose sums do not depend on their order. So every rank computes the same plan without
communication.

1. Best fit gives the number of packs. Into that many, rounded up to the layout's multiple, documents go
   longest first, each to the cheapest pack with room (longest processing time first).
2. Packs are dealt to the ranks, each the same number.
3. Ranks are balanced by exchanges, then the packs within each rank (``pack_balancing.py``).

Packs of one length (``fixed_length``) have the same linear cost, full or not. So there step 1 counts tokens,
which keeps the common length short, and the other steps count attention's part alone. Used by
``packing.py`` and ``benchmarks/packing.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bapo_megatron.data.pack_balancing import MAX_WORK, Documents, Pack, balance
from bapo_megatron.types import PackLayout

# Totals that differ from their mean by less than this share are balanced.
_RANK_TOLERANCE, _PACK_TOLERANCE = 0.001, 0.01


def plan_packs(lengths: Sequence[int], pack_tokens: int, layout: PackLayout) -> list[list[Pack]]:
    """Packing plan: indices of documents, for each pack of each rank.

    Every rank has the same number of packs, a multiple of ``count_multiple``; packs are empty when there are
    fewer documents than packs. ``lengths`` are those of the documents in a pack, their padding included.
    ValueError if one is longer than ``pack_tokens``, rounded down to ``length_multiple``.
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
    """Step 1: packs of similar weight, as few as best fit needs; if one overflows, best fit's own packs."""
    step = layout.data_size * layout.count_multiple
    # A weight that falls with the tokens makes the fullest pack with room the lightest: best fit.
    tight = [pack for pack in _fill(tokens, -tokens, len(tokens), capacity) or [] if pack]
    number = -(-max(1, len(tight)) // step) * step
    tight += [[] for _ in range(number - len(tight))]
    return _fill(tokens, weights, number, capacity) or tight


def _fill(tokens: np.ndarray, weights: np.ndarray, number: int, capacity: int) -> list[Pack] | None:
    """Documents dealt longest first, each to the lightest pack with room; None if one finds no room."""
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
    """Make the fullest pack as short as possible, in place; its length is the capacity of the result."""
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
        # The heaviest pack first: a run that will be out of memory fails in its first forward pass.
        rank.sort(key=lambda pack: (-documents.weight(pack), pack))
    return plan


def _deal(packs: list[Pack], documents: Documents, ranks: int) -> list[list[Pack]]:
    """Packs dealt to ranks in rounds, heaviest first; within a round the heavier goes to the lighter rank."""
    plan: list[list[Pack]] = [[] for _ in range(ranks)]
    weights = [0] * ranks
    ordered = sorted(packs, key=documents.weight, reverse=True)
    for start in range(0, len(ordered), ranks):
        lightest = sorted(range(ranks), key=weights.__getitem__)
        for rank, pack in zip(lightest, ordered[start : start + ranks], strict=True):
            plan[rank].append(pack)
            weights[rank] += documents.weight(pack)
    return plan
