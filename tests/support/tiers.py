"""The tiers of tests that vary one thing: a few of its values in ``make test``, all in ``make test-slow``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Parameters for ``pytest.mark.parametrize``: all of ``cases``, those that are not ``quick`` as slow.

    A name in ``quick`` that no case has is a mistake.
    """
    cases = list(cases)
    if unknown := [value for value in quick if value not in cases]:
        raise ValueError(f"{unknown} are none of {cases}")
    return [case if case in quick else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    return pytest.param(*case if isinstance(case, tuple) else (case,), marks=pytest.mark.slow)
