"""The pool of colocated engines: hold, release, wake, admission."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.interfaces import Confirm, ReleasesMemory
from bapo_megatron.rollout.engines.pool import EnginesGone
from tests.support.sampling import ScriptedEngine, World, mixed, prompt_ids, until
from tests.support.sleeping_engine import SleepingEngine, sampling_in_turns


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 90))


def engines() -> list[SleepingEngine]:
    return [SleepingEngine("one"), SleepingEngine("two")]


def test_releases_memory_is_a_runtime_checkable_protocol() -> None:
    assert isinstance(SleepingEngine("one"), ReleasesMemory)
    assert not isinstance(ScriptedEngine(mixed), ReleasesMemory)


async def test_held_engines_get_no_requests_and_no_weights(tmp_path: Path) -> None:
    both = engines()
    world = World(tmp_path, both)
    async with sampling_in_turns(world, admitted=False) as pool:
        assert await world.sampler.next_batch(1, 0.3) is None
        assert [one.folders for one in both] == [[], []]
        pool.check(minutes=0.0)  # held is not lost
        await pool.admit()
        assert prompt_ids(await world.batch(1)) == [0, 1, 2, 3]
        assert [one.folders for one in both] == [[Path("v0")], [Path("v0")]]


async def test_engines_wake_with_the_latest_weights(tmp_path: Path) -> None:
    both = engines()
    world = World(tmp_path, both)
    async with sampling_in_turns(world) as pool:
        for step in (1, 2, 3):
            batch = await world.batch(step)
            assert {v for g in batch.groups for r in g.rollouts for v in r.versions_R} == {step - 1}
            assert sorted(await pool.release()) == ["one", "two"]
            await world.weights(step)
            assert await world.sampler.next_batch(step + 1, 0.1) is None
            assert sorted(await pool.wake(["one", "two"])) == ["one", "two"]
            await pool.admit()
    assert [one.wrongs for one in both] == [[], []]
    assert [one.folders for one in both] == [[Path(f"v{step}") for step in range(4)]] * 2
    assert world.event_kinds().count("engine_ready") == 2, "a wake is no come-back"


async def test_a_release_keeps_the_tokens_of_requests_in_flight(tmp_path: Path) -> None:
    (engine,) = [SleepingEngine("one")]
    world = World(tmp_path, [engine], max_staleness=1)
    async with sampling_in_turns(world, rounds=False) as pool:
        engine.gate.clear()
        await until(lambda: engine.asked)
        begun = len(engine.asked)
        assert await pool.release() == ["one"]
        await until(lambda: not world.sampler._dispatcher._running)
        await world.weights(1)
        engine.gate.set()
        assert await pool.wake(["one"]) == ["one"]
        batch = await world.batch(2)
    continued = [request for request in engine.asked[begun:] if request.prefix_tokens == 1]
    assert len(continued) == begun, "a response lost the token that it had"
    versions = [response.versions_R.tolist() for group in batch.groups for response in group.rollouts]
    assert all(one[0] == 0 and one[-1] == 1 for one in versions)


@pytest.mark.parametrize("fails", ["release", "wake"])
async def test_a_failed_engine_stays_held_until_admission(tmp_path: Path, fails: str) -> None:
    """Its server is ended meanwhile; a restarted one recovers like any other."""
    both = engines()
    both[0].fails = fails
    world = World(tmp_path, both)
    async with sampling_in_turns(world) as pool:
        await world.batch(1)
        released = await pool.release()
        assert sorted(released) == (["two"] if fails == "release" else ["one", "two"])
        await world.weights(1)
        assert await pool.wake(released) == ["two"]
        assert pool.up == 1
        await asyncio.sleep(0.2)  # ten heartbeats
        assert both[0].folders == [Path("v0")], "it was loaded before its server was ended"
        both[0].restart()
        await pool.admit()
        await until(lambda: pool.up == 2)
        assert both[0].version == 1
        assert len((await world.batch(2)).groups) == 4
    assert [one.wrongs for one in both] == [[], []]


async def test_an_engine_that_wakes_with_wrong_weights_does_not_sample(tmp_path: Path) -> None:
    """Three, of which one has garbage: memory that was resumed is not a backup."""
    three = [*engines(), SleepingEngine("three")]
    world = World(tmp_path, three)
    async with sampling_in_turns(world) as pool:
        await world.batch(1)
        released = await pool.release()
        three[1].digest = "garbage"
        await world.weights(1)
        assert sorted(await pool.wake(released)) == ["one", "three"]
        asked = len(three[1].asked)
        await pool.admit()
        assert len((await world.batch(2)).groups) == 4
        assert len(three[1].asked) == asked
        assert any("different weights" in str(event.get("reason")) for event in world.events)


async def test_a_load_that_ends_during_a_hold_does_not_make_the_engine_ready(tmp_path: Path) -> None:
    """An engine that was recovering at the release is held, too."""
    both = engines()
    both[0].ready = False
    world = World(tmp_path, both)
    async with sampling_in_turns(world) as pool:
        await world.batch(1)
        goes_on = asyncio.Event()
        load = both[0].load

        async def late(folder: Path, version: int, confirm: Confirm) -> None:
            await goes_on.wait()
            await load(folder, version, confirm)

        both[0].load, both[0].ready = late, True  # type: ignore[method-assign]
        await until(lambda: pool._slots[0].is_busy)
        assert await pool.release() == ["two"]
        goes_on.set()
        await until(lambda: not pool._slots[0].is_busy)
        await asyncio.sleep(0.1)
        assert pool.up == 0


async def test_the_timeout_without_engines_starts_at_admission(tmp_path: Path) -> None:
    (engine,) = [SleepingEngine("one")]
    world = World(tmp_path, [engine])
    async with sampling_in_turns(world) as pool:
        await world.batch(1)
        await pool.release()
        engine.ready = False
        await asyncio.sleep(0.1)
        pool.check(minutes=0.0)
        await pool.admit()
        await asyncio.sleep(0.01)
        with pytest.raises(EnginesGone, match="no engine has worked for 0 minutes"):
            pool.check(minutes=0.0)


async def test_the_timeout_without_engines_leaves_out_training(tmp_path: Path) -> None:
    """Engines are not expected to work during training: a lost server must not end the run."""
    (engine,) = [SleepingEngine("one")]
    world = World(tmp_path, [engine])
    async with sampling_in_turns(world) as pool:
        await world.batch(1)
        await pool.release()
        await world.weights(1)
        pool._worked_at = pool._slots[0].last_answer_at = -3600.0  # an hour of training
        assert await pool.wake(["one"]) == ["one"]
        await pool.admit()
        engine.ready = False
        pool.quarantine(pool._slots[0], "it has ended")
        pool.check(minutes=30)
        await asyncio.sleep(0.1)
    assert "engine_hangs" not in world.event_kinds()
