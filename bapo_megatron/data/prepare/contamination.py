"""Decontamination: finds training questions that are evaluation problems, by overlap of word n-grams.

A training question is contaminated by an evaluation problem if at least ``share`` of the problem's n-grams of
words are in it. N-grams that ``COMMON`` or more of the problems share do not count: contest problems end
alike ("where m and n are relatively prime positive integers, find m + n"), and hundreds of honest ones too.
A share rests on ``OWN`` n-grams or more: of a short problem ("7 + 9 =") a template alone would be half. A
problem with fewer n-grams of its own must be equal in normal form.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from bapo_megatron.data.prepare.normal_form import key, ngrams, words

COMMON = 3
"""N-grams of so many problems or more do not count."""

OWN = 4
"""So many n-grams of one problem a question must have before their share counts."""


@dataclass(frozen=True)
class EvaluationProblem:
    """A problem of an evaluation set, which must not be trained on."""

    suite: str
    row: int
    question: str


@dataclass(frozen=True)
class Match:
    """A contamination match: the evaluation problem that a question is most like."""

    problem: EvaluationProblem
    share: float
    """Share of the problem's n-grams that the question has; 1 for an equal normal form."""


class Contamination:
    """An n-gram index of evaluation problems."""

    def __init__(self, problems: Iterable[EvaluationProblem], size: int, share: float) -> None:
        """``size`` words make an n-gram; ``share``, in (0, 1], is how much of a problem is too much."""
        self._size, self._share = size, share
        distinct: dict[bytes, EvaluationProblem] = {}
        for problem in problems:
            distinct.setdefault(key(problem.question), problem)
        self._problems = list(distinct.values())
        self._equal = {question: number for number, question in enumerate(distinct)}
        having: defaultdict[str, list[int]] = defaultdict(list)
        for number, problem in enumerate(self._problems):
            for gram in ngrams(words(problem.question), size):
                having[gram].append(number)
        self._having = {gram: numbers for gram, numbers in having.items() if len(numbers) < COMMON}
        self._counts = Counter(number for numbers in self._having.values() for number in numbers)

    def match(self, question: str) -> Match | None:
        """The problem that contaminates the question, the one with the largest share; None if none does."""
        equal = self._equal.get(key(question))
        if equal is not None:
            return Match(self._problems[equal], 1.0)
        hits: Counter[int] = Counter()
        for gram in ngrams(words(question), self._size):
            hits.update(self._having.get(gram, ()))
        shares = [(count / self._counts[number], -number) for number, count in hits.items() if count >= OWN]
        best, number = max(shares, default=(0.0, 0))
        return Match(self._problems[-number], best) if best >= self._share else None
