"""A second try covers exactly the tests that failed, and only where all others have run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.second_try import MOST, failed_tests

TESTS = """
from pathlib import Path

def test_good(): pass

def test_bad(): assert False

def test_once():
    mark = Path(__file__).with_name("seen")
    seen = mark.exists()
    mark.touch()
    assert seen
"""

HOOKS = """
from tests.support.second_try import forget_exit_code, keep_exit_code

def pytest_configure(config): forget_exit_code(config)

def pytest_sessionfinish(session, exitstatus): keep_exit_code(session.config, exitstatus)
"""


def cache_of(folder: Path, *flags: str) -> Path:
    """The cache after a session of its own over the tests above."""
    (folder / "conftest.py").write_text(HOOKS)
    (folder / "test_some.py").write_text(TESTS)
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", folder, "-c", "/dev/null", folder, *flags]
    subprocess.run([*command, "-o", f"cache_dir={folder}/cache"], cwd=root, check=False, capture_output=True)
    return folder / "cache/v"


def made_cache(folder: Path, code: int | None, failed: int) -> Path:
    for name, value in {
        "session/exit_code": code,
        "cache/lastfailed": {f"test_{i}": True for i in range(failed)},
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_failed_tests_of_a_session_are_known(tmp_path: Path, workers: str) -> None:
    names = failed_tests(cache_of(tmp_path, "-n", workers))
    assert sorted(name.split("::")[-1] for name in names) == ["test_bad", "test_once"]


def test_a_session_that_was_interrupted_has_no_second_try(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_stop(): raise KeyboardInterrupt")
    cache = cache_of(tmp_path)
    with pytest.raises(SystemExit, match="ended with 2, not with failed tests"):
        failed_tests(cache)


def test_a_session_that_was_killed_has_no_second_try(tmp_path: Path) -> None:
    """Failures of an earlier one are in the cache, and no exit code."""
    with pytest.raises(SystemExit, match="ended with None, not with failed tests"):
        failed_tests(made_cache(tmp_path, None, 1))


def test_many_failures_are_no_fault_of_the_load(tmp_path: Path) -> None:
    assert len(failed_tests(made_cache(tmp_path, 1, MOST))) == MOST
    with pytest.raises(SystemExit, match=f"{MOST + 1} tests failed, at most {MOST} are"):
        failed_tests(made_cache(tmp_path, 1, MOST + 1))
