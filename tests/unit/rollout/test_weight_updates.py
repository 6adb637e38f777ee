"""Weight updates in parts: order of calls, ranks, digests, and the engines that take part."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bapo_megatron.interfaces import Confirm, Engine
from bapo_megatron.rollout.engines.backend import EngineError
from bapo_megatron.rollout.engines.pool import EnginePool
from bapo_megatron.rollout.engines.pool_state import EngineTimeouts
from bapo_megatron.rollout.engines.weight_updates import BroadcastUpdates, WeightUpdates
from bapo_megatron.types import BroadcastGroup, BucketSpec, WeightParts
from tests.support.receiving_engine import ReceivingEngine
from tests.support.sampling import PATIENCE, ScriptedEngine, mixed

GROUP = BroadcastGroup("127.0.0.1", 1234, "weights", 6, "gloo")
BUCKET = BucketSpec(("w",), ("float32",), ((1,),), 4)


@asynccontextmanager
async def updating(
    *engines: Engine, timeouts: EngineTimeouts = PATIENCE
) -> AsyncIterator[tuple[EnginePool, BroadcastUpdates, list[str]]]:
    """A pool of engines with weights from a folder; the events since then."""
    events: list[str] = []
    pool = EnginePool(
        engines, 4, lambda kind, **fields: events.append(f"{kind} {fields['engine']}"), timeouts
    )
    await pool.update(Path("v1"), 1)
    events.clear()
    yield pool, BroadcastUpdates(pool), events
    await pool.close()


async def one_update(updates: BroadcastUpdates, version: int = 5) -> None:
    await updates.begin(version)
    await updates.receive(BUCKET)
    await updates.confirm()
    await updates.resume()


async def refused(match: str, *engines: Engine, timeouts: EngineTimeouts = PATIENCE) -> None:
    """Check that an update of these engines, from their group on, raises an EngineError in time."""
    async with asyncio.timeout(60), updating(*engines, timeouts=timeouts) as (_, updates, _):
        await updates.gather()
        with pytest.raises(EngineError, match=match):
            await updates.join(GROUP)
            await one_update(updates)


async def test_an_update_of_no_engine_is_an_error() -> None:
    """Of the default driver with engines that do not sleep, say: its ``resume`` would lose all of them."""
    async with updating(ReceivingEngine("a")) as (pool, _, events):
        for names in ((), ("a",)):
            with pytest.raises(EngineError, match="WeightUpdates: no engine receives these weights"):
                await WeightUpdates(pool).begin(5, names)
        assert (pool.up, events) == (1, [])


async def test_all_engines_finish_a_call_before_the_next_begins() -> None:
    calls: list[str] = []

    engines = ReceivingEngine("a", 2, calls), ReceivingEngine("b", 3, calls)
    async with updating(*engines) as (pool, updates, events):
        assert await updates.gather() == (5, False)
        await updates.join(GROUP)
        assert calls[:2] == ["a leave weights", "b leave weights"]
        assert calls[2:] == ["a join weights at 1", "b join weights at 3"]  # rank 0 sends, a has two
        calls.clear()
        await one_update(updates)
        assert [one.version for one in engines] == [5, 5]
        assert (pool.up, events) == (2, [])
    for number, step in enumerate(["begin", "receive w", "end", "version 5", "resume"]):
        assert calls[2 * number : 2 * number + 2] == [f"a {step}", f"b {step}"]
    assert len(calls) == 10


async def test_a_busy_engine_is_not_left_out_of_a_broadcast() -> None:
    """It answers no health check for a while. Left out, it would lose its requests, and wait for a step."""
    busy = ReceivingEngine("busy")
    async with updating(ReceivingEngine("a"), busy, timeouts=replace(PATIENCE, silent_s=60.0)) as (
        pool,
        updates,
        events,
    ):
        busy.ready = False
        gathering = asyncio.create_task(updates.gather())
        await asyncio.sleep(0.1)
        busy.ready = True
        assert await gathering == (2, False)
        await one_update(updates)
        assert (pool.up, busy.version, events) == (2, 5, [])


async def test_an_engine_that_did_not_begin_receives_nothing() -> None:
    """It was away when the others began; it may not sample until it has loaded the next weights."""
    here, away = ReceivingEngine("here"), ReceivingEngine("away")
    async with updating(here, away) as (pool, updates, events):
        away.ready = False
        await updates.gather()
        await updates.begin(5)
        away.ready = True
        assert await updates.receive(BUCKET) == ["here"]
        assert await updates.confirm() == ["here"]
        assert await updates.resume() == ["here"]
        assert (away.calls, away.version) == ([], 1)
        assert (pool.up, events) == (1, ["engine_lost away"])


async def test_no_engine_joins_a_group_if_one_cannot_leave_the_last() -> None:
    """It would wait in the join for the engine that is lost, and answer nothing meanwhile."""
    kept, lost = ReceivingEngine("kept"), ReceivingEngine("lost")
    lost.fails_at = "leave weights"
    async with updating(kept, lost) as (_, updates, _):
        await updates.gather()
        with pytest.raises(EngineError, match="lost does not leave"):
            await updates.join(GROUP)
        assert kept.calls == ["kept leave weights"]


class Hasty(ReceivingEngine):
    """An engine whose load of weights in parts ends early: it returns, or is cancelled by itself."""

    is_cancelled = False

    async def load(self, weights: Path | WeightParts, version: int, confirm: Confirm) -> None:
        if isinstance(weights, Path):
            await super().load(weights, version, confirm)
        elif self.is_cancelled:  # as by a task of its own that its abort cancels: no cancel of the driver
            raise asyncio.CancelledError
        else:
            await anext(aiter(weights))


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_load_that_breaks_its_contract_is_an_error(is_cancelled: bool) -> None:
    """Else the engine would wait to be resumed, and the driver for the engine, for ever."""
    engine = Hasty("a")
    engine.is_cancelled = is_cancelled
    async with asyncio.timeout(60), updating(engine) as (_, updates, _):
        await updates.gather()
        with pytest.raises(EngineError, match="a: its load ended before its digest was compared"):
            await one_update(updates)


@pytest.mark.parametrize("step", ["leave weights", "join weights at 1", "begin", "receive w", "end"])
async def test_a_step_that_hangs_ends_at_the_limit_of_updates(step: str) -> None:
    """Nothing else would end it: heartbeats continue, and the engine's health is good."""

    class Hangs(ReceivingEngine):
        async def _note(self, call: str) -> None:
            if call == step:
                await asyncio.sleep(1000)
            await super()._note(call)

    await refused("a: not done in 0.5 s", Hangs("a"), timeouts=replace(PATIENCE, update_s=0.5))


