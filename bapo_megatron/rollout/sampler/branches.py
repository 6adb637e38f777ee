"""Turn tree of an episode, and its branches: the token sequences on which the policy trains.

``Tree.of`` builds a tree from the turns' end positions and forks; ``Tree.trained`` returns its branches with
masks. An episode is a response with its environment's answers; its tokens are stored in chronological order.
Each turn follows the previous one unless a *fork* gives it another parent: an agent program rewrote its
history or holds several conversations. A path from the root to a leaf turn is a *branch*. Every sampled token
is trained on once, in the first branch that contains it; in later branches it is context. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

PROMPT = -1
"""Parent of a turn that directly follows the dataset's prompt."""
NOTHING = -2
"""Parent of a turn that begins with its own prompt."""
Fork = tuple[int, int]
"""Number of an environment's turn among all turns, from 0, and of its parent (or PROMPT or NOTHING)."""


class Branch(NamedTuple):
    """A path through an episode's turn tree from the root to a turn, as the positions of its tokens."""

    has_prompt: bool
    """Whether the dataset's prompt comes first; otherwise the tokens include the branch's own prompt."""
    spans: tuple[tuple[int, int], ...]
    """Start and end of each piece among the episode's tokens."""

    @property
    def tokens(self) -> int:
        """Number of tokens, excluding the dataset's prompt."""
        return sum(end - start for start, end in self.spans)

    def of(self, values_N: np.ndarray) -> np.ndarray:
        """Return the values of this branch's tokens, given ``values_N`` for all tokens of the episode."""
        if self.spans == ((0, len(values_N)),):
            return values_N
        return np.concatenate([values_N[:0], *(values_N[start:end] for start, end in self.spans)])


class Tree(NamedTuple):
    """An episode's turn tree: the end position of each turn, also of an unfinished last one, and the forks.
    ``to`` and the properties return branches, ``way`` the turn numbers of a path."""

    ends: tuple[int, ...]
    forks: tuple[Fork, ...]

    @classmethod
    def of(cls, ends: Sequence[int], forks: Sequence[Fork], tokens: int) -> Tree:
        """Return the tree of an episode with ``tokens`` tokens whose finished turns end at ``ends``."""
        unfinished = (tokens,) if tokens > (ends[-1] if ends else 0) else ()
        return cls((*ends, *unfinished), tuple(forks))

    def way(self, turn: int) -> tuple[int, list[int]]:
        """Return the root (PROMPT or NOTHING) and the turn numbers of the path to ``turn``, inclusive."""
        follows, turns = dict(self.forks), []
        while turn >= 0:
            turns.append(turn)
            turn = follows.get(turn, turn - 1)
        return turn, turns[::-1]

    def to(self, turn: int) -> Branch:
        """Return the branch from the root to the end of ``turn``."""
        root, turns = self.way(turn)
        spans: list[tuple[int, int]] = []
        for number in turns:
            start = self.ends[number - 1] if number else 0
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            spans.append((start, self.ends[number]))
        return Branch(root == PROMPT, tuple(spans))

    def lengths(self, prompt_tokens: int) -> dict[int, int]:
        """Return the tokens on the path to each turn, PROMPT and NOTHING, counting the dataset's prompt."""
        follows, lengths = dict(self.forks), {PROMPT: prompt_tokens, NOTHING: 0}
        for turn, (start, end) in enumerate(pairwise((0, *self.ends))):
            lengths[turn] = lengths[follows.get(turn, turn - 1)] + end - start
        return lengths

    @property
    def last(self) -> Branch:
        """The branch of the last turn, which is being sampled or awaits its environment's answer."""
        return self.to(len(self.ends) - 1)

    @property
    def branches(self) -> list[Branch]:
        """The branches of all leaf turns, in turn order."""
        if not self.forks:
            return [self.last]
        follows = dict(self.forks)
        followed = {follows.get(turn, turn - 1) for turn in range(len(self.ends))}
        return [self.to(turn) for turn in range(len(self.ends)) if turn not in followed]

    @property
    def trained(self) -> list[tuple[Branch, np.ndarray]]:
        """All branches, each with a bool mask of the tokens that no earlier branch contains."""
        trained = []
        seen_N = np.zeros(self.ends[-1] if self.ends else 0, np.bool_)
        for branch in self.branches:
            trained.append((branch, ~branch.of(seen_N)))
            for start, end in branch.spans:
                seen_N[start:end] = True
        return trained
