"""Race conditions and edge cases of the sampler, which could fail silently."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.reward.pool import RewardResult
from bapo_megatron.rollout.sampler.step_batches import step_groups, steps_in
from bapo_megatron.rollout.sampler.write_ahead_log import Record, read_records
from bapo_megatron.types import GenerateRequest, Generation, Prompt
from tests.support.sampling import EOS, ScriptedEngine, World, mixed, prompt_ids


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 120))


async def test_nothing_is_requested_for_a_group_that_is_being_dropped(tmp_path: Path) -> None:
    """Weights come while the journal is written: nothing may be sent for a group that is to be dropped."""
    chance = np.random.default_rng(0)
    engine = ScriptedEngine(lambda p, s: ("y" if s == 0 else "n") + "a" * (13 if p % 4 == 0 else 2))
    answer = engine.generate

    async def slowly(request: GenerateRequest) -> Generation:
        await asyncio.sleep(chance.random() * 0.03)
        return await answer(request)

    engine.generate = slowly  # type: ignore[method-assign]
    settings = {"segment_tokens": 1, "max_response_tokens": 16, "on_stale": "drop"}
    world = World(tmp_path, [engine], max_staleness=1, prompts=1000, **settings)
    async with world.sampling(rounds=False, most=1000) as sampler:
        commit = sampler._journal.commit

        def slow_commit(records: Sequence[Record]) -> None:
            time.sleep(0.004)
            commit(records)

        sampler._journal.commit = slow_commit  # type: ignore[method-assign]
        for step in range(1, 21):
            await world.batch(step)
            await asyncio.sleep(0.02)
            await world.weights(step)
        assert world.sampler.state()["tokens"]["dropped_stale"] > 0
        async with asyncio.timeout(30):  # nothing is left behind that nobody samples
            while sampler._state.open:
                await asyncio.sleep(0.05)


async def test_an_always_stale_prompt_is_dropped_after_retries(tmp_path: Path) -> None:
    engine = ScriptedEngine(mixed)
    engine.holds = lambda request: request.input_ids[0] == 0 and request.prefix_tokens > 0
    engine.gate.clear()
    world = World(tmp_path, [engine], max_staleness=1, prompts=1000, segment_tokens=1)
    async with world.sampling(rounds=False):
        for step in range(1, 16):
            assert len((await world.train(step)).groups) == 4
        begun = {request.request_id.split("-")[0] for request in engine.asked if request.input_ids[0] == 0}
        assert len(begun) == 1 + 3


@pytest.mark.parametrize(
    ("error", "outcome"), [(OSError(24, "too many open files"), "failed"), (RuntimeError("a bug"), "raised")]
)
def test_a_scorer_that_raises_is_reported(tmp_path: Path, error: Exception, outcome: str) -> None:
    class Broken:
        async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
            if prompt.prompt_id == 1:
                raise error
            return RewardResult(float(response.startswith("y")))

    async def check() -> None:
        world = World(tmp_path, [ScriptedEngine(mixed)], scorer=Broken())
        async with world.sampling():
            if outcome == "raised":
                with pytest.raises(RuntimeError, match="a bug"):
                    await world.batch(1)
                return
            assert prompt_ids(await world.batch(1)) == [0, 2, 3, 4]  # all rewards of prompt 1 are equal
            [event] = [event for event in world.events if event["kind"] == "reward_failed"]
            assert event == {"kind": "reward_failed", "failure": "died", "detail": str(error), "count": 1}

    run(check())


async def test_a_request_that_crashes_engines_is_dropped(tmp_path: Path) -> None:
    engine = ScriptedEngine(mixed)

    def poison(request: GenerateRequest) -> None:
        if request.input_ids[0] == 1:
            raise RuntimeError("the server has died")

    engine.trouble = poison
    world = World(tmp_path, [engine])
    async with world.sampling() as sampler:
        batch = await world.batch(1, wait_s=60)
        assert not sampler._dispatcher._losses  # of the others that were in flight: a month has many
    assert prompt_ids(batch) == [0, 2, 3, 4]
    refused = next(event for event in world.events if event["kind"] == "request_refused")
    assert "20 engines were lost with request" in refused["detail"]


@pytest.mark.parametrize("text", ["y", "yaaaa"])
async def test_an_abort_at_the_stop_token_completes_the_response(tmp_path: Path, text: str) -> None:
    """The end of sequence, or the limit of six, with finish reason abort: the response is whole."""
    engine = ScriptedEngine(lambda prompt, sample: text if sample == 0 else "naaaaaaaa")
    answer = engine._answer

    def aborted(request: GenerateRequest, _aborted: bool) -> Generation:
        return dataclasses.replace(answer(request, aborted=False), finish_reason="abort")

    engine._answer = aborted  # type: ignore[method-assign]
    world = World(tmp_path, [engine])
    async with world.sampling():
        batch = await world.batch(1)
    first, second, _ = batch.groups[0].rollouts
    assert first.token_ids_R.tolist() == [*map(ord, text), EOS]
    assert (first.finish_reason, second.finish_reason) == ("stop", "length")
    assert len(second.token_ids_R) == 6


async def test_a_lost_record_of_a_step_does_not_train_its_groups_twice(tmp_path: Path) -> None:
    world = World(tmp_path, [ScriptedEngine(mixed)], max_staleness=3, prompts=1000)
    async with world.sampling(rounds=False):
        for step in (1, 2, 3):
            await world.train(step)
        world.kill()
    (path,) = world.journal.glob("segments-*.log")
    found = [record for record in read_records(path) if isinstance(record, Record)]
    second = next(r for r in found if r.kind == "batch" and r.fields["step"] == 2)
    content = bytearray(path.read_bytes())
    content[second.offset + 40] ^= 1
    path.write_bytes(content)
    async with world.sampling(first_step=4, rounds=False):
        await world.train(4)
        await world.train(5)
    numbers = [number for step in steps_in(world.journal) for number in step_groups(world.journal, step)]
    assert sorted(numbers) == list(range(20))
