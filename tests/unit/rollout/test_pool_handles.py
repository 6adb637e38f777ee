"""The pool of colocated engines with weights by handles (CUDA IPC): verification, failures, recovery."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.rollout.engines.colocated_pool import ColocatedPool
from bapo_megatron.rollout.engines.pool import EnginePool
from bapo_megatron.rollout.engines.sent_weights import SentDigests
from bapo_megatron.rollout.sampler.held_out import HeldOut
from bapo_megatron.rollout.sampler.process import Service
from bapo_megatron.types import StepBatch
from tests.support.sampling import PATIENCE, World, until
from tests.support.sleeping_engine import SleepingEngine, sampling_in_turns

CALLS = ("begin", "receive", "confirm", "finish")


class HandleWorld(World):
    """A run whose weights come by handles: ``weights`` only says so."""

    _service: tuple[EnginePool, Service] | None = None

    async def weights(self, step: int) -> None:
        await self.call("expect_handles", step, step)

    async def in_folder(self, step: int) -> None:
        """The weights of ``step`` in a folder, for engines that did not get them by handles."""
        await self.call("load_weights", Path(f"v{step}"), step, step)

    async def call(self, method: str, *arguments: Any) -> Any:
        """The sampler process's reply to a call of the trainer."""
        if self._service is None or self._service[0] is not self.pool:  # one for each life of the process
            held_out = HeldOut(self.config, (), self.dataset, self.pool, self.scorer)
            self._service = self.pool, Service(self.sampler, self.pool, held_out, [], "ipc")
        kind, answer, *_ = await self._service[1].answer(method, arguments)
        assert kind == "ok", answer
        return answer

    async def begin(self, pool: ColocatedPool) -> None:
        """Sample from the first weights: no engine sleeps, and all load them from a folder."""
        await self.in_folder(0)
        await pool.admit()
        await until(lambda: pool.up == len(self.engines))

    def refusals(self) -> str:
        """Reasons why engines were left out."""
        return "; ".join(event["reason"] for event in self.events if event["kind"] == "engine_refused")


def named(*names: str) -> list[SleepingEngine]:
    return [SleepingEngine(name) for name in names]


def versions(batch: StepBatch) -> set[int]:
    return {int(v) for group in batch.groups for one in group.rollouts for v in one.versions_R}


async def hand_over(
    world: HandleWorld, names: Collection[str], version: int, sent: SentDigests | None = None
) -> list[str]:
    """All calls but the last, as the trainer makes them: weights in two buckets."""
    going = await world.call("begin", version, names)
    for bucket in (b"v", str(version).encode()):
        going = await world.call("receive", {name: [bucket] for name in going})
    confirmed: list[str] = await world.call("confirm", sent)
    return confirmed


async def handed_over(world: HandleWorld, names: Collection[str], version: int) -> list[str]:
    """All calls; the names of the engines that sample."""
    await hand_over(world, names, version)
    woken: list[str] = await world.call("resume")
    return woken


async def test_engines_wake_with_weights_by_handles(tmp_path: Path) -> None:
    """The third step's come by a folder; then handles again."""
    both = named("one", "two")
    world = HandleWorld(tmp_path, both)
    async with sampling_in_turns(world, admitted=False) as pool:
        await world.begin(pool)
        for step in range(1, 5):
            assert versions(await world.batch(step)) == {step - 1}
            asleep = await world.call("release")
            assert sorted(asleep) == ["one", "two"]
            if step == 3:
                await world.in_folder(step)
                woken = await world.call("wake", asleep)
            else:
                await world.weights(step)
                await hand_over(world, asleep, step)
                assert pool.up == 0, "an engine samples before it has all its memory"
                assert await world.sampler.next_batch(step + 1, 0.05) is None
                woken = await world.call("resume")
            assert sorted(woken) == ["one", "two"]
            assert pool.up == 2
            await world.call("admit")
        assert versions(await world.batch(5)) == {4}
    assert [one.wrongs for one in both] == [[], []]
    assert [one.folders for one in both] == [[Path("v0"), Path("v3")]] * 2
    by_handles = ["begin", "receive", "receive", "confirm", "finish"]
    one_turn, by_folder = ["release", *by_handles], ["release", "wake"]
    memory = [call for call in both[0].calls if call != "abort"]
    assert memory == [*one_turn, *one_turn, *by_folder, *one_turn]
    assert world.event_kinds().count("engine_ready") == 2, "a wake is not a come-back"
    assert "engine_refused" not in world.event_kinds()


