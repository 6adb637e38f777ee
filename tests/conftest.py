"""What holds for every test: how they are shared out, who ends what they start, one thread, and the tiers."""

from __future__ import annotations

import gc
import os
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of runs: many are beside each other, each with small tensors
# Before torch is imported. Threads that spin while they wait take cores from the tests beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

import bapo_megatron.policy  # noqa: F401  # before megatron-core, which may want triton
from tests.support.coroutines import run_coroutine
from tests.support.guardian import guard_session
from tests.support.scheduling import make_scheduler, place_of, workers
from tests.support.second_try import keep_exit_code

gc.disable()  # until the tests are imported
settings.register_profile("suite", deadline=None)  # machines are as slow as they are
settings.load_profile("suite")

# A fork of a process that has threads of OpenMP waits for ever when it wants its own; tests fork ranks.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Before the first worker starts: what they start is known by what they inherit from here."""
    guard_session()
    keep_exit_code(config, None)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """For ``make test-again``."""
    keep_exit_code(session.config, int(exitstatus))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Of ``-n auto`` and ``-n logical``."""
    return workers(config.option.numprocesses)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """Under ``--dist loadscope``. The process that deals tests out collects none."""
    gc.enable()
    return make_scheduler(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest groups come first. It sees all tests: those of the other tier are deselected later."""
    items.sort(key=lambda item: place_of(item.nodeid))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A coroutine needs a loop; None: as pytest calls a function."""
    return run_coroutine(pyfuncitem) or None


def pytest_collection_finish() -> None:
    """What was imported stays: to look for garbage in it took 3 s of a core, most of it at the end."""
    gc.freeze()
    gc.enable()
