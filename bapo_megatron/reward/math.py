r"""The math reward: is the last ``\boxed{}`` of the response the ground truth?"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, lru_cache

from bapo_megatron.reward.math_verify_process import MathVerifyProcess

Equal = Callable[[str, str], bool]
"""Whether an answer means the same as a ground truth."""

INTEGER = re.compile(r"[+-]?[0-9]{1,100}")

BRACES = re.compile(r"\\{1,2}boxed\s{0,9}\{|\\.|[{}]", re.DOTALL)
r"""``\boxed{`` (some double the backslash), an escaped character (its brace does not count), or a brace."""

MAX_ANSWER_CHARACTERS = 1000
"""A longer box is wrong without being read: parsing time grows faster than length."""


def answer_is_right(ground_truth: str, response: str, equal: Equal | None = None) -> bool:
    """Whether the last box of the response is the ground truth, as math-verify sees it. No response makes it
    raise. ``equal`` as for ``answers_equal``."""
    answer = last_boxed(response)
    return answer is not None and answers_equal(ground_truth, answer, equal)


def check_ground_truth(ground_truth: str) -> str | None:
    """What is wrong with a ground truth that no response could match, or None."""
    answer = _bare(ground_truth)
    if INTEGER.fullmatch(answer):
        return None
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return f"it has {len(answer)} characters; an answer may have {MAX_ANSWER_CHARACTERS}"
    if not _math_verify().parses(answer):
        return f"math-verify cannot read {ground_truth!r} as mathematics; mend it or leave the row out"
    return None


def last_boxed(response: str) -> str | None:
    r"""What stands in the last ``\boxed{...}`` whose braces close, or None. One pass: policies write long."""
    open_braces: list[tuple[int, bool]] = []  # where the inside begins, and whether it is a box
    last: tuple[int, int] | None = None
    for token in BRACES.finditer(response):
        if token.group().endswith("{") and token.group() != r"\{":
            open_braces.append((token.end(), len(token.group()) > 1))
        elif token.group() == "}" and open_braces:
            start, is_box = open_braces.pop()
            if is_box and (last is None or start > last[0]):
                last = (start, token.start())
    return None if last is None else response[last[0] : last[1]].strip()


@lru_cache(maxsize=1 << 16)
def answers_equal(ground_truth: str, answer: str, equal: Equal | None = None) -> bool:
    """Whether both mean the same. Cached: the responses of a group repeat each other.

    ``equal`` compares what is not plain integers; None: a child of this process, from any thread.
    """
    expected, given = _bare(ground_truth), answer.strip()
    if not given or len(given) > MAX_ANSWER_CHARACTERS:
        return False
    if INTEGER.fullmatch(expected) and INTEGER.fullmatch(given):
        return int(expected) == int(given)
    return (equal or _math_verify().equal)(expected, given)


def _bare(ground_truth: str) -> str:
    r"""The ground truth without the ``\boxed{}`` that it may come with."""
    boxed = last_boxed(ground_truth)
    return ground_truth.strip() if boxed is None else boxed


@cache
def _math_verify() -> MathVerifyProcess:
    return MathVerifyProcess()