@asynccontextmanager
async def released(
    folder: Path, *names: str, sampled: bool = False
) -> AsyncIterator[tuple[HandleWorld, ColocatedPool, list[SleepingEngine], list[str]]]:
    """Engines that have sampled, if so asked, and have released their memory for the weights of step 1."""
    engines = named(*names)
    world = HandleWorld(folder, engines)
    async with sampling_in_turns(world, admitted=False) as pool:
        await world.begin(pool)
        if sampled:
            await world.batch(1)
        asleep = await world.call("release")
        await world.weights(1)
        yield world, pool, engines, asleep


async def restarted(world: HandleWorld, *engines: SleepingEngine) -> None:
    """What the trainer does for engines without weights: they are restarted, and load from a folder."""
    await world.in_folder(1)
    for engine in engines:
        engine.restart()
    await world.call("admit")


@pytest.mark.parametrize("fails", CALLS)
async def test_a_failed_engine_is_left_out(tmp_path: Path, fails: str) -> None:
    """The other engine continues; a restarted server loads the same weights by disk."""
    async with released(tmp_path, "one", "two", sampled=True) as (world, pool, both, asleep):
        both[0].fails = fails
        confirmed = await hand_over(world, asleep, 1)
        assert sorted(confirmed) == (["one", "two"] if fails == "finish" else ["two"])
        await world.in_folder(1)
        assert await world.call("resume") == ["two"]
        assert pool.up == 1
        assert both[0].calls[-1] == fails, "it was asked for more"
        assert f"the {fails} failed" in world.refusals()
        asked = len(both[0].asked)
        assert versions(await world.batch(2)) == {1}
        assert (len(both[0].asked), both[0].folders) == (asked, [Path("v0")])
        both[0].restart()
        await world.call("admit")
        await until(lambda: pool.up == 2)
        assert both[0].folders == [Path("v0"), Path("v1")]
    assert [one.wrongs for one in both] == [[], []]


@pytest.mark.parametrize("is_alive", [True, False])
@pytest.mark.parametrize("hangs", CALLS)
async def test_a_hanging_engine_is_left_out(tmp_path: Path, hangs: str, is_alive: bool) -> None:
    """The other two form a quorum without it. A dead process, which answers no health check either, fails
    before the load's deadline."""
    async with released(tmp_path, "one", "two", "three") as (world, pool, three, asleep):
        pool._timeouts = replace(PATIENCE, update_s=0.2 if is_alive else 3600.0)
        three[2].hangs, three[2].ready = hangs, is_alive
        assert sorted(await handed_over(world, asleep, 1)) == ["one", "two"]
        assert pool.up == 2
    found = [(event["engine"], event["reason"]) for event in world.events if event["kind"] == "engine_hangs"]
    if is_alive:
        [(name, reason)] = found
        assert name == "three"
        assert "not done in 0.2 s" in reason
    else:
        assert found == []
        assert "no answer for" in world.refusals()


async def test_a_hand_over_that_the_trainer_gives_up_does_not_block_later_loads(tmp_path: Path) -> None:
    """A rank failed after the first bucket: all servers are ended, and load the weights by disk."""
    async with released(tmp_path, "one", "two") as (world, pool, both, asleep):
        await world.call("begin", 1, asleep)
        await world.call("receive", {name: [b"v"] for name in asleep})
        await restarted(world, *both)
        await until(lambda: pool.up == 2)
        assert [engine.version for engine in both] == [1, 1]


@pytest.mark.parametrize("returning", [2, 1])
async def test_two_engines_with_different_digests_both_fail(tmp_path: Path, returning: int) -> None:
    """Neither digest is known to be right, and that of a server which is gone blocks the other's load."""
    async with released(tmp_path, "one", "two", sampled=True) as (world, pool, both, asleep):
        both[1].digest = "garbage"
        assert await hand_over(world, asleep, 1) == []
        both[1].ready = returning == 2
        if returning == 2:
            both[1].digest = None
        await restarted(world, *both[:returning])
        await until(lambda: pool.up == returning)
        assert versions(await world.batch(2)) == {1}


