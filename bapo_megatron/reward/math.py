r"""Math reward: whether the last ``\boxed{}`` of a response equals the ground truth (math-verify).

``answer_is_right(ground_truth, response)`` returns the verdict; an answer that cannot be compared is wrong.
Plain integers are compared directly, most other answers by math-verify: in the main thread of a reward worker
(math_verify_compare.py), or, for preflight checks and ``bapo data prepare``, in a child process
(``MathVerifyProcess``).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from functools import cache, lru_cache, partial

from bapo_megatron.reward.answer_text import (
    base_of,
    brackets,
    final_answer,
    has_numbers_side_by_side,
    last_boxed,
    moduli,
    named_operations,
    spelled,
    unstyled,
)
from bapo_megatron.runtime.child_process import AnsweringChild, ChildError, with_import_path
from bapo_megatron.workers.process import START_LIMIT_S

COMMAND = (sys.executable, "-m", "bapo_megatron.reward.worker")
"""Worker program of rewards, which also compares answers."""

TIME_LIMIT_S = 120.0
"""Clock limit in seconds for one comparison, after which the child is killed. Long, since a machine may be
busy: the child's own CPU time limit ``worker.COMPARISON_CPU_LIMIT_S`` ends endless comparisons."""

Equal = Callable[[str, str, bool], bool]
"""Equality of a ground truth and an answer; the last argument allows unevaluated operations."""

INTEGER = re.compile(r"[+-]?[0-9]{1,100}")

_STANDS_FOR_NOTHING = frozenset(
    (
        *("proof", "nan", "null", "n/a", "na", "nil", "unknown", "todo", "tbd", "fixme", "unk"),
        *("noanswer", "{}", "[]", "()", r"\{\}"),
    )
)
"""Placeholders for missing ground truths in datasets (NuminaMath has the first), without spaces. math-verify
reads them as products of letters, which a policy would learn to write."""
_POINTS_ELSEWHERE = re.compile(
    r"(?:see|referto)(?:the)?(?:solution|proof|explanation|figure|image|picture|above|below)"
    r"|not_?(?:found|available|provided|given)"
)
"""Remark instead of a ground truth, without spaces; NuminaMath has ``notfound``."""

_LOST_BACKSLASH = re.compile(
    r"[\x07\x08\x0b\x0c]|\t(?=ext|imes|heta|au|frac|riangle|binom|an(?![a-z])|o(?![a-z]))"
    r"|\r(?=ight|ho|angle|m(?![a-z]))|\n(?=eq(?![a-z])|abla|otin)"
)
r"""A control character instead of a command's backslash and first letter: the form feed of ``\frac``."""

_PROGRAM = re.compile(
    r"^[^\S\n]*(?:def \w+\s*\(|class \w+\s*[:(]|import \w|from [\w.]+ import |assert )"
    r"|\A\s*(?:\[\s*\{|\{\s*[\"'])",
    re.MULTILINE,
)
"""Python code or a list of objects, in which math-verify may read letters."""

MAX_ANSWER_CHARACTERS = 1000
"""Maximum answer length in characters; a longer answer is wrong, since parsing time grows superlinearly."""


def answer_is_right(
    ground_truth: str, response: str, equal: Equal | None = None, allow_operations: bool = False
) -> bool:
    """Whether the last box after the thinking part equals the ground truth. Never raises because of a
    response. ``equal`` and ``allow_operations`` as in ``answers_equal``."""
    answer = final_answer(response)
    return answer is not None and answers_equal(ground_truth, answer, equal, allow_operations)


def check_ground_truth(ground_truth: str) -> str | None:
    """Return the error of a ground truth that no response could match, or None."""
    answer = _bare(ground_truth)
    if INTEGER.fullmatch(answer):
        return None
    said = unstyled(answer).lower()
    if said in _STANDS_FOR_NOTHING or _POINTS_ELSEWHERE.fullmatch(said) or ground_truth.strip() == "None":
        return f"{ground_truth!r} stands for no answer; leave the row out"
    if _LOST_BACKSLASH.search(ground_truth):
        return f"a LaTeX command of {ground_truth!r} lost its backslash; mend it or leave the row out"
    if _PROGRAM.search(ground_truth):
        return f"{ground_truth[:80]!r} is a program or data; for tests of a program: docs/rewards.md#programs"
    if ground_truth.lstrip().startswith("['"):
        return f"{ground_truth[:80]!r} is a list of answers, which math-verify reads as an interval; give one"
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return f"it has {len(answer)} characters; an answer may have {MAX_ANSWER_CHARACTERS}"
    if has_numbers_side_by_side(answer):
        return f"{ground_truth!r} has numbers side by side, which would be multiplied; put commas between"
    if not _math_verify().ask("parses", answer):
        return f"math-verify cannot read {ground_truth!r} as mathematics; mend it or leave the row out"
    return None


@lru_cache(maxsize=1 << 16)
def answers_equal(
    ground_truth: str, answer: str, equal: Equal | None = None, allow_operations: bool = False
) -> bool:
    """Whether ground truth and answer are mathematically equal. Cached: a group's responses repeat answers.
    ``equal`` compares all but plain integers; None: in a child process. Without
    ``allow_operations``, an answer with an unevaluated operation that the ground truth lacks is wrong."""
    if not answer.strip() or len(answer) > MAX_ANSWER_CHARACTERS:
        return False
    expected, spelling = _bare(ground_truth), spelled(answer)
    if INTEGER.fullmatch(expected) and INTEGER.fullmatch(spelling):
        return int(expected) == int(spelling)
    if not allow_operations and not named_operations(spelling) <= named_operations(expected):
        return False
    if {brackets(expected), brackets(spelling)} == {"{", "("}:  # a set is neither a point nor an interval
        return False
    for named in (base_of, moduli):  # math-verify ignores both
        name, other = named(expected), named(spelling)
        if name and other and name != other:
            return False
    return (equal or partial(_math_verify().ask, "equal"))(expected, spelling, allow_operations)


def is_operation(ground_truth: str) -> bool:
    """Whether a ground truth is an unevaluated operation, so that an answer may be one, too."""
    answer = _bare(ground_truth)
    return not INTEGER.fullmatch(answer) and _math_verify().ask("is_operation", answer)


def _bare(ground_truth: str) -> str:
    r"""Return the ground truth without an enclosing ``\boxed{}``, as ``spelled``."""
    boxed = last_boxed(ground_truth)
    return spelled(ground_truth if boxed is None else boxed)


class MathVerifyProcess:
    """Client of a child process that compares answers: ``ask`` calls a function there, and returns False if
    the child dies or takes too long. The child is started by the first call, and again after a failure or in
    a fork; raises ChildError if it does not start. For one thread at a time."""

    def __init__(self) -> None:
        self._child: AnsweringChild | None = None
        self._owner = os.getpid()

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def ask(self, function: str, *arguments: str | bool) -> bool:
        """Call a function of ``math_verify_compare.py`` in the child and return its answer."""
        if self._child is None or self._owner != os.getpid():  # a fork must not share the pipes
            self._owner = os.getpid()
            self._child = AnsweringChild(COMMAND, with_import_path(os.environ))
            try:
                self._child.ask(None, START_LIMIT_S)  # no settings: compares, scores nothing
            except BaseException:
                self.close()
                raise
        try:
            call = {"id": 0, "function": function, "question": arguments}
            return bool(self._child.ask(call, TIME_LIMIT_S)["answer"])
        except ChildError:
            self.close()
            return False


@cache
def _math_verify() -> MathVerifyProcess:
    return MathVerifyProcess()
