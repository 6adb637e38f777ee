"""Parameters of which a few run in ``make test``."""

from __future__ import annotations

import pytest

from tests.support.tiers import slow_but


def test_all_cases_are_there_and_few_are_quick() -> None:
    found = slow_but([1, (2, "b"), 3], 3)
    assert found[2] == 3
    assert [one.values for one in found[:2]] == [(1,), (2, "b")]
    assert [[mark.name for mark in one.marks] for one in found[:2]] == [["slow"], ["slow"]]


def test_a_case_that_is_none_is_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"\['d'\] are none of"):
        slow_but(["a", "b"], "a", "d")
