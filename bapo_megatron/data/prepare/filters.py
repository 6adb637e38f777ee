"""Filters of dataset preparation: duplicates, contamination, difficulty, length, scorability.

A filter maps a ``Problem`` to the reason to drop it, or None to keep it, and raises RowError for an invalid
one. ``first_reason`` applies several in order; it returns the first that drops the problem, and why.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from bapo_megatron.data.prepare.normal_form import key, ngrams, words
from bapo_megatron.data.prepare.problems import Problem
from bapo_megatron.data.prompts import prompt_token_ids
from bapo_megatron.data.rows import RowError, difficulty_of
from bapo_megatron.reward.code_tests import is_tests
from bapo_megatron.reward.functions import extra_info_check, ground_truth_check
from bapo_megatron.reward.math import MAX_ANSWER_CHARACTERS

Filter = Callable[[Problem], str | None]
"""Returns the reason to drop a problem, or None. Raises RowError for an invalid row."""

_RUN = re.compile(r"(?<![\\\w])[A-Za-z]{2,}(?:[ ,]+[A-Za-z]{2,}){2,}(?!\w)")
_WORD = re.compile(r"[a-z]{3}")
"""Three words in a row, one with three lower-case letters: ``AB, BC, CA`` are segments."""
_TEXT = re.compile(r"\\(?:text|textbf|textit|mbox|mathrm|operatorname)\s*\{[^{}]*\}")

INVALID = "invalid"

COMMON = 3
"""N-grams in this many evaluation problems or more do not count."""

OWN = 4
"""Least n-grams of a problem for computing its share."""


class Duplicates:
    """Deduplication filter: of several prompts (all messages) with equal normal form the first is kept."""

    def __init__(self) -> None:
        self._kept: set[bytes] = set()

    def repeated(self, problem: Problem) -> str | None:
        """Return the reason to drop a prompt that was kept before, or None."""
        return "the question came before" if key(problem.conversation) in self._kept else None

    def keep(self, problem: Problem) -> None:
        """Note a prompt that no filter drops; of one that is dropped a later row may be kept."""
        self._kept.add(key(problem.conversation))


@dataclass(frozen=True)
class EvaluationProblem:
    """Problem of an evaluation set, which must not be trained on: its set, row and question."""

    suite: str
    row: int
    question: str


class Contamination:
    """Decontamination: an n-gram index of evaluation problems; ``overlap`` is the filter. ``match`` returns
    the problem that a question overlaps with most and the share of its n-grams (1 if equal), or None.

    An evaluation problem contaminates a training question that contains at least ``share`` of the problem's
    word n-grams. N-grams in ``COMMON`` or more problems do not count: contest problems, like hundreds of
    training questions, end alike ("where m and n are relatively prime positive integers, find m + n"). A
    problem with fewer than ``OWN`` counted n-grams ("7 + 9 =") has no reliable share: it must be equal in
    normal form.
    """

    def __init__(self, problems: Iterable[EvaluationProblem], size: int, share: float) -> None:
        """``size``: words per n-gram; ``share``, in (0, 1]: least contaminating share of a problem."""
        self._size, self._share = size, share
        self._equal: dict[bytes, EvaluationProblem] = {}
        for problem in problems:
            self._equal.setdefault(key(problem.question), problem)
        self._problems = list(self._equal.values())
        having: defaultdict[str, list[int]] = defaultdict(list)
        for number, problem in enumerate(self._problems):
            for gram in ngrams(words(problem.question), size):
                having[gram].append(number)
        self._having = {gram: numbers for gram, numbers in having.items() if len(numbers) < COMMON}
        self._counts = Counter(number for numbers in self._having.values() for number in numbers)

    def match(self, question: str) -> tuple[EvaluationProblem, float] | None:
        equal = self._equal.get(key(question))
        if equal is not None:
            return equal, 1.0
        hits: Counter[int] = Counter()
        for gram in ngrams(words(question), self._size):
            hits.update(self._having.get(gram, ()))
        shares = [(count / self._counts[number], -number) for number, count in hits.items() if count >= OWN]
        best, number = max(shares, default=(0.0, 0))
        return (self._problems[-number], best) if best >= self._share else None

    def overlap(self, problem: Problem) -> str | None:
        """Return the reason to drop a problem that an evaluation set contains, or None."""
        match = self.match(problem.dialogue)
        if match is None and len(problem.messages) > 1:
            match = self.match(problem.question)
        if match is None:
            return None
        problem_of_set, share = match
        return f"has {share:.0%} of {problem_of_set.suite}, row {problem_of_set.row}"


def difficulty_filter(path: str, least: float, most: float) -> Filter:
    """Return a filter that drops problems that are too easy, too hard, or of unknown difficulty."""

    def why(problem: Problem) -> str | None:
        value = difficulty_of(problem.extra_info, path)
        if value is None:
            return f"it has no {path}"
        return None if least <= value <= most else f"{path} is {value:g}"

    return why


def length_filter(tokenizer: Any, most: int, lengths: Counter[int]) -> Filter:
    """Return a filter that drops prompts of more than ``most`` tokens; ``lengths`` counts the others."""

    def why(problem: Problem) -> str | None:
        count = len(prompt_token_ids(problem.messages, tokenizer))
        if count > most:
            return f"its prompt has {count} tokens"
        lengths[count] += 1
        return None

    return why


def scorable(reward: str) -> Filter:
    """Return a filter that drops problems that the built-in reward cannot score (an answer that is not
    mathematics, invalid tests, no entry of a task). With a user's reward it drops none."""
    if (check_info := extra_info_check(reward)) is not None:
        return lambda problem: check_info(problem.extra_info)
    if (check := ground_truth_check(reward)) is None:
        return lambda _problem: None

    def why(problem: Problem) -> str | None:
        truth = problem.ground_truth
        if reward != "code" and not is_tests(truth) and (said := _sentence(truth[:MAX_ANSWER_CHARACTERS])):
            return (
                f"its answer has the words {said!r}, and math-verify would read letters: mend it, or "
                f"prepare the data for a reward of your own (--reward module:function)"
            )
        return check(truth)

    return why


def _sentence(answer: str) -> str | None:
    r"""Return three or more words in a row in an answer, or None. ``\text{...}`` counts as its text; names of
    LaTeX commands are not words."""
    while (outside := _TEXT.sub(" 0 ", answer)) != answer:
        answer = outside
    return next((run[0] for run in _RUN.finditer(answer) if _WORD.search(run[0])), None)


def first_reason(problem: Problem, filters: Iterable[tuple[str, Filter]]) -> tuple[str, str] | None:
    """Return name and reason of the first filter that drops ``problem``; None if all keep it."""
    for name, leaves_out in filters:
        try:
            if why := leaves_out(problem):
                return name, why
        except RowError as error:
            return INVALID, str(error)
    return None
