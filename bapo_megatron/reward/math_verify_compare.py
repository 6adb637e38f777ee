"""Equality of mathematical answers by math-verify, for the main thread of a worker process.

math-verify limits its time with signals: call this in the main thread of a process that may be lost. A long
operation on big integers (``9^{9^{9}}``, which a policy will write sooner or later) holds even those up.
"""

from __future__ import annotations

import logging
from typing import Any

SIGNAL_LIMIT_S = 2
"""math-verify's own limit, in seconds, on one parse or comparison."""


def import_math_verify() -> None:
    """Import math-verify now, and keep it from logging every answer that it cannot read."""
    import math_verify  # noqa: F401  # half a second, and only children need it

    logging.disable(logging.CRITICAL)


def equal(ground_truth: str, answer: str) -> bool:
    """Whether the answer means the same; False if that cannot be found out."""
    from math_verify import verify

    try:
        return bool(verify(_parse(ground_truth), _parse(answer), timeout_seconds=SIGNAL_LIMIT_S))
    except Exception:  # sympy raises all kinds on nonsense, RecursionError and MemoryError too
        return False


def parses(ground_truth: str) -> bool:
    """Whether math-verify reads it as mathematics."""
    try:
        return any(not isinstance(part, str) for part in _parse(ground_truth))
    except Exception:  # as above
        return False


def _parse(answer: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    config = [LatexExtractionConfig(boxed_match_priority=0)]
    parts: list[Any] = parse(rf"\boxed{{{answer}}}", config, parsing_timeout=SIGNAL_LIMIT_S)
    return parts