async def test_the_digest_of_weights_by_handles_counts_for_a_load_by_disk(tmp_path: Path) -> None:
    """A left-out engine whose disk gives other weights of the same version does not sample."""
    async with released(tmp_path, "one", "two") as (world, pool, both, asleep):
        both[0].fails = "receive"
        await hand_over(world, asleep, 1)
        await world.in_folder(1)
        await world.call("resume")
        both[0].restart()
        both[0].digest, before, asked = "garbage", len(both[0].folders), len(both[0].asked)
        await world.call("admit")
        await until(lambda: len(both[0].folders) > before + 2)  # it tries again as often as it is refused
        assert both[1].folders == [Path("v0")], "it had the weights"
        assert [slot.engine.name for slot in pool._slots if slot.is_up] == ["two"]
        assert "different weights" in world.refusals()
        assert len(both[0].asked) == asked


async def test_a_lost_engine_gets_the_next_weights(tmp_path: Path) -> None:
    """Those that it has are in no folder, so it samples no more of this step; its server is not ended."""
    async with released(tmp_path, "one", "two", sampled=True) as (world, pool, both, asleep):
        await handed_over(world, asleep, 1)
        await world.call("admit")
        pool.quarantine(pool._slots[0], "a request failed")
        asked = len(both[0].asked)
        await asyncio.sleep(0.1)  # five heartbeats
        assert (pool.up, pool.needs_weights) == (1, False)
        assert versions(await world.batch(2)) == {1}
        assert len(both[0].asked) == asked
        asleep = await world.call("release")
        assert asleep == ["one", "two"]
        await world.weights(2)
        assert sorted(await handed_over(world, asleep, 2)) == ["one", "two"]
        await world.call("admit")
        assert versions(await world.batch(3)) == {2}
        assert len(both[0].asked) > asked
    assert [(engine.folders, engine.wrongs) for engine in both] == [([Path("v0")], [])] * 2


@pytest.mark.parametrize("anew", [0, 1, 2])
async def test_the_trainer_is_asked_for_weights_when_no_engine_works(tmp_path: Path, anew: int) -> None:
    """Weights in no folder come from the trainer alone; what answers may release its memory for them."""
    async with released(tmp_path, "one", "two", sampled=True) as (world, pool, both, asleep):
        await handed_over(world, asleep, 1)
        await world.call("admit")
        for engine in both[:anew]:
            engine.restart()
        pool.quarantine(pool._slots[0], "its server has ended")
        assert not pool.needs_weights, "the other works"
        pool.quarantine(pool._slots[1], "its server has ended")
        assert pool.needs_weights
        both[1].fails = "release"
        asleep = await world.call("release")
        assert asleep == ["one"]
        await world.weights(1)
        await hand_over(world, asleep, 1)
        await world.in_folder(1)
        await world.call("resume")
        both[1].restart()
        await world.call("admit")
        await until(lambda: pool.up == 2)
        assert not pool.needs_weights
        assert versions(await world.batch(2)) == {1}
    assert [(engine.folders[1:], engine.wrongs) for engine in both] == [([], []), ([Path("v1")], [])]


async def test_a_sleeping_engine_is_not_asked_to_release_its_memory_again(tmp_path: Path) -> None:
    """The trainer failed before it woke it."""
    async with released(tmp_path, "one", "two") as (world, _, both, asleep):
        await handed_over(world, asleep[:1], 1)
        assert await world.call("release") == ["one"]
    assert [engine.wrongs for engine in both] == [[], []]


async def test_a_restarted_sampler_asks_for_weights(tmp_path: Path) -> None:
    """It does not know which of the engines, all of which answer, were started again."""
    both = named("one", "two")
    world = HandleWorld(tmp_path, both)
    async with sampling_in_turns(world, admitted=False) as pool:
        await world.begin(pool)
        await world.batch(1)
        asleep = await world.call("release")
        await world.weights(1)
        await handed_over(world, asleep, 1)
        await world.call("admit")
    both[0].restart()
    for engine in both:
        engine.asked.clear()
    async with sampling_in_turns(world, first_step=2, admitted=False) as pool:
        await world.weights(1)
        await asyncio.sleep(0.1)  # five heartbeats
        await world.call("admit")
        await asyncio.sleep(0.1)
        assert (pool.up, pool.needs_weights) == (0, True)
        asleep = await world.call("release")
        await world.weights(1)
        assert sorted(await handed_over(world, asleep, 1)) == ["one", "two"]
        assert versions(await world.batch(2)) == {1}
    assert [(engine.folders, engine.wrongs) for engine in both] == [([Path("v0")], [])] * 2
