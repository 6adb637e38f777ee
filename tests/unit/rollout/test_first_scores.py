"""The check of a run's first scores: a reward that always fails ends the run, and a resume scores again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.pool import FailureReports, RewardResult
from bapo_megatron.types import Prompt
from tests.support.sampling import ScriptedEngine, StartsWithY, World, mixed, prompt_ids

BROKEN = RewardResult(0.0, "raised", "KeyError('x')", "Traceback ...\nKeyError: 'x'", "KeyError at r.py:3")


class FailsOn:
    """A reward whose scores fail on some prompts."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
        """The failure, or the score of the other reward."""
        if prompt.prompt_id in self.numbers:
            return BROKEN
        return await StartsWithY().score(prompt, response, tokens)


@pytest.mark.parametrize("rounds", [True, False])
async def test_a_first_step_of_failed_scores_ends_the_run_and_is_rescored(
    tmp_path: Path, rounds: bool
) -> None:
    broken = World(tmp_path, [ScriptedEngine(mixed)], scorer=FailsOn(*range(12)))
    with pytest.raises(ConfigError, match=r"(?s)all 12 scores of the first step failed.*KeyError: 'x'"):
        async with broken.sampling(rounds=rounds):
            await broken.batch(1)
    [event] = [event for event in broken.events if event["kind"] == "reward_failed" if event["count"] == 1]
    assert event["traceback"] == BROKEN.traceback

    engine = ScriptedEngine(mixed)
    mended = World(tmp_path, [engine])
    async with mended.sampling(rounds=rounds):
        batch = await mended.batch(1)
    assert prompt_ids(batch) == [0, 1, 2, 3]
    assert not [request for request in engine.asked if request.input_ids[0] < 4], "sampled once more"
    assert batch.metrics["reward/failures"] == 0
    assert [one.reward for one in batch.groups[0].rollouts] == [1, 0, 0]


async def test_held_back_groups_count_after_the_first_success(tmp_path: Path) -> None:
    world = World(tmp_path, [ScriptedEngine(mixed)], scorer=FailsOn(0, 1, 2))
    async with world.sampling():
        first = await world.train(1)
        assert prompt_ids(first) == [3, 4, 5, 6]
        assert first.metrics["reward/failures"] == 9
        world.score.numbers = tuple(range(12))  # from now on all fail, which is no first step
        second = await world.train(2)
    assert (prompt_ids(second), second.metrics["reward/failed_fraction"]) == ([], 1.0)


async def test_a_resumed_run_with_a_successful_score_skips_the_check(tmp_path: Path) -> None:
    engine = ScriptedEngine(mixed)
    engine.holds = lambda request: request.input_ids[0] > 0
    engine.gate.clear()
    killed = World(tmp_path, [engine])
    async with killed.sampling(rounds=False):
        async with asyncio.timeout(30):
            while not killed.sampler._state.finished:
                await asyncio.sleep(0.01)
        killed.kill()
    continued = World(tmp_path, [ScriptedEngine(mixed)], scorer=FailsOn(*range(12)))
    async with continued.sampling(rounds=False):
        assert prompt_ids(await continued.batch(1)) == [0]


def test_each_distinct_failure_is_reported_once_then_counted() -> None:
    events: list[dict[str, object]] = []
    reports = FailureReports(lambda kind, **fields: events.append({"kind": kind, **fields}))
    late = RewardResult(0.0, "time", "more than reward.time_limit_s=2")
    for result in [BROKEN] * 100 + [late] + [RewardResult(1.0)]:
        reports.note(result)
    told = [(event["failure"], event["count"], "traceback" in event) for event in events]
    assert told == [("raised", 1, True), ("raised", 10, False), ("raised", 100, False), ("time", 1, False)]
    for number in range(1000):  # a reward with a new error each time must not fill the disk
        reports.note(RewardResult(0.0, "raised", "", "", f"line {number}"))
    assert len(events) < 60
