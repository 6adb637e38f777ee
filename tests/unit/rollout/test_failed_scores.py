"""What becomes of responses that cannot be scored, and of a run whose scores all fail; in virtual time."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.config import RewardConfig
from bapo_megatron.errors import RunStopped
from bapo_megatron.reward.pool import Failure, RewardResult
from bapo_megatron.rollout.sampler.response import Episode, Response
from bapo_megatron.rollout.sampler.scoring import Scorer, response_score
from bapo_megatron.types import Prompt, StepBatch
from tests.support.accounts import check_accounts
from tests.support.sampling import ScriptedEngine, World, prompt_ids

pytestmark = pytest.mark.virtual_time

Fails = Callable[[int, str], bool]
"""From the prompt's number and the response to whether its score fails."""


class Judge:
    """A judge that gives 1 for a response that begins with a y, or that fails."""

    def __init__(self, fails: Fails) -> None:
        self.fails, self.asked = fails, 0
        self.failure: Failure = "endpoint"
        self.detail = "http://judge: HTTP 503"
        self.lasts_s: Callable[[int], float] = lambda _prompt: 1
        """From the prompt's number to the seconds of a score."""

    async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
        await asyncio.sleep(self.lasts_s(prompt.prompt_id))
        self.asked += 1
        if self.fails(prompt.prompt_id, response):
            return RewardResult(-2.0, self.failure, self.detail, place="503")
        score = float(response.startswith("y"))
        return RewardResult(score, score=score)


def world(folder: Path, fails: Fails, engine: ScriptedEngine | None = None, **reward: Any) -> World:
    """Groups of three: a right response of two tokens, and two wrong ones of three and four."""
    found = World(folder, [engine or ScriptedEngine(answer)], scorer=Judge(fails), prompts=40)
    found.config = dataclasses.replace(found.config, reward=RewardConfig(failed=-2.0, **reward))
    return found


async def first_step(one: World) -> StepBatch:
    async with one.sampling():
        return await one.train(1)


def answer(_prompt: int, sample: int) -> str:
    return ("y", "no", "nay")[sample]


@pytest.mark.parametrize("rewards", [(1e308, 1e308), (-1e19, None)])
async def test_a_reward_beyond_all_advantages_is_a_failure(rewards: tuple[float | None, ...]) -> None:
    """Of an environment, or of a model that scores: else the trainer stops at it, at every start."""
    nothing: Any = None
    response = dataclasses.replace(Response(), episode=Episode(rewards=rewards))
    found = await response_score(Scorer(nothing, -2.0, nothing), nothing, response, "")
    assert (found.failure, found.reward) == ("not finite", -2.0)

    class Model:
        async def score(self, *_of: object) -> RewardResult:
            return RewardResult(rewards[0] or 0.0)

    told: list[str] = []
    scorer = Scorer(Model(), -2.0, lambda kind, **_: told.append(kind))  # type: ignore[arg-type]
    found = await response_score(scorer, nothing, Response(), "")
    assert (found.failure, found.reward) == ("not finite", -2.0)
    assert told == ["reward_failed"]


def cut_nay(prompt: int, response: str) -> bool:
    return prompt in (1, 2) and response == "nay"


def check(found: World) -> None:
    check_accounts(found.journal, found.journal, found.config.rollout, found.dataset.prompts)


async def test_a_failed_response_is_left_out_of_its_group(tmp_path: Path) -> None:
    one = world(tmp_path, cut_nay)
    one.score.failure = "time"
    batch = await first_step(one)
    assert prompt_ids(batch) == [0, 1, 2, 3]
    assert [[r.reward for r in group.rollouts] for group in batch.groups] == [
        [1, 0, 0],
        [1, 0],
        [1, 0],
        [1, 0, 0],
    ]
    found = batch.metrics
    assert found["reward/failures"] == found["reward/timeouts"] == 2
    assert found["reward/failed_fraction"] == 2 / 12
    assert found["reward/mean"] == found["reward/correct_fraction"] == 4 / 10
    assert found["rollout/tokens"] == found["sampler/tokens_trained"] == 4 * (2 + 3) + 2 * 4
    assert found["sampled/rollout/tokens"] == found["sampler/tokens_sampled"] == 4 * (2 + 3 + 4)
    assert (found["sampler/tokens_dropped"], found["rollout/groups_failed"]) == (8, 0)
    check(one)


async def test_a_failed_response_may_have_a_value(tmp_path: Path) -> None:
    one = world(tmp_path, cut_nay, on_failure="value")
    batch = await first_step(one)
    assert [[r.reward for r in group.rollouts] for group in batch.groups][1] == [1, 0, -2]
    assert batch.metrics["reward/mean"] == pytest.approx((4 - 2 * 2) / 12)
    assert batch.metrics["sampler/tokens_dropped"] == 0
    check(one)


async def test_a_group_with_one_score_is_dropped_and_another_is_sampled(tmp_path: Path) -> None:
    one = world(tmp_path, lambda prompt, response: prompt == 1 and response != "y")
    one.config = dataclasses.replace(
        one.config, rollout=dataclasses.replace(one.config.rollout, drop_uniform_groups=False)
    )
    batch = await first_step(one)
    assert prompt_ids(batch) == [0, 2, 3, 4]
    assert (batch.metrics["rollout/groups_failed"], batch.metrics["sampled/reward/failures"]) == (1, 2)
    check(one)


