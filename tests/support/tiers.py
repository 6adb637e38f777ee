"""The tiers of tests that vary one thing: a few of its values in ``make test``, all in ``make test-slow``.

And the files that ``make test-slow`` need not import: each worker would take ten seconds for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
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


def is_passed_over(path: Path, expression: str, arguments: Iterable[str]) -> bool:
    """Whether a test file is not collected: under ``-m slow``, of whole folders, if it has no slow tests."""
    if expression != "slow" or path.suffix != ".py" or not path.name.startswith("test_"):
        return False
    return all(Path(one).is_dir() for one in arguments) and not may_be_slow(path)


@cache
def may_be_slow(path: Path) -> bool:
    """Whether a test file, or the conftest.py beside it, has the word: no slow test can be without it."""
    return any("slow" in one.read_text() for one in (path, path.with_name("conftest.py")) if one.exists())


def check_slow_files(items: Iterable[pytest.Item]) -> None:
    """UsageError for a slow test of a file that is passed over. ``items``: of both tiers."""
    wrong = {item.path for item in items if item.get_closest_marker("slow") and not may_be_slow(item.path)}
    if wrong:
        raise pytest.UsageError(
            f"{', '.join(map(str, sorted(wrong)))}: slow tests, whose mark is in neither the file nor the "
            "conftest.py beside it, so that make test-slow would not find them: mark them in the file"
        )
