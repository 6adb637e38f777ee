"""math-verify comparison of answers, for the main thread of a worker process that may be killed.

Time is limited by a signal, which needs the main thread: of CPU time, in place of math-verify's own limit,
which is on a clock and so calls right answers wrong where the machine is busy. A long operation on big
integers (``9^{9^{9}}``, which a policy will write sooner or later) blocks even the signal.

Two answers of one text are equal, whether or not math-verify can read it. An equality by math-verify is
checked again (answer_values.py), unless one was read as plain text: it would also accept an unevaluated
operation, and small numbers that differ little. Used by ``functions.py`` and ``worker.py``.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

from bapo_megatron.reward.answer_text import has_quotient, named_operations, number_sides, same_text
from bapo_megatron.reward.cpu_time import OutOfTime, cpu_limit

CPU_LIMIT_S = 2
"""CPU time limit, in seconds, of one parse or comparison. Most answers need less than 0.1 s."""


def import_math_verify() -> None:
    """Import math-verify, and silence its log of unreadable answers."""
    import math_verify  # noqa: F401  # half a second, and only children need it

    import bapo_megatron.reward.answer_values  # noqa: F401

    logging.disable(logging.CRITICAL)


def equal(ground_truth: str, answer: str, allow_operations: bool = False) -> bool:
    """Equality of ground truth and answer; False if it cannot be decided.

    An unevaluated operation is no answer, unless the ground truth has one of its kind, or with
    ``allow_operations``.
    """
    from math_verify import verify

    if same_text(ground_truth, answer):  # math-verify may not be able to read it
        return True
    try:
        expected, given = _parse(ground_truth), _parse(answer)
        with cpu_limit(CPU_LIMIT_S):
            if not verify(expected, given, timeout_seconds=None):
                return False
        with cpu_limit(CPU_LIMIT_S):
            return _is_an_answer(expected, given, ground_truth, answer, allow_operations)
    except (Exception, OutOfTime):  # sympy raises all kinds on nonsense, RecursionError and MemoryError too
        return False


def _is_an_answer(
    expected: list[Any], given: list[Any], ground_truth: str, answer: str, allow_operations: bool
) -> bool:
    from bapo_megatron.reward import answer_values as values

    truth, said = expected[0], given[0]
    if isinstance(truth, str) or isinstance(said, str):
        return True  # equal as text
    if values.differ(truth, said) or _contradicts_itself(answer):
        return False
    if allow_operations:
        return True
    if values.are_rearranged(truth, said):  # an equation has as many forms as a formula
        return values.operations(said) - {values.ARITHMETIC} <= values.operations(truth)
    known, used = values.operations(truth), set(values.operations(said))
    if not values.is_symbolic(truth):
        whole = values.are_integers(truth) and not has_quotient(ground_truth)
        if (whole and has_quotient(answer)) or values.hides_rational(truth, said):
            used.add(values.ARITHMETIC)
        return used <= known
    return used - {values.ARITHMETIC} <= known


def _contradicts_itself(answer: str) -> bool:
    """Whether an equation has two different numbers: ``6 = 5``."""
    from bapo_megatron.reward.answer_values import disagree

    for sides in number_sides(answer):
        numbers = [_parse_unlimited(side)[0] for side in sides] if len(sides) > 1 else []
        if any(disagree(one, other) for one, other in pairwise(numbers)):
            return True
    return False


def is_operation(ground_truth: str) -> bool:
    """Whether a ground truth is itself an unevaluated operation."""
    from bapo_megatron.reward.answer_values import operations

    try:
        parsed = _parse(ground_truth)[0]
        return bool(named_operations(ground_truth) or (not isinstance(parsed, str) and operations(parsed)))
    except (Exception, OutOfTime):  # as above
        return False


def parses(ground_truth: str) -> bool:
    """Whether math-verify can parse the ground truth."""
    try:
        return any(not isinstance(part, str) for part in _parse(ground_truth))
    except (Exception, OutOfTime):  # as above
        return False


def _parse(answer: str) -> list[Any]:
    with cpu_limit(CPU_LIMIT_S):
        return _parse_unlimited(answer)


def _parse_unlimited(answer: str) -> list[Any]:
    """As ``_parse``, for a caller that has a limit: limits do not nest."""
    from math_verify import LatexExtractionConfig, parse

    config = [LatexExtractionConfig(boxed_match_priority=0)]
    parts: list[Any] = parse(rf"\boxed{{{answer}}}", config, parsing_timeout=None)
    return parts
