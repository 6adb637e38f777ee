"""Starts and ends of worker processes: notes, failures, limits, and nothing that is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from bapo_megatron.runtime.child_process import ChildTimeout
from bapo_megatron.workers import pool as pools
from bapo_megatron.workers import process
from bapo_megatron.workers.pool import WorkerPool
from bapo_megatron.workers.process import WorkerProgram
from tests.unit.workers.test_worker_pool import (
    COMMAND,
    act,
    exists,
    failures,
    kind,
    noted,
    pids_of,
    pooling,
    together,
)

pytestmark = pytest.mark.integration


async def test_the_start_of_a_worker_is_nobodys_time(tmp_path: Path) -> None:
    """Its second process needs two seconds for its imports, and the calls have one second."""
    async with pooling(2, starts=str(tmp_path / "starts"), start_s=2) as pool:
        for pid in pids_of(pool):
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.2)
        assert not pids_of(pool)
        results = await together([pool.call(kind("count", 1.0, repeatable=False), "a") for _ in range(3)])
    assert failures(results) == [None] * 3


async def test_a_start_that_takes_too_long_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "START_LIMIT_S", 5.0)
    (tmp_path / "starts").write_text("one before\n")
    with pytest.raises(ChildTimeout, match="^it was not ready within 5 s$"):
        async with pooling(2, starts=str(tmp_path / "starts"), start_s=1000):
            pass


async def test_a_place_that_cannot_start_a_worker_leaves_its_calls_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its suspect, too. Where no worker is left calls fail, and the next call tries again."""
    monkeypatch.setattr(pools, "RESTART_PAUSE_S", 2.0)
    starts, file = tmp_path / "starts", tmp_path / "notes"
    broken = Path(f"{starts}.broken")
    starts.write_text("")
    async with pooling(workers=2, starts=str(starts)) as pool:
        broken.touch()
        suspect = asyncio.create_task(act(pool, file, "a"))
        await noted(file, 1)
        first, second = pids_of(pool)
        os.kill(first, signal.SIGKILL)
        assert await suspect == "a"
        assert pids_of(pool) == [second]
        os.kill(second, signal.SIGKILL)
        results = await together([pool.call(kind("wait"), 0) for _ in range(3)])
        assert [str(one) for one in results] == ["wait: died: exit code 9"] * 3
        broken.unlink()
        assert await pool.call(kind("wait"), 0) in pids_of(pool)


async def test_a_defect_of_the_pool_itself_fails_every_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools._WorkerSlot, "_suspect", lambda *_: 1 / 0)
    async with pooling() as pool:
        begun = asyncio.create_task(act(pool, tmp_path / "notes", "a"))
        await noted(tmp_path / "notes", 1)
        os.kill(pids_of(pool)[0], signal.SIGKILL)
        for call in (begun, pool.call(kind("count"), "b")):
            with pytest.raises(ZeroDivisionError):
                await asyncio.wait_for(call, 20)


async def test_closing_ends_what_runs_hangs_or_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    starts, file = tmp_path / "starts", tmp_path / "notes"
    program = WorkerProgram(COMMAND, {"starts": str(starts), "start_s": 1000})
    pool = WorkerPool(program, 1)
    await pool.start()
    calls = [asyncio.create_task(act(pool, file, name)) for name in ("a", "blocker")]
    await noted(file, 2)
    os.kill(pids_of(pool)[0], signal.SIGKILL)
    await noted(starts, 2)  # the second process begins a start that does not end
    await pool.close()
    assert all(isinstance(one, asyncio.CancelledError) for one in await together(calls))
    assert not any(exists(int(pid)) for pid in starts.read_text().split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "starts"], "no directory of a worker"
