"""Calls of worker processes: many at a time, hung, killed, out of memory; each is answered once or fails."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.workers import process
from bapo_megatron.workers.pool import CallFailed, CallKind, WorkerPool
from bapo_megatron.workers.process import WorkerProgram

pytestmark = pytest.mark.integration

COMMAND = (sys.executable, "-m", "tests.support.worker_program")
LONG_S = 300.0
"""A limit that no test reaches."""


def kind(
    function: str, limit_s: float = LONG_S, repeatable: bool = True, grace_s: float = LONG_S
) -> CallKind:
    return CallKind(function, limit_s, repeatable, grace_s)


@asynccontextmanager
async def pooling(workers: int = 1, concurrency: int = 1000, **settings: Any) -> AsyncIterator[WorkerPool]:
    """A running pool; afterwards no process of it is left."""
    pool = WorkerPool(WorkerProgram(COMMAND, settings), workers, concurrency)
    await pool.start()
    await asyncio.sleep(0)  # each place takes its process
    try:
        yield pool
    finally:
        pids = pids_of(pool)
        await pool.close()
        assert not any(map(exists, pids))


def pids_of(pool: WorkerPool) -> list[int]:
    return [worker._process.pid for worker in pool._workers if worker._process]


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()  # a worker that has ended is reaped, too


def failures(results: list[Any]) -> list[str | None]:
    return [one.failure if isinstance(one, CallFailed) else None for one in results]


async def together(calls: list[Any]) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)


def act(pool: WorkerPool, file: Path, name: str, of: CallKind | None = None, **more: Any) -> Any:
    """A call whose first try takes long, so that it is in flight when its worker ends."""
    return pool.call(of or kind("act"), {"name": name, "file": str(file), "first_s": 1000, **more})


async def noted(file: Path, count: int) -> list[str]:
    """The lines of ``file``, once there are ``count``."""
    while not file.exists() or len(file.read_text().splitlines()) < count:
        await asyncio.sleep(0.01)
    return file.read_text().splitlines()


async def test_a_call_too_many_waits_for_a_place() -> None:
    async with pooling(concurrency=3) as pool:
        meeting = [asyncio.create_task(pool.call(kind("meet"), 4)) for _ in range(4)]
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in meeting), "the fourth has no place"
        meeting[0].cancel()
        results = await together(meeting)
    assert isinstance(results[0], asyncio.CancelledError)
    assert len({*results[1:]}) == 1


async def test_questions_and_answers_may_be_large() -> None:
    text = "a" * (3 << 20)
    async with pooling(workers=3) as pool:
        found = await asyncio.gather(*(pool.call(kind("answer_and_die"), f"{text}{n}") for n in range(3)))
    assert found == [f"{text}{n}" for n in range(3)]


@pytest.mark.parametrize(
    ("how", "detail"),
    [
        ("value", r"ValueError\('no such door'\)"),
        ("exit", r"SystemExit\(3\)"),
        ("object", r"TypeError\('Object of type object is not JSON serializable'\)"),
    ],
)
async def test_an_async_function_that_raises_costs_itself(how: str, detail: str) -> None:
    async with pooling() as pool:
        beside = asyncio.create_task(pool.call(kind("wait"), 0.5))
        with pytest.raises(CallFailed, match=f"^fail of episode 7: raised: {detail}") as error:
            await pool.call(kind("fail"), how, holder="episode 7")
        assert error.value.place.startswith(error.value.detail.partition("(")[0])
        if how == "value":
            lines = error.value.traceback.splitlines()
            assert "worker_program.py" in lines[1], "the frames of the worker come before"
            assert lines[-1] == "ValueError: no such door"
        assert [await beside] == pids_of(pool)


@pytest.mark.parametrize(
    ("function", "question", "repeatable"), [("wait", 1000, True), ("heed_no_cancel", None, False)]
)
async def test_an_async_call_past_its_time_costs_itself(
    function: str, question: Any, repeatable: bool
) -> None:
    async with pooling() as pool:
        beside = asyncio.create_task(pool.call(kind("wait"), 1))
        with pytest.raises(CallFailed, match=f"^{function}: time: no answer within 0.2 s$"):
            await pool.call(kind(function, 0.2, repeatable), question)
        assert [await beside] == pids_of(pool), "its worker has gone on"


@pytest.mark.parametrize(
    ("name", "says"), [("blocker", "time: no answer within 0.5 s"), ("killer", "died: signal SIGKILL")]
)
async def test_a_call_that_holds_or_kills_its_worker_costs_the_others_nothing(
    name: str, says: str, tmp_path: Path
) -> None:
    """One blocks the event loop, so none of the worker's clocks runs: the pool kills it. All are asked again
    alone; the culprit costs two workers of its own, and has failed."""
    file = tmp_path / "notes"
    async with pooling() as pool:
        innocent = [asyncio.create_task(act(pool, file, one)) for one in ("a", "b", "c")]
        await noted(file, 3)
        (found, *others) = await together([act(pool, file, name, kind("act", 0.5, grace_s=0.5)), *innocent])
    assert str(found) == f"act: {says}"
    assert others == ["a", "b", "c"]
    lines = file.read_text().splitlines()
    assert lines[:4] == ["a 1", "b 2", "c 3", f"{name} 4"]
    assert sorted(lines[4:]) == sorted(["a 1", "b 1", "c 1", f"{name} 1", f"{name} 1"]), "suspects run alone"


async def test_a_plain_function_past_its_time_costs_itself() -> None:
    """The next call of its worker is not sent before: it is neither late nor suspect."""
    async with pooling(plain=True) as pool:
        slow = pool.call(kind("plain", 1.0, repeatable=False), 1000)
        slow, quick = await together([slow, pool.call(kind("plain", repeatable=False), 0)])
    assert str(slow) == "plain: time: no answer within 1 s"
    assert isinstance(quick, int)


async def test_what_may_not_be_repeated_fails_by_name(tmp_path: Path) -> None:
    """Nothing is done twice: each line of the notes stands there once."""
    file = tmp_path / "notes"
    async with pooling() as pool:
        question = {"file": str(file), "begins_at": 3, "first_s": 1000}
        once = kind("act", repeatable=False)
        results = await together(
            [pool.call(once, {"name": name, **question}, f"episode {name}") for name in ("a", "killer", "b")]
        )
        assert (await pool.call(once, {"name": "c", "file": str(file)})) == "c", "the next worker serves"
    assert [str(one) for one in results] == [
        f"act of episode {name}: died: signal SIGKILL, with 2 other calls in flight"
        for name in ("a", "killer", "b")
    ]
    assert file.read_text().splitlines() == ["a 1", "killer 2", "b 3", "c 1"]


async def test_suspects_come_back_few_at_a_time(tmp_path: Path) -> None:
    """24 calls of a killed worker: three at a time, and a new call waits until they are done."""
    file = tmp_path / "notes"
    async with pooling() as pool:
        calls = [asyncio.create_task(act(pool, file, f"call{n}", lot=3)) for n in range(24)]
        await noted(file, 24)
        os.kill(killed := pids_of(pool)[0], signal.SIGKILL)
        until = time.monotonic() + 60
        while killed in pids_of(pool) and time.monotonic() < until:  # a call before that goes to it, too
            await asyncio.sleep(0.01)
        new = asyncio.create_task(pool.call(kind("act"), {"name": "new", "file": str(file)}))
        found = await together([*calls, new])
    assert found == [*(f"call{n}" for n in range(24)), "new"]
    again = file.read_text().splitlines()[24:]
    assert {int(line.split()[1]) for line in again} == {1, 2, 3}
    assert again[-1] == "new 1"


async def test_the_last_answer_is_read_where_the_end_is_seen_first() -> None:
    async with pooling() as pool:
        worker = pool._workers[0]._process
        assert worker is not None
        asyncio.get_running_loop().remove_reader(worker._output)
        found = await pool.call(kind("answer_and_die", repeatable=False), "last")
    assert found == "last"


async def test_what_is_no_json_neither_ends_nor_holds_up_a_worker() -> None:
    """A question is the caller's mistake; in an answer, a RecursionError would be lost in the event loop."""
    async with pooling() as pool:
        with pytest.raises(TypeError, match="set is not JSON serializable"):
            await pool.call(kind("count"), {1})
        assert (await pool.call(kind("count"), "a"))[1] == 1
    assert process._message(b'{"id": 1, "answer": ' + 100_000 * b"[") is None


