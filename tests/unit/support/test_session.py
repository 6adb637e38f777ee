"""A test session: how tests are dealt out, which are slow, what is made once, a second try of failures."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.support import second_try
from tests.support.guardian import unguarded
from tests.support.once import made_once
from tests.support.scheduling import WaitingApart, place_of, scope_of
from tests.support.second_try import failed_tests
from tests.support.tiers import check_slow_files, is_passed_over, slow_but

SLURM = [f"tests/slurm/test_a.py::test_{number}" for number in range(8)]
FILES = [f"tests/unit/test_{number}.py::test_a" for number in range(8)]


@pytest.mark.parametrize(
    ("nodeid", "scope"),
    [
        ("tests/unit/algo/test_bapo_loss.py::test_a[1]", "tests/unit/algo/test_bapo_loss.py"),
        ("tests/contract/test_engine_contract.py::test_a[sglang-0.6]", "servers"),
        ("tests/contract/test_broadcast.py::test_a[qwen2]", "servers"),
        ("tests/contract/test_sent_digests.py::test_a[qwen3]", "servers"),
        ("tests/contract/test_released_memory.py::test_a", "servers"),
        ("tests/contract/test_engine_contract.py::test_a[local]", "tests/contract/test_engine_contract.py"),
        ("tests/contract/test_router.py::test_a", "tests/contract/test_router.py"),
        ("tests/e2e/test_runs.py::test_a[1]", "tests/e2e/test_runs.py::test_a[1]"),
        ("tests/te/test_layouts.py::test_a[2.11.0-cp2]", "te 2.11.0"),
        ("tests/te/test_choices.py::test_a[2.20.2]", "te 2.20.2"),
    ],
)
def test_what_shares_something_stays_together(nodeid: str, scope: str) -> None:
    assert scope_of(nodeid) == scope


def test_what_takes_longest_begins_first() -> None:
    names = ["tests/unit/a.py", "tests/contract/a.py", "tests/property/a.py", "tests/slurm/a.py"]
    assert sorted(names, key=place_of) == [names[3], names[1], names[0], names[2]]


class Worker:
    """A worker of xdist that notes what it is to run."""

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.given: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def dealt(tests: list[str], count: int) -> list[list[str]]:
    """What each of ``count`` workers has run when all of them were equally fast."""
    option = SimpleNamespace(loadscopereorder=False)
    config: Any = SimpleNamespace(getvalue=lambda _name: ["popen"] * count, option=option)
    scheduler = WaitingApart(config)
    workers: list[Any] = [Worker(number) for number in range(count)]
    for worker in workers:
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, tests)
    scheduler.schedule()
    done = [0] * count
    while any(done[number] < len(worker.given) for number, worker in enumerate(workers)):
        for number, worker in enumerate(workers):
            if done[number] < len(worker.given):
                scheduler.mark_test_complete(worker, worker.given[done[number]])
                done[number] += 1
    return [[tests[index] for index in worker.given] for worker in workers]


def test_the_last_two_workers_wait_and_the_others_do_not() -> None:
    *working, third, fourth = dealt(SLURM + FILES, 4)
    assert sorted(test for tests in working for test in tests) == FILES
    assert sorted(third + fourth) == SLURM


def test_nobody_is_idle_while_tests_are_left() -> None:
    shares = dealt(SLURM[:1] + FILES, 4)
    assert sorted(test for tests in shares for test in tests) == sorted(SLURM[:1] + FILES)
    assert all(shares)
    assert all(dealt(SLURM, 3))
    assert sorted(test for tests in dealt(SLURM + FILES, 2) for test in tests) == sorted(SLURM + FILES)


@pytest.mark.parametrize("wait_s", [0.0, pytest.param(900.0, marks=pytest.mark.virtual_time)])
@pytest.mark.xfail(strict=True, raises=KeyError)
async def test_a_coroutine_is_run_to_its_end(wait_s: float, tmp_path: Path) -> None:
    await asyncio.sleep(wait_s)
    assert tmp_path.is_dir()
    raise KeyError("the end")


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """That of a session without workers."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    return SimpleNamespace(getbasetemp=lambda: tmp_path)


def test_it_is_made_once(factory: Any) -> None:
    made: list[Path] = []
    first = made_once(factory, "a", made.append)
    assert made_once(factory, "a", made.append) == first
    assert made == [first]
    assert made_once(factory, "b", made.append) != first


def test_what_failed_is_made_anew(factory: Any) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("no disk")

    with pytest.raises(RuntimeError, match="no disk"):
        made_once(factory, "a", fail)
    folder = made_once(factory, "a", lambda folder: (folder / "whole").touch())
    assert [path.name for path in folder.iterdir()] == ["whole"]


def test_workers_share_it(factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's own folder lies in that of the session."""
    made: list[Path] = []
    alone = made_once(factory, "a", made.append)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw3")
    worker: Any = SimpleNamespace(getbasetemp=lambda: factory.getbasetemp() / "popen-gw3")
    assert made_once(worker, "a", made.append) == alone
    assert made == [alone]


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


@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_failed_tests_of_a_session_are_known(
    tmp_path: Path, workers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many are not a fault of the load."""
    cache = cache_of(tmp_path, "-n", workers)
    assert sorted(name.split("::")[-1] for name in failed_tests(cache)) == ["test_bad", "test_once"]
    monkeypatch.setattr(second_try, "MOST", 1)
    with pytest.raises(SystemExit, match="2 tests failed, at most 1 are"):
        failed_tests(cache)


def test_a_session_that_was_interrupted_has_no_second_try(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_stop(): raise KeyboardInterrupt")
    cache = cache_of(tmp_path)
    with pytest.raises(SystemExit, match="ended with 2, not with failed tests"):
        failed_tests(cache)


ROOT = Path(__file__).parents[3]
DEADLINE_S = 300
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


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, None])
def test_a_session_leaves_nothing_but_what_it_has_let_go(end: signal.Signals | None) -> None:
    """Killed, told to end, or at its own end. The children have sessions of their own."""
    command = [sys.executable, "-c", SESSION]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=unguarded(), text=True, **pipes) as session:
        assert session.stdout is not None
        guarded, let_go = (psutil.Process(int(session.stdout.readline())) for _ in range(2))
        assert not is_gone(guarded)
        if end is not None:
            os.kill(session.pid, end)
        assert session.stdin is not None
        session.stdin.close()
        deadline = time.monotonic() + DEADLINE_S
        while not is_gone(guarded):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert not is_gone(let_go)
        let_go.kill()
