"""Decontamination: finds training questions that are evaluation problems, by overlap of word n-grams.

A training question is contaminated by an evaluation problem if at least ``share`` of the problem's n-grams of
words are in it. N-grams that ``COMMON`` or more of the problems share do not count: contest problems end
alike ("where m and n are relatively prime positive integers, find m + n"), and so do hundreds of training
questions. N-grams of many training questions, a template, do not count either: problems of a template differ
in a few numbers and names, and sharing one of these is no contamination; of a problem that is a template in
part (``TEMPLATED``) the question must have at least 0.8 of the rest. A question that holds a whole problem is
contaminated, however many do.

A problem with fewer than ``OWN`` n-grams that count ("7 + 9 =") has no reliable share: it must be equal in
normal form, except for the order of a sum or a product. Used by ``filters.py`` and ``command.py``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from bapo_megatron.data.prepare.normal_form import commuted_key, key, ngrams, tokens, words

COMMON = 3
"""N-grams in so many evaluation problems or more do not count."""

TEMPLATE, TEMPLATE_SHARE = 20, 0.01
"""N-grams in so many training questions, and in such a share of them, are a template: they do not count."""

TEMPLATED, TEMPLATED_LEAST = 0.25, 0.8
"""Templates: the share of template n-grams from which a problem counts as one, and the share of its other
n-grams that is then a match."""

OWN = 4
"""Least n-grams of a problem that its share is computed from."""


@dataclass(frozen=True)
class EvaluationProblem:
    """A problem of an evaluation set, which must not be trained on: its set, row and question.

    Made by ``command.py`` from the sets of `--against`.
    """

    suite: str
    row: int
    question: str


@dataclass(frozen=True)
class Match:
    """Contamination match: the evaluation problem that a question overlaps with most.

    ``Contamination.match`` gives it; the filter makes it the reason why a row is dropped.
    """

    problem: EvaluationProblem
    share: float
    """Share of the problem's n-grams that the question has; 1 for an equal normal form."""


class Contamination:
    """An n-gram index of evaluation problems, used in two passes over the training questions.

    First ``show`` for each distinct question, then ``settle`` once, then ``match`` for each question. Made by
    ``command.py`` if there are evaluation sets.
    """

    def __init__(self, problems: Iterable[EvaluationProblem], size: int, share: float) -> None:
        """``size`` words make an n-gram; ``share``, in (0, 1], is how much of a problem is too much."""
        self._size, self._share = size, share
        distinct: dict[bytes, EvaluationProblem] = {}
        for problem in problems:
            distinct.setdefault(key(problem.question), problem)
        self._problems = list(distinct.values())
        self._equal: dict[bytes, int] = {}
        for number, problem in enumerate(self._problems):
            self._equal.setdefault(commuted_key(problem.question), number)
        having: defaultdict[str, list[int]] = defaultdict(list)
        for number, problem in enumerate(self._problems):
            for gram in ngrams(words(problem.question), size):
                having[gram].append(number)
        self._having = {gram: numbers for gram, numbers in having.items() if len(numbers) < COMMON}
        self._counts = Counter(number for numbers in self._having.values() for number in numbers)
        self._least = dict.fromkeys(self._counts, share)
        self._questions, self._trained = 0, Counter[str]()
        self._templates: dict[str, list[int]] = {}
        self._texts: dict[int, str] = {}
        """The normal forms of problems that have an n-gram of a template."""

    def show(self, question: str) -> None:
        """First pass: count the n-grams of a training question; each distinct one once, before ``settle``."""
        self._questions += 1
        self._trained.update(gram for gram in ngrams(words(question), self._size) if gram in self._having)

    def settle(self) -> None:
        """End of the first pass: remove the n-grams of templates from the index."""
        least = max(TEMPLATE, TEMPLATE_SHARE * self._questions)
        having, whole = self._having, self._counts
        self._having = {gram: found for gram, found in having.items() if self._trained[gram] < least}
        self._templates = {gram: found for gram, found in having.items() if gram not in self._having}
        for number in {number for found in self._templates.values() for number in found}:
            if whole[number] >= OWN:
                self._texts[number] = _text(self._problems[number].question)
        self._counts = Counter(number for numbers in self._having.values() for number in numbers)
        for number, count in self._counts.items():
            if count <= (1 - TEMPLATED) * whole[number]:
                self._least[number] = max(self._share, TEMPLATED_LEAST)

    def match(self, question: str) -> Match | None:
        """Second pass: the evaluation problem with the largest share of n-grams in the question, or None."""
        equal = self._equal.get(commuted_key(question))
        if equal is not None:
            return Match(self._problems[equal], 1.0)
        hits: Counter[int] = Counter()
        templated: set[int] = set()
        for gram in ngrams(words(question), self._size):
            hits.update(self._having.get(gram, ()))
            templated.update(self._templates.get(gram, ()))
        text = _text(question) if templated else ""
        for number in sorted(templated & self._texts.keys()):
            if self._texts[number] in text:
                return Match(self._problems[number], 1.0)
        shares = [(count / self._counts[number], -number) for number, count in hits.items() if count >= OWN]
        enough = [(found, number) for found, number in shares if found >= self._least[-number]]
        best, number = max(enough, default=(0.0, 0))
        return Match(self._problems[-number], best) if enough else None


def _text(question: str) -> str:
    """The normal form as a text in which others are looked for, token by token."""
    return f" {' '.join(tokens(question))} "
