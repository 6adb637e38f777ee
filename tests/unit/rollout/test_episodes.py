"""Responses over several turns: their events, the journal cut anywhere, faults."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.config import RewardConfig
from bapo_megatron.environment import Reply
from bapo_megatron.environment.pool import Question, StepResult
from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.requests import Dataset
from bapo_megatron.rollout.sampler import turns
from bapo_megatron.rollout.sampler.events import (
    Given,
    answers_given,
    groups_opened,
)
from bapo_megatron.rollout.sampler.response import Response
from bapo_megatron.rollout.sampler.state import SamplerState
from bapo_megatron.rollout.sampler.step_batches import read_step, step_groups
from bapo_megatron.rollout.sampler.turns import Stepping, TurnTaker
from bapo_megatron.rollout.sampler.write_ahead_log import Record, read_records
from bapo_megatron.types import GIVEN, Prompt
from tests.support import accounts
from tests.support.environments import Async
from tests.support.episodes import Brackets, EpisodeWorld, HereSteps, check_cuts, counting, run, step_of
from tests.support.responses import answer, asked, rows_of, turn
from tests.support.sampling import Letters
from tests.support.tiers import slow_but
from tests.support.virtual_time import run_virtually

pytestmark = pytest.mark.virtual_time

STOP = 9


# --- events --------------------------------------------------------------------------------------

PROMPTS = [Prompt(n, np.array([n], np.int32), "", "test") for n in range(4)]


def state_of_one(identity: dict[str, Any] | None = None) -> SamplerState:
    state = SamplerState(PROMPTS, 2, identity)
    state.apply(groups_opened([(0, 0, 1)], 1))
    group = state.open[0]
    group.responses[0] = turn(Response(), 1, 2, STOP)
    return state


@pytest.mark.parametrize(
    ("start", "attempt", "is_applied"), [(3, 0, True), (2, 0, False), (4, 0, False), (3, 1, False)]
)
def test_an_answer_to_what_was_lost_to_damage_is_not_applied(
    start: int, attempt: int, is_applied: bool
) -> None:
    state = state_of_one()
    state.apply(answers_given([Given(state.open[0], 0, start, attempt, answer(20, text="x"))]))
    state.apply(Record("restarted", {"number": 17, "sample": 0, "why": ""}, {}))  # of a dropped one
    assert (state.open[0].responses[0].tokens == 4) == is_applied


def test_a_journal_of_another_version_is_refused_in_words() -> None:
    ours = {"environment.function": "a:B", "rollout.group_size": "2 episodes of an environment"}
    record = state_of_one(ours).snapshot()
    state_of_one(ours).apply(record)
    newer = Record("state", {**record.fields, "format": 4}, {})
    with pytest.raises(ConfigError, match="has format 4, this version of the program reads formats up to 3"):
        state_of_one(ours).apply(newer)
    older = {"rollout.group_size": 2}  # what a program that knows no environments compares
    with pytest.raises(ConfigError, match="rollout.group_size=2 episodes of an environment, now it is 2"):
        state_of_one(older).apply(record)


async def test_a_thought_that_the_template_opened_and_that_has_no_end_is_one() -> None:
    """Else a tool call within it would run. Also where an object is brought back."""
    questions: list[Question] = []

    class Asked(HereSteps):
        async def step(self, question: Question) -> StepResult:
            questions.append(question)
            return StepResult()

    response = Response()
    for said, answers in (("so</think>two", "a<think>\n"), ("2+2", "b"), ("3+3", None)):
        response = turn(response, *map(ord, said), STOP)
        response = response if answers is None else asked(response, *map(ord, answers))
    stepping: Any = Stepping(Asked(), Brackets(), lambda *_, **__: None, (STOP,), 8)
    opens = dataclasses.replace(PROMPTS[0], opens_thinking=True)
    await TurnTaker(stepping, Dataset([], Letters(), (STOP,)), 200).answer(opens, response, "e")
    sampled = [one.text for one in questions[0].turns() if one.kind == "sampled"]
    assert sampled == ["so</think>two", "<think>2+2", questions[0].turn] == [*sampled[:2], "3+3"]


# --- whole episodes ------------------------------------------------------------------------------


async def test_episodes_become_responses(tmp_path: Path) -> None:
    world = EpisodeWorld(tmp_path, counting)
    batch = await step_of(world)
    for first, second in rows_of(batch):
        assert first[:3] == ("turn0\x03[1:turn0]turn1\x03[2:turn1]end\x03", "stop", 2.0)
        assert first.mask == "1" * 6 + "-" * 9 + "1" * 6 + "-" * 9 + "1" * 4
        assert first.versions == [0 if one == "1" else GIVEN for one in first.mask]
        assert second[:3] == ("turn0\x03[1:turn0]end\x03", "stop", 1.5)
    metrics = batch.metrics
    assert metrics["environment/turns_mean"] == 2.5
    assert metrics["environment/turns_max"] == 3.0
    assert metrics["environment/given_share"] == pytest.approx(27 / (27 + 16 + 10))
    assert metrics["environment/finish_stop"] == 1.0
    assert metrics["environment/reward_turn_1"] == 0.5
    assert metrics["environment/reward_turn_2"] == 0.75
    assert metrics["episode/steps"] == 1.5
    assert metrics["episode/turns"] == 2.5
    assert metrics["rollout/length_mean"] == 13.0, "given tokens are not a length"
    assert metrics["sampler/tokens_sampled"] == metrics["rollout/tokens"] == 78.0


def test_the_journal_may_be_cut_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_cuts(lambda folder: EpisodeWorld(folder, counting), tmp_path, rows_of, monkeypatch)
    [log] = (tmp_path / "whole/journal").glob("segments-*.log")
    kinds = {one.kind for one in read_records(log) if isinstance(one, Record)}
    assert {"segments", "given", "judged"} <= kinds


class Forgetful(Async):
    """Answers with the number of its life, so a replay in another one differs."""

    lives = 0

    async def step(self, turn: str) -> Reply:  # type: ignore[override]
        """As its life says."""
        self.turns += 1
        return Reply(None, reward=1.0) if turn == "end" else Reply(f"life {Forgetful.lives}")


@pytest.mark.parametrize(
    ("settings", "turns", "reason", "text"),
    [
        ({"max_turns": 2}, ["a", "b", "c"], "turns", "a\x03[1:a]b\x03"),
        ({"max_response_tokens": 9}, ["a", "b", "c"], "length", "a\x03[1:a]b\x03"),
        ({"max_response_tokens": 7}, ["a", "b", "c"], "length", "a\x03"),
        ({"max_response_tokens": 8}, ["a", "b", "c"], "length", "a\x03[1:a]b"),
        ({}, ["two", "end"], "stop", "two\x03[a|b]end\x03"),
    ],
)
async def test_how_a_response_ends(
    tmp_path: Path, settings: dict[str, int], turns: list[str], reason: str, text: str
) -> None:
    world = EpisodeWorld(tmp_path, lambda prompt, sample, turn: turns[turn], **settings)
    batch = await step_of(world)
    assert {row[:2] for group in rows_of(batch) for row in group} == {(text, reason)}
    assert batch.metrics[f"environment/finish_{reason}"] == 1.0
    assert batch.metrics["rollout/truncated_fraction"] == float(reason == "length")


async def test_a_failed_environment_has_the_reward_failed_and_is_reported(tmp_path: Path) -> None:
    world = EpisodeWorld(tmp_path, lambda prompt, sample, turn: "end" if sample else "raise")
    world.config = dataclasses.replace(world.config, reward=RewardConfig(failed=-2.0, on_failure="value"))
    batch = await step_of(world)
    ends = [[row[1:3] for row in group] for group in rows_of(batch)]
    assert ends == [[("failed", -2.0), ("stop", 1.0)]] * 3
    assert batch.metrics["environment/finish_failed"] == 0.5
    assert batch.metrics["environment/failures"] == batch.metrics["reward/failures"] == 3.0
    (event,) = [event for event in world.events if event["kind"] == "environment_failed"]
    assert (event["failure"], event["count"]) == ("raised", 1)
    assert "the door is shut" in event["detail"]


def test_a_response_that_begins_again_and_again_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost(HereSteps):
        """No environment of a first sample can be brought back."""

        async def step(self, question: Question) -> StepResult:
            found = await super().step(question)
            is_first = question.task.episode.split("-")[1] == "0"
            return StepResult(failure="diverged", detail="it is gone") if is_first else found

    monkeypatch.setattr(turns, "MOST_RESTARTS", 3)
    world = EpisodeWorld(tmp_path, counting, Lost())
    world.config = dataclasses.replace(world.config, reward=RewardConfig(on_failure="value"))
    batch = run(step_of(world), monkeypatch)
    assert [[row.reason for row in group] for group in rows_of(batch)] == [["failed", "stop"]] * 3
    assert batch.metrics["environment/restarts"] == 9.0
    assert next(one for one in world.events if one["kind"] == "episode_restarted")["detail"] == "it is gone"
    names = {name for name, _ in world.steps.asked if name.startswith("0-0")}
    assert names == {f"0-0-{attempt}" for attempt in range(4)}


def test_a_first_step_whose_environments_all_fail_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = EpisodeWorld(tmp_path, lambda prompt, sample, turn: "raise")
    with pytest.raises(
        ConfigError, match=r"(?s)all 6 scores of .*environment: .*the door is shut.*an environment failed"
    ):
        run(step_of(world), monkeypatch)


@pytest.mark.parametrize("seed", slow_but(range(20), 0, 1, 2, 3))
def test_kills_at_any_moment_keep_accounts_and_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Some with a torn record. Answers come several at once, in any order, some too late; in one seed of two
    replays differ."""
    random = np.random.default_rng(seed)
    kind = Forgetful if seed % 2 else Async
    given_to: dict[int, list[int]] = {}

    async def live(world: EpisodeWorld, first: int, last: int, kill_after: float) -> int:
        """Steps until the end or the kill; the step that was reached."""
        step = first
        async with world.sampling(first, rounds=False, most=int(random.integers(1, 9))):
            end = asyncio.get_running_loop().time() + kill_after
            while step <= last:
                left = end - asyncio.get_running_loop().time()
                path = await world.sampler.next_batch(step, max(0.001, left)) if left > 0 else None
                if path is None:
                    world.kill()
                    return step
                numbers = step_groups(world.journal, step)
                assert given_to.setdefault(step, numbers) == numbers, "a step got other groups than before"
                for group in rows_of(read_step(path.parent, step)):
                    for sample, row in enumerate(group):
                        turns = re.sub(r"\[[^]]*\]", "", row.text).split("\x03")[:-1]
                        assert turns == ["turn0", *["turn1"] * (1 - sample), "end"]
                        assert row[1:3] == ("stop", 1.0 if kind is Forgetful else 2.0 - sample / 2)
                await world.weights(step)
                step += 1
        return step

    async def check() -> None:
        step, lives = 1, 0
        while step <= 5:
            lives += 1
            Forgetful.lives += 1
            steps = HereSteps(kind)
            steps.wait_s = lambda: float(random.choice([0.0, 0.01, 0.02, 0.2]))
            world = EpisodeWorld(tmp_path, counting, steps, max_staleness=1, segment_tokens=1 + seed % 5)
            world.engines[0].version = step - 1
            step = await live(world, step, 5, float(random.uniform(0.01, 0.3)) if lives < 30 else 1e9)
            await asyncio.sleep(0)
            if random.random() < 0.3:
                with sorted(world.journal.glob("segments-*.log"))[-1].open("ab") as file:
                    file.write(b"BPR1given" + random.bytes(int(random.integers(0, 40))))
        found = accounts.check_accounts(
            world.journal, world.journal, world.config.rollout, world.dataset.prompts
        )
        assert min(found.totals()[kind] for kind in ("trained", "dropped_stale")) > 0
        assert sorted(given_to) == [1, 2, 3, 4, 5]

    run_virtually(asyncio.wait_for(check(), 1000), random, monkeypatch)


