"""Parameters of which a few run in ``make test``, and files without slow tests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.tiers import check_slow_files, is_passed_over, slow_but


def test_all_cases_are_there_and_few_are_quick() -> None:
    found = slow_but([1, (2, "b"), 3], 3)
    assert found[2] == 3
    assert [one.values for one in found[:2]] == [(1,), (2, "b")]
    assert [[mark.name for mark in one.marks] for one in found[:2]] == [["slow"], ["slow"]]


def test_a_case_that_is_none_is_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"\['d'\] are none of"):
        slow_but(["a", "b"], "a", "d")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A test file without slow tests."""
    path = tmp_path / "test_a.py"
    path.write_text("def test_a(): ...\n")
    return path


def test_the_slow_tier_passes_over_files_without_slow_tests(plain: Path) -> None:
    folders = [str(plain.parent)]
    assert is_passed_over(plain, "slow", folders)
    assert not is_passed_over(plain, "not slow", folders)
    assert not is_passed_over(plain, "slow", [f"{plain}::test_a"])
    assert not is_passed_over(plain.with_name("conftest.py"), "slow", folders)
    slow = plain.with_name("test_b.py")
    slow.write_text("import pytest\n\npytestmark = pytest.mark.slow\n")
    assert not is_passed_over(slow, "slow", folders)


def test_a_fixture_may_make_tests_slow(plain: Path) -> None:
    plain.with_name("conftest.py").write_text("VERSIONS = slow_but([1, 2], 1)\n")
    assert not is_passed_over(plain, "slow", [str(plain.parent)])


def test_a_slow_test_that_would_be_passed_over_is_refused(plain: Path) -> None:
    """For example one whose mark comes from a module that it imports."""

    def item(slow: bool) -> Any:
        return SimpleNamespace(path=plain, get_closest_marker=lambda name: name == "slow" and slow)

    check_slow_files([item(False)])
    with pytest.raises(pytest.UsageError, match=r"test_a\.py: slow tests, whose mark is in neither"):
        check_slow_files([item(False), item(True)])
