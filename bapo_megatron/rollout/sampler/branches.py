"""The tree of an episode: its turns, each of which follows another, and the branches that training gets.

An episode's tokens lie end to end in the order of time, turn by turn. A turn follows the one before it,
unless a *fork* says otherwise: an agent program has rewritten its history, or holds several conversations.
The way from the root to a turn that none follows is a *branch*, a training sample. Every sampled token is
trained on once, in the first branch that has it; in later ones it is context. Pure functions; ``response.py``
has the episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

PROMPT = -1
"""What a turn follows that comes directly behind the dataset's prompt."""

NOTHING = -2
"""What a turn follows that begins with a prompt of its own."""

Fork = tuple[int, int]
"""The number of a given turn, counted from 0, and that of the turn that it follows; PROMPT or NOTHING."""


class Branch(NamedTuple):
    """A way through an episode from its root to a turn: the places of its tokens."""

    has_prompt: bool
    """Whether the dataset's prompt comes first; if not, its own prompt is among its tokens."""
    spans: tuple[tuple[int, int], ...]
    """Start and end of each piece, among the tokens of the episode."""

    @property
    def tokens(self) -> int:
        """Number of tokens, without the dataset's prompt."""
        return sum(end - start for start, end in self.spans)

    def of(self, values_N: np.ndarray) -> np.ndarray:
        """Values of its tokens; ``values_N``: those of all tokens of the episode."""
        if self.spans == ((0, len(values_N)),):
            return values_N
        return np.concatenate([values_N[:0], *(values_N[start:end] for start, end in self.spans)])


class Tree(NamedTuple):
    """The tree of an episode as numbers: where its turns end, an unfinished one included, and its forks."""

    ends: tuple[int, ...]
    forks: tuple[Fork, ...]

    @classmethod
    def of(cls, ends: Sequence[int], forks: Sequence[Fork], tokens: int) -> Tree:
        """``ends``: of the finished turns of an episode with ``tokens`` tokens."""
        unfinished = (tokens,) if tokens > (ends[-1] if ends else 0) else ()
        return cls((*ends, *unfinished), tuple(forks))

    def way(self, turn: int) -> tuple[int, list[int]]:
        """The beginning of the way to a turn, PROMPT or NOTHING, and the turns on it, up to that one."""
        follows, turns = dict(self.forks), []
        while turn >= 0:
            turns.append(turn)
            turn = follows.get(turn, turn - 1)
        return turn, turns[::-1]

    def to(self, turn: int) -> Branch:
        """The way to the end of a turn, by its number, as tokens."""
        root, turns = self.way(turn)
        spans: list[tuple[int, int]] = []
        for number in turns:
            start = self.ends[number - 1] if number else 0
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            spans.append((start, self.ends[number]))
        return Branch(root == PROMPT, tuple(spans))

    def lengths(self, prompt_tokens: int) -> dict[int, int]:
        """Tokens of the way to the end of each turn, with those of the dataset's prompt where it begins."""
        follows, lengths = dict(self.forks), {PROMPT: prompt_tokens, NOTHING: 0}
        for turn, (start, end) in enumerate(pairwise((0, *self.ends))):
            lengths[turn] = lengths[follows.get(turn, turn - 1)] + end - start
        return lengths

    @property
    def last(self) -> Branch:
        """The way to the last turn: what is being sampled, or what its environment answers."""
        return self.to(len(self.ends) - 1)

    @property
    def branches(self) -> list[Branch]:
        """The ways to all turns that none follows, in their order."""
        if not self.forks:
            return [self.last]
        follows = dict(self.forks)
        followed = {follows.get(turn, turn - 1) for turn in range(len(self.ends))}
        return [self.to(turn) for turn in range(len(self.ends)) if turn not in followed]

    @property
    def trained(self) -> list[tuple[Branch, np.ndarray]]:
        """All branches, with the tokens that no earlier one has, as bool values."""
        trained = []
        seen_N = np.zeros(self.ends[-1] if self.ends else 0, np.bool_)
        for branch in self.branches:
            trained.append((branch, ~branch.of(seen_N)))
            for start, end in branch.spans:
                seen_N[start:end] = True
        return trained
