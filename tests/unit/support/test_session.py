"""A test session: coroutines are run, failures may have a second try, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.guardian import unguarded
from tests.support.second_try import check_last_session
from tests.support.tiers import slow_but

ROOT = Path(__file__).parents[3]
DEADLINE_S = 300


@pytest.mark.parametrize("wait_s", [0.0, pytest.param(900.0, marks=pytest.mark.virtual_time)])
@pytest.mark.xfail(strict=True, raises=KeyError)
async def test_a_coroutine_is_run_to_its_end(wait_s: float, tmp_path: Path) -> None:
    await asyncio.sleep(wait_s)
    assert tmp_path.is_dir()
    raise KeyError("the end")


def test_few_cases_are_quick_and_one_that_is_none_is_a_mistake() -> None:
    found = slow_but([1, (2, "b"), 3], 3)
    assert found[2] == 3
    assert [one.values for one in found[:2]] == [(1,), (2, "b")]
    assert [[mark.name for mark in one.marks] for one in found[:2]] == [["slow"], ["slow"]]
    with pytest.raises(ValueError, match=r"\['d'\] are none of"):
        slow_but(["a", "b"], "a", "d")


HOOKS = """
from tests.support.second_try import keep_exit_code

def pytest_configure(config): keep_exit_code(config, None)

def pytest_sessionfinish(session, exitstatus): keep_exit_code(session.config, int(exitstatus))
"""


def test_only_a_session_that_ended_with_failures_has_a_second_try(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(HOOKS)
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", tmp_path, "-c", "/dev/null", tmp_path]
    command += ["-o", f"cache_dir={tmp_path}/cache"]
    for test, workers in (("raise KeyboardInterrupt", "0"), ("assert False", "2")):
        (tmp_path / "test_some.py").write_text(f"def test_some(): {test}")
        subprocess.run([*command, "-n", workers], cwd=ROOT, check=False, capture_output=True)
        if "Interrupt" in test:
            with pytest.raises(SystemExit, match="ended with 2, not with failed tests"):
                check_last_session(tmp_path / "cache/v")
    check_last_session(tmp_path / "cache/v")
    (tmp_path / "cache/v/cache/lastfailed").write_text(json.dumps({f"test_{n}": True for n in range(11)}))
    with pytest.raises(SystemExit, match="11 tests failed, and at most 10 are"):
        check_last_session(tmp_path / "cache/v")


SESSION = """
import subprocess, sys
from tests.support.guardian import guard_session, unguarded
guard_session()
for environment in (None, unguarded()):
    child = subprocess.Popen(["sleep", "3600"], env=environment, start_new_session=True)
    print(child.pid, flush=True)
sys.stdin.read()
"""


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_killed_session_leaves_nothing_but_what_it_has_let_go() -> None:
    """The children have sessions of their own."""
    command = [sys.executable, "-c", SESSION]
    with subprocess.Popen(command, cwd=ROOT, env=unguarded(), text=True, stdout=subprocess.PIPE) as session:
        assert session.stdout is not None
        guarded, let_go = (psutil.Process(int(session.stdout.readline())) for _ in range(2))
        assert not is_gone(guarded)
        os.kill(session.pid, signal.SIGKILL)
        deadline = time.monotonic() + DEADLINE_S
        while not is_gone(guarded):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert not is_gone(let_go)
        let_go.kill()
