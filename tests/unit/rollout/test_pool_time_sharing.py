"""The engine pool: engines that hold, release and wake in turns; prefix affinity; the lag-free clock."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.interfaces import Confirm
from bapo_megatron.rollout.engines.pool import EnginesGone
from bapo_megatron.rollout.engines.pool_state import CachedPrefix, EngineSlot, choose
from bapo_megatron.types import GenerateRequest, Generation
from tests.support.sampling import ScriptedEngine, World, prompt_ids, until
from tests.support.sleeping_engine import SleepingEngine, sampling_in_turns


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 90))


def engines() -> list[SleepingEngine]:
    return [SleepingEngine("one"), SleepingEngine("two")]


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


async def test_the_timeout_without_engines_leaves_out_training(tmp_path: Path) -> None:
    """Engines are not expected to work during training: a lost server must not end the run. It starts at the
    admission."""
    (engine,) = [SleepingEngine("one")]
    world = World(tmp_path, [engine])
    async with sampling_in_turns(world) as pool:
        await world.batch(1)
        engine.fails = "release"
        assert await pool.release() == []
        await asyncio.sleep(0.01)
        pool.check(minutes=0.0)
        engine.restart()
        await pool.admit()
        await until(lambda: pool.up)
        assert await pool.release() == ["one"]
        await world.weights(1)
        pool._worked_at = pool._slots[0].last_answer_at = -3600.0  # an hour of training
        assert await pool.wake(["one"]) == ["one"]
        await pool.admit()
        engine.ready = False
        pool.quarantine(pool._slots[0], "it has ended")
        pool.check(minutes=30)
        await asyncio.sleep(0.1)
        with pytest.raises(EnginesGone, match="no engine has worked for 0 minutes"):
            pool.check(minutes=0.0)
    assert "engine_hangs" not in world.event_kinds()


SEGMENT = 4
LETTERS = (23, 7, 15)
"""Of the samples of each prompt; with the end that is 6, 2 and 4 segments."""
PLACES = 100


class CachingEngine(ScriptedEngine):
    """A scripted engine with SGLang's prefix cache, which counts the tokens that it must prefill.

    The keys and values of a sequence are kept, but for the last token, which was sampled and never read.
    """

    def __init__(self, name: str) -> None:
        super().__init__(lambda _prompt, sample: "yno"[sample] * LETTERS[sample], name)
        self.prefilled = 0
        self._cache: set[tuple[int, ...]] = set()

    async def generate(self, request: GenerateRequest) -> Generation:
        ids = request.input_ids.tolist()
        held = max((n for n in range(len(ids)) if tuple(ids[:n]) in self._cache), default=0)
        self.prefilled += len(ids) - held
        answer = await super().generate(request)
        whole = [*ids, *answer.token_ids_R.tolist()]
        self._cache |= {tuple(whole[:n]) for n in range(1, len(whole))}
        return answer

    async def load(self, folder: Path, version: int, confirm: Confirm) -> None:
        self._cache.clear()
        await super().load(folder, version, confirm)


async def prefilled(folder: Path, prefix_cache: bool, steps: int) -> int:
    """Tokens that four engines prefill for the batches of some steps, of 12 responses each."""
    engines = [CachingEngine(name) for name in "abcd"]
    world = World(folder, engines, max_response_tokens=24, segment_tokens=SEGMENT)
    async with world.sampling(most=PLACES, rounds=False, prefix_cache=prefix_cache):
        for step in range(1, steps + 1):
            await world.train(step)
        return sum(engine.prefilled for engine in engines)


def test_prefix_affinity_prefills_each_token_once(tmp_path: Path) -> None:
    """Segments have inputs of 1, 5, 9, ... tokens: of each one is new, that which was sampled last.

    Without affinity, responses change their engines when others have ended, and come with their whole input.
    """
    kept = run(prefilled(tmp_path / "kept", True, 1))
    assert kept == 4 * (6 + 2 + 4)
    spread = run(prefilled(tmp_path / "spread", False, 1))
    assert spread > 1.5 * kept


def slots(*loads: int) -> list[EngineSlot]:
    return [EngineSlot(ScriptedEngine(lambda _p, _s: "n"), is_up=True, load=load) for load in loads]


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ((5, 5), 1),
        ((5, 30), 1),  # a quarter of 100 places more
        ((5, 31), 0),
        ((40, 5), 1),
    ],
)
def test_affinity_tolerates_a_surplus_of_load(loads: Sequence[int], chosen: int) -> None:
    engines = slots(*loads)
    assert choose(engines, PLACES, CachedPrefix(engines[1], 0)) is engines[chosen]


def test_no_affinity_to_a_lost_engine_or_after_a_weight_load() -> None:
    first, last = slots(5, 6)
    cached = CachedPrefix(last, last.loads)
    assert choose([first, last], PLACES, cached) is last
    assert choose([first], PLACES, cached) is first
    last.loads += 1
    assert choose([first, last], PLACES, cached) is first
    assert choose([first, last], PLACES, None) is first


async def test_new_weights_end_prefix_affinity(tmp_path: Path) -> None:
    """A response that continues under new weights goes to the least loaded engine."""
    engines = [CachingEngine(name) for name in "ab"]
    world = World(tmp_path, engines)
    async with world.sampling(prefix_cache=True):
        pool = world.pool
        while (slot := pool.reserve(over_capacity=True)) is None:  # on a busy machine
            await asyncio.sleep(0.01)
        cached = pool.cached_at(slot)
        assert pool.reserve(over_capacity=True, cached=cached) is slot
        await world.weights(1)
        slot.load = 1 + max(one.load for one in pool._slots)  # the sampler has reserved others meanwhile
        assert pool.reserve(over_capacity=True, cached=cached) is not slot


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


async def test_an_engine_that_wakes_with_wrong_weights_does_not_sample(tmp_path: Path) -> None:
    """Four, of which one has garbage, as memory that was resumed is not a backup, and one releases none."""
    three = [*engines(), SleepingEngine("three"), SleepingEngine("four")]
    three[3].fails = "release"
    world = World(tmp_path, three)
    async with sampling_in_turns(world) as pool:
        await world.batch(1)
        released = await pool.release()
        assert sorted(released) == ["one", "three", "two"]
        three[1].digest = "garbage"
        await world.weights(1)
        assert sorted(await pool.wake(released)) == ["one", "three"]
        asked = len(three[1].asked)
        await pool.admit()
        assert len((await world.batch(2)).groups) == 4
        assert len(three[1].asked) == asked
        assert any("different weights" in str(event.get("reason")) for event in world.events)