async def test_a_resumed_run_with_a_successful_score_skips_the_check_of_the_first(tmp_path: Path) -> None:
    """Else a judge that is down at the resume would count as a reward that is wrong."""
    killed = world(tmp_path, lambda prompt, response: False)
    killed.score.lasts_s = lambda prompt: 1 if prompt == 0 else 60
    async with killed.sampling(rounds=False):
        assert await killed.sampler.next_batch(1, 30) is None
        killed.kill()
    continued = world(tmp_path, lambda prompt, response: True)
    async with continued.sampling(rounds=False):
        assert await continued.sampler.next_batch(1, 60) is None  # they wait for a score
    assert "reward_outage" in continued.event_kinds()


@pytest.mark.parametrize(("groups", "limit_s"), [(1, 70), (4, 25)])
async def test_prompts_that_cannot_be_scored_do_not_stop_a_run(
    tmp_path: Path, groups: int, limit_s: float
) -> None:
    """They are tried once more, as soon as others have a score or after 10 s, then dropped."""
    judge = Judge(lambda prompt, _: prompt % 5 == 4)
    one = World(tmp_path, [ScriptedEngine(answer)], 40, judge, prompts_per_step=groups)
    async with one.sampling():
        begun_s = asyncio.get_running_loop().time()
        batches = [await one.train(step) for step in range(1, 20 // groups + 1)]
        took_s = asyncio.get_running_loop().time() - begun_s
    numbers = [number for batch in batches for number in prompt_ids(batch)]
    assert numbers == [n for n in range(25) if n % 5 < 4]
    assert took_s < limit_s
    assert "reward_outage" not in one.event_kinds()


async def test_an_outage_costs_nothing_if_it_ends(tmp_path: Path) -> None:
    engine = ScriptedEngine(answer)
    one = world(tmp_path, lambda prompt, response: False, engine)
    async with one.sampling():
        await one.train(1)
        one.score.fails = lambda prompt, response: True
        assert await one.sampler.next_batch(2, 10 * 60) is None
        asked = len(engine.asked)
        one.score.fails = lambda prompt, response: False
        batch = await one.train(2)
    assert prompt_ids(batch) == [4, 5, 6, 7]
    assert len(engine.asked) == asked == 8 * 3
    assert batch.metrics["sampled/reward/failures"] == 0
    [event] = [event for event in one.events if event["kind"] == "reward_outage"]
    assert event["detail"] == (
        "4 groups in a row have no score, the last for endpoint: http://judge: HTTP 503; tried for 30 minutes"
    )


async def test_new_episodes_show_whether_environments_work_again(tmp_path: Path) -> None:
    """A failed episode is over: to score it again, for ever, would hold the run up until it stops."""
    engine = ScriptedEngine(answer)
    one = world(tmp_path, lambda prompt, response: False, engine, outage_minutes=12.0, on_failure="value")
    rollout = dataclasses.replace(one.config.rollout, drop_uniform_groups=False)
    one.config = dataclasses.replace(one.config, rollout=rollout)
    one.score.failure = "environment"
    async with one.sampling():
        await one.train(1)
        one.score.fails = lambda prompt, response: True
        assert await one.sampler.next_batch(2, 45) is None
        assert (4 + 4 + 3) * 3 <= len(engine.asked) <= (4 + 4 + 5) * 3  # a new group each ten seconds
        one.score.fails = lambda prompt, response: False
        batch = await one.train(2)
        assert len(batch.groups) == 4
        assert batch.metrics["rollout/groups_failed"] == len(engine.asked) / 3 - 8
        one.score.fails = lambda prompt, response: True
        steps = 2
        with pytest.raises(RunStopped, match="HTTP 503.*failed episodes begin anew"):
            while not (await one.batch(steps + 1, 800)).groups:
                await one.weights(steps := steps + 1)
        assert steps < 2 + 12 * 6 / 8  # of at most eight groups beyond a step's four, a group in ten seconds
        one.kill()
    check(one)


async def test_a_longer_outage_stops_the_run_and_the_responses_are_kept(tmp_path: Path) -> None:
    one = world(tmp_path, lambda prompt, response: False, outage_minutes=12.0)
    says = (
        r"no response could be scored for 12 minutes \(reward.outage_minutes\): 4 groups in a row have no "
        "score, the last for endpoint: http://judge: HTTP 503. Nothing was trained on them. Mend what scores"
    )
    async with one.sampling():
        await one.train(1)
        one.score.fails = lambda prompt, response: True
        begun_s = asyncio.get_running_loop().time()
        with pytest.raises(RunStopped, match=says):
            await one.sampler.next_batch(2, 800)
        assert 12 * 60 <= asyncio.get_running_loop().time() - begun_s < 13 * 60
        one.kill()
    check(one)
    engine = ScriptedEngine(answer)
    again = world(tmp_path, lambda prompt, response: False, engine)
    async with again.sampling(first_step=2):
        assert prompt_ids(await again.train(2)) == [4, 5, 6, 7]
    assert not engine.asked


async def test_an_outage_that_pauses_for_one_score_costs_few_groups(tmp_path: Path) -> None:
    """A judge that is overloaded scores one group, and fails as soon as all that wait come at once."""
    one = World(tmp_path, [ScriptedEngine(answer)], 40, Judge(lambda *_: False), prompts_per_step=16)
    async with one.sampling():
        await one.train(1)
        one.score.fails = lambda prompt, response: True
        assert await one.sampler.next_batch(2, 120) is None
        paused = iter(range(3))
        one.score.fails = lambda prompt, response: next(paused, None) is None
        assert await one.sampler.next_batch(2, 120) is None
        one.score.fails = lambda prompt, response: False
        batch = await one.train(2)
    assert batch.metrics["rollout/groups_failed"] < 8
    assert len([event for event in one.events if event["kind"] == "reward_outage"]) == 2