@pytest.mark.parametrize("step", ["begin", "receive w", "end", "version 5", "resume"])
async def test_any_exception_of_an_engine_becomes_an_engine_error(step: str) -> None:
    bad = ReceivingEngine("bad")
    bad.fails_at = step
    await refused(f"bad does not {step}", ReceivingEngine("good"), bad)


async def test_a_failed_broadcast_ends_the_loads_of_all_engines() -> None:
    """Else the pool's load from disk would wait for them: an engine takes one at a time."""
    left: list[str] = []

    class Busy(ReceivingEngine):
        async def load(self, weights: Path | WeightParts, version: int, confirm: Confirm) -> None:
            try:
                await super().load(weights, version, confirm)
            except asyncio.CancelledError:
                left.append(self.name)
                raise

    good, bad = Busy("good"), Busy("bad")
    bad.fails_at = "receive w"
    async with updating(good, bad) as (pool, updates, _):
        await updates.gather()
        with pytest.raises(EngineError, match="bad does not receive"):
            await one_update(updates)
        await updates.fail("the broadcast failed")
        assert pool.up == 0
        await pool.update(Path("v5"), 5)
        assert (left, pool.up) == (["good"], 2)


async def test_engines_that_cannot_receive_go_into_quarantine() -> None:
    can = ReceivingEngine("can")
    async with updating(can, ScriptedEngine(mixed, "cannot")) as (pool, updates, events):
        assert pool.up == 2
        assert await updates.gather() == (1, False)
        await updates.join(GROUP)
        await one_update(updates, 2)
        assert events == ["engine_lost cannot"]
        assert pool.up == 1
        assert can.version == 2
        assert await updates.gather() == (1, True)  # it is in the group still
        await updates.fail("the sender died")
        assert pool.up == 0
        assert await updates.gather() == (1, False)