async def test_an_observation_that_cannot_be_rendered_fails_its_response(tmp_path: Path) -> None:
    class Picky(Brackets):
        def given_ids(self, observation: str | Sequence[str], last_token: int) -> np.ndarray:
            """ValueError for the text that the first samples bring about."""
            if "odd" in observation:
                raise ValueError("not in this chat")
            return super().given_ids(observation, last_token)

    world = EpisodeWorld(tmp_path, lambda prompt, sample, turn: "end" if turn or sample else "odd")
    world.environments = {"": dataclasses.replace(world.stepping, template=Picky())}
    world.config = dataclasses.replace(world.config, reward=RewardConfig(on_failure="value"))
    batch = await step_of(world)
    ends = [[row[:2] for row in group] for group in rows_of(batch)]
    assert ends == [[("odd\x03", "failed"), ("end\x03", "stop")]] * 3
    (event,) = [event for event in world.events if event["kind"] == "environment_failed"]
    assert event["detail"] == "its observation cannot be rendered: ValueError('not in this chat')"


async def test_in_rounds_the_next_turns_go_out_together(tmp_path: Path) -> None:
    """An engine whose last bits depend on its batch gets the same batches, however long each step takes."""
    waits = iter([7.0, 3.0, 1.0, 0.0, 5.0, 2.0] * 10)
    world = EpisodeWorld(tmp_path, counting, segment_tokens=None)
    world.steps.wait_s = lambda: next(waits)
    asked: list[tuple[float, int]] = []
    clock = asyncio.get_running_loop().time
    world.engines[0].trouble = lambda request: asked.append((clock(), request.prefix_tokens))
    async with world.sampling(rounds=True):
        await world.batch(1)
    turns_of = [[time for time, start in asked if start == place] for place in (0, 15, 30)]
    assert [len(times) for times in turns_of] == [6, 6, 3]
    assert [len(set(times)) for times in turns_of] == [1, 1, 1]
    assert turns_of[1][0] - turns_of[0][0] >= 7.0, "the slowest step"
