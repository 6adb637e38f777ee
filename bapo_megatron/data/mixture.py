"""Mixture of prompt sources: a deterministic, weighted interleaving, resumable from one count.

Source i has a share w_i of the prompts (w_i = weight_i / sum of weights). Of every first n prompts it has n
w_i, to within 1 - 1 / (2 k - 2) of a prompt for k > 1 sources. In general no rule is better (R. Tijdeman,
"The chairman assignment problem", Discrete Mathematics 32 (1980), 323-330). With x_i prompts taken from
source i before the n-th, the n-th comes from the source which, among those with

    n w_i - x_i >= 1 / (2 k - 2),

has the smallest (1 - 1 / (2 k - 2) - (n w_i - x_i)) / w_i: the earliest deadline. All of it is computed
exactly, in integers and fractions, and nothing is random.

The sampler and SFT take their prompts in this order where a run has several sources. Used in
``rollout/engines/``, ``rollout/sampler/`` and ``trainer/``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from bapo_megatron.data.prompts import MixedSource, PromptOrder


def mixture_settings(sources: Sequence[MixedSource]) -> dict[str, Any]:
    """Settings that fix a mixture's order, by name: a journal refuses others. One None without a mixture."""
    if not sources:
        return {"data.sources": None}
    found: dict[str, Any] = {"data.sources": [one.name for one in sources]}
    for one in sources:
        found |= {
            f"data.sources[{one.name}].weight": float(one.weight),
            f"data.sources[{one.name}].sha256": one.sha256,
            f"data.sources[{one.name}].prompts": one.prompts,
        }
    return found


class ProportionalInterleaving:
    """Proportional interleaving of sources (Tijdeman's chairman assignment): an endless sequence of indices.

    Weights count as the decimal numbers that they print as, so that 0.1 is a tenth. It remembers its last
    place, so that asking for places in order is cheap; the answers do not depend on it. ``Mixture`` asks it
    for the source of each prompt.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(weight)) for weight in weights]
        scale = math.lcm(*(one.denominator for one in exact))
        whole = [int(one * scale) for one in exact]
        common = math.gcd(*whole)
        self._weights = [one // common for one in whole]
        self._total = sum(self._weights)
        self._taken, self._counts = 0, [0] * len(self._weights)

    def next_after(self, taken: int) -> tuple[int, int]:
        """Source after the first ``taken`` places, and how often it was chosen before."""
        if taken < self._taken or taken - self._taken >= self._total:
            periods = taken // self._total  # after each of them all shares are exact
            self._taken, self._counts = periods * self._total, [periods * one for one in self._weights]
        while self._taken < taken:
            self._counts[self._choice()] += 1
            self._taken += 1
        choice = self._choice()
        return choice, self._counts[choice]

    def _choice(self) -> int:
        """Source of the next place. All inequalities are multiplied by ``total`` (2 k - 2)."""
        sources = len(self._weights)
        if sources == 1:
            return 0
        scale, total, place = 2 * sources - 2, self._total, self._taken + 1
        owed = [
            scale * (place * weight - total * count)
            for weight, count in zip(self._weights, self._counts, strict=True)
        ]
        due = (number for number in range(sources) if owed[number] >= total)
        return min(
            due, key=lambda number: Fraction(total * (scale - 1) - owed[number], self._weights[number])
        )


class Mixture:
    """Data order of several sources: each in endless epochs of its own (may be shuffled), mixed by weight.

    The position to resume from is one number, the count of prompts taken, as with ``PromptOrder``. Made by
    ``data_order`` for the sampler, and by ``trainer/sft.py``.
    """

    def __init__(self, sources: Sequence[MixedSource], seed: int, shuffle: bool) -> None:
        self._chairman = ProportionalInterleaving([one.weight for one in sources])
        self._orders = [
            PromptOrder(one.prompts, seed, shuffle, stream=number) for number, one in enumerate(sources)
        ]
        self._starts = [sum(one.prompts for one in sources[:number]) for number in range(len(sources))]

    def take(self, taken: int, count: int) -> list[tuple[int, int]]:
        """The ``count`` pairs of (epoch of the source, index of the prompt) after the first ``taken``."""
        return [self._place(number) for number in range(taken, taken + count)]

    def _place(self, number: int) -> tuple[int, int]:
        source, taken = self._chairman.next_after(number)
        [(epoch, index)] = self._orders[source].take(taken, 1)
        return epoch, self._starts[source] + index


def data_order(
    prompts: int, sources: Sequence[MixedSource], seed: int, shuffle: bool
) -> PromptOrder | Mixture:
    """Data order of a run: of its one file, or of several sources."""
    return Mixture(sources, seed, shuffle) if sources else PromptOrder(prompts, seed, shuffle)
