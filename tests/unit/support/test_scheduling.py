"""How tests are dealt out to workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.scheduling import WaitingApart, place_of, scope_of

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


def test_two_workers_take_everything() -> None:
    assert sorted(test for tests in dealt(SLURM + FILES, 2) for test in tests) == sorted(SLURM + FILES)