async def test_no_answer_is_lost_or_given_to_another() -> None:
    """600 calls while a worker is killed now and then: each gets its own answer, and gets it once."""
    answers: list[int] = []

    async def one(pool: WorkerPool, n: int) -> None:
        found = await pool.call(kind("count"), f"{n}")
        assert found[1] == 1, "a process has counted this name before"
        answers.append(n)

    async with pooling(workers=2, concurrency=7) as pool:
        calls = [asyncio.create_task(one(pool, n)) for n in range(600)]
        for at in (100, 200, 300):
            while len(answers) < at or len(pids_of(pool)) < 2:
                await asyncio.sleep(0.001)
            os.kill(pids_of(pool)[at // 100 % 2], signal.SIGKILL)
        await asyncio.gather(*calls)
    assert sorted(answers) == list(range(600))


async def test_calls_of_one_holder_go_to_one_worker() -> None:
    async with pooling(workers=2) as pool:
        step = kind("count", repeatable=False)
        names = [f"episode {n}" for n in range(10)]
        rounds = [await asyncio.gather(*(pool.call(step, name, name) for name in names)) for _ in range(3)]
        assert [counts for _, counts in rounds[2]] == [3] * 10, "each object is in one process"
        assert Counter(pid for pid, _ in rounds[0]).most_common()[0][1] == 5, "and they are shared out"


async def test_an_object_is_lost_with_its_worker() -> None:
    async with pooling(workers=2) as pool:
        once, again = kind("count", repeatable=False), kind("count")
        await pool.call(once, "a", "a")
        pid, _ = await pool.call(once, "b", "b")
        os.kill(pid, signal.SIGKILL)
        while pid in pids_of(pool):
            await asyncio.sleep(0.01)
        assert (await pool.call(once, "a", "a"))[1] == 2, "that of the other worker is there"
        for _ in range(2):
            with pytest.raises(CallFailed, match="^count of b: died: the worker that held it has ended$"):
                await pool.call(once, "b", "b")
        assert (await pool.call(again, "b", "b"))[1] == 1, "what may be repeated builds it anew"
        assert (await pool.call(once, "b", "b"))[1] == 2
        pool.forget("b")
        assert not {"b"} & set(pool._holders)


async def test_a_call_that_waits_for_a_lost_object_is_told(tmp_path: Path) -> None:
    async with pooling(concurrency=1) as pool:
        first = {"name": "a", "file": str(tmp_path / "notes"), "first_s": 1000}
        begun = asyncio.create_task(pool.call(kind("act", repeatable=False), first, "a"))
        await noted(tmp_path / "notes", 1)
        queued = [
            asyncio.create_task(pool.call(kind("count", repeatable=again), "a", "a"))
            for again in (False, True)
        ]
        await asyncio.sleep(0.1)
        os.kill(pids_of(pool)[0], signal.SIGKILL)
        begun, queued, again = await together([begun, *queued])
    assert str(begun) == "act of a: died: signal SIGKILL"
    assert str(queued) == "count of a: died: the worker that held it has ended: signal SIGKILL"
    assert again[1] == 1


async def test_calls_beside_one_without_memory_are_asked_again_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    async with asyncio.timeout(90), pooling(memory_mb=512) as pool:
        calls = [act(pool, file, name, begins_at=3, first_s=1) for name in ("a", "hog", "b")]
        a, hog, b = await together(calls)
    assert (a, b, str(hog)) == ("a", "b", "act: raised: MemoryError()")
    lines = file.read_text().splitlines()
    assert (lines[:3], sorted(lines[3:])) == (["a 1", "hog 2", "b 3"], ["a 1", "b 1", "hog 1"])
