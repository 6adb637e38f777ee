"""Filters of dataset preparation: duplicates, contamination, difficulty, length, scorability.

A filter is a function that gives the reason why a row is dropped, or None. It sees only the rows that the
filters before it keep; RowError for an invalid row. ``command.py`` applies them. Used by ``card.py`` and
``command.py``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from bapo_megatron.data.prepare.contamination import Contamination
from bapo_megatron.data.prepare.normal_form import answer_text, key
from bapo_megatron.data.prepare.problems import Problem
from bapo_megatron.data.prompts import prompt_token_ids
from bapo_megatron.data.rows import RowError, difficulty_of
from bapo_megatron.reward.functions import extra_info_check, ground_truth_check

Filter = Callable[[Problem], str | None]
"""A filter: the reason why a problem is dropped, or None. RowError for an invalid row."""

_RUN = re.compile(r"(?<![\\\w])[A-Za-z]{2,}(?:[ ,]+[A-Za-z]{2,}){2,}(?!\w)")
_WORD = re.compile(r"[a-z]{3}")
"""Three words in a row, one of them with three lower-case letters: ``AB, BC, CA`` are segments."""
_TEXT = re.compile(r"\\(?:text|textbf|textit|mbox|mathrm|operatorname)\s*\{[^{}]*\}")

INVALID = "invalid"
"""The reason of invalid rows."""


class Duplicates:
    """Deduplication filter: of questions with equal normal form the first stays; none if answers differ.

    It sees every question in the first pass, and filters in the second. Tests of programs are not compared.
    Made by ``prepare`` in ``command.py``.
    """

    def __init__(self) -> None:
        self._answers: dict[bytes, bytes] = {}
        self._torn: set[bytes] = set()
        self._seen: set[bytes] = set()

    def show(self, problem: Problem) -> bool:
        """First pass: remember the question and its answer; whether the question is new."""
        question = key(problem.question)
        answer = b"tests" if problem.is_code else key(answer_text(problem.ground_truth))
        is_new = question not in self._answers
        if self._answers.setdefault(question, answer) != answer:
            self._torn.add(question)
        return is_new

    def conflict(self, problem: Problem) -> str | None:
        """Second pass: the reason to drop a question that another row answers differently, or None."""
        torn = key(problem.question) in self._torn
        return f"answered {problem.ground_truth!r} here and differently elsewhere" if torn else None

    def repeated(self, problem: Problem) -> str | None:
        """Second pass: the reason to drop a question that came before, or None."""
        question = key(problem.question)
        if question in self._seen:
            return "the question came before"
        self._seen.add(question)
        return None


def contamination_filter(index: Contamination) -> Filter:
    """Decontamination filter: drops questions of an evaluation set."""

    def why(problem: Problem) -> str | None:
        found = index.match(problem.question)
        if found is None:
            return None
        return f"has {found.share:.0%} of {found.problem.suite}, row {found.problem.row}"

    return why


def difficulty_filter(path: str, least: float, most: float) -> Filter:
    """Difficulty filter: drops problems that are too easy, too hard, or of unknown difficulty."""

    def why(problem: Problem) -> str | None:
        value = difficulty_of(problem.extra_info, path)
        if value is None:
            return f"it has no {path}"
        return None if least <= value <= most else f"{path} is {value:g}"

    return why


def length_filter(tokenizer: Any, most: int, lengths: Counter[int], too_long: Counter[int]) -> Filter:
    """Length filter: drops prompts of more than ``most`` tokens.

    ``too_long`` counts their lengths, ``lengths`` those of the others.
    """

    def why(problem: Problem) -> str | None:
        count = len(prompt_token_ids(problem.messages, tokenizer))
        if count > most:
            too_long[count] += 1
            return f"its prompt has {count} tokens"
        lengths[count] += 1
        return None

    return why


def scorable(reward: str) -> Filter:
    """Scorability filter: drops problems that the built-in reward function cannot score.

    Such as an answer that is no mathematics, invalid tests, or no entry of a task. For a user's function
    nothing is dropped.
    """
    if (check_info := extra_info_check(reward)) is not None:
        return lambda problem: check_info(problem.extra_info)
    check = ground_truth_check(reward)
    if check is None:
        return lambda _problem: None

    def why(problem: Problem) -> str | None:
        if reward != "code" and not problem.is_code and (words := _sentence(problem.ground_truth)):
            return (
                f"its answer has the words {words!r}, and math-verify would read letters: mend it, or "
                f"prepare the data for a reward of your own (--reward module:function)"
            )
        return check(problem.ground_truth)

    return why


def _sentence(answer: str) -> str | None:
    r"""Three or more words in a row in an answer; None if there are none. ``\text{...}`` counts as its text,
    and names of LaTeX commands are no words."""
    while (outside := _TEXT.sub(" 0 ", answer)) != answer:
        answer = outside
    return next((run[0] for run in _RUN.finditer(answer) if _WORD.search(run[0])), None)


class TypesOfExtraInfo:
    """Schema check: each key of ``extra_info`` must have one type in all rows, as Arrow needs it.

    It remembers the types of the rows so far. Made by ``command.py`` for the rows that it writes.
    """

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    def clash(self, info: dict[str, Any]) -> str | None:
        """Error of the first key whose type differs from that in earlier rows, or None."""
        for name, value in info.items():
            now = "number" if isinstance(value, (int, float)) else type(value).__name__
            if (before := self._found.setdefault(name, now)) != now:
                return f"extra_info.{name} is of type {now} here ({json.dumps(value)[:60]}), {before} before"
        return None


def first_reason(problem: Problem, filters: Iterable[tuple[str, Filter]]) -> tuple[str, str] | None:
    """Name and reason of the first filter that drops ``problem``; None if all keep it."""
    for name, leaves_out in filters:
        try:
            if why := leaves_out(problem):
                return name, why
        except RowError as error:
            return INVALID, str(error)
    return None
