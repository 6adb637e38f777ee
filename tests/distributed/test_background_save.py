"""Processes that write a checkpoint, and are killed while they do."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from bapo_megatron.config import ParallelConfig
from bapo_megatron.policy import background_save
from bapo_megatron.policy.background_save import BackgroundSave
from bapo_megatron.runtime.guards import OutOfMemoryError
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed


def _write(pids: Path) -> None:
    """As megatron: a fork of the writer writes, the writer waits for its word."""
    context = multiprocessing.get_context("fork")
    done = context.JoinableQueue()
    done.put(0)
    finished = context.Process(target=int)
    finished.start()
    finished.join(10)
    fork = context.Process(target=time.sleep, args=(3600,))
    fork.start()
    pids.with_suffix(".tmp").write_text(f"{os.getpid()} {fork.pid}")
    pids.with_suffix(".tmp").rename(pids)
    done.join()


def _killed(which: int, pids: Path) -> str:
    """Kill the writer, or its fork: what the trainer is told."""
    saving = BackgroundSave(AsyncRequest(_write, (pids,), []))
    begun = time.monotonic()
    while not pids.exists():
        assert time.monotonic() < begun + 60, "nothing is written"
        time.sleep(0.05)
    both = [int(word) for word in pids.read_text().split()]
    assert not saving.is_written()
    os.kill(both[which], signal.SIGKILL)
    deadline = time.monotonic() + 60
    while not saving.is_written():
        assert time.monotonic() < deadline, "nobody notices"
        time.sleep(0.05)
    try:
        saving.finish()
    except OutOfMemoryError as error:
        return str(error)
    finally:
        with suppress(ProcessLookupError):
            os.kill(both[1], signal.SIGKILL)
    return "all is well"


@pytest.mark.parametrize("which", [0, 1])
def test_a_writer_that_is_killed_is_noticed(which: int, tmp_path: Path) -> None:
    """By the kernel, say: a fork that copies what it writes is what it kills first."""
    [told] = run_layout(_killed, ParallelConfig(), which, tmp_path / "pids")
    assert told.startswith("the process that writes the checkpoint has not finished: killed by SIGKILL")


def _waits_for(path: Path, _staged: Any, _more: Any) -> None:
    """A writer that ends when the file is there."""
    while not path.exists():
        time.sleep(0.05)


def _lifetimes(path: Path) -> tuple[bool, bool]:
    """Whether the copies on the host are alive while they are written, and afterwards."""
    copies: list[weakref.ref[torch.Tensor]] = []
    stage = background_save.staged

    def noted(buckets: list[Any]) -> list[Any]:
        found = stage(buckets)
        [(_, _, (_, [(_, copy)]))] = found
        copies.append(weakref.ref(copy))
        return found

    background_save.staged = noted
    background_save.is_on_host = lambda tensor: False
    buckets = [("file", "key", ([], [("item", torch.zeros(3))]))]
    saving = BackgroundSave(AsyncRequest(_waits_for, (path, buckets, None), [], preload_fn=list))
    gc.collect()
    assert not saving.is_written()
    during = copies[0]() is not None
    path.touch()
    while not saving.is_written():
        time.sleep(0.05)
    saving.finish()
    gc.collect()
    return during, copies[0]() is not None


def test_copies_are_kept_while_they_are_written(tmp_path: Path) -> None:
    """In pinned memory, which a fork shares: a copy made there meanwhile would be what is written."""
    assert run_layout(_lifetimes, ParallelConfig(), tmp_path / "go") == [(True, False)]


class _Store:
    """As a store of torch.distributed, whose end waits for a thread that a fork does not have."""

    def __init__(self) -> None:
        self.itself = self
        self.home = os.getpid()

    def __del__(self) -> None:
        while os.getpid() != self.home:
            time.sleep(0.05)


def _collects(path: Path) -> None:
    """A writer that collects garbage, as megatron's does now and then."""
    gc.collect()
    path.touch()


def _with_garbage(path: Path) -> bool:
    gc.disable()
    _Store()
    saving = BackgroundSave(AsyncRequest(_collects, (path,), []))
    deadline = time.monotonic() + 120
    while not saving.is_written():
        assert time.monotonic() < deadline, "the writer waits for ever"
        time.sleep(0.05)
    saving.finish()
    gc.enable()
    return path.exists()


def test_the_trainers_garbage_does_not_hold_the_writer(tmp_path: Path) -> None:
    assert run_layout(_with_garbage, ParallelConfig(), tmp_path / "done") == [True]
