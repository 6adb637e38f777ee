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
from bapo_megatron.environment.worker import Episodes
from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.pool import RewardResult
from bapo_megatron.rollout.sampler import turns
from bapo_megatron.rollout.sampler.events import (
    Given,
    answers_given,
    groups_opened,
    weights_loaded,
)
from bapo_megatron.rollout.sampler.response import Response
from bapo_megatron.rollout.sampler.state import SamplerState
from bapo_megatron.rollout.sampler.step_batches import read_step, step_groups
from bapo_megatron.rollout.sampler.stepper import Restart
from bapo_megatron.rollout.sampler.write_ahead_log import Record, read_records
from bapo_megatron.types import GIVEN, Prompt
from tests.support import accounts
from tests.support.environments import Async
from tests.support.episodes import Brackets, EpisodeWorld, HereSteps, check_cuts, counting, run, step_of
from tests.support.responses import answer, rows_of, turn
from tests.support.sampling import StartsWithY, until
from tests.support.tiers import slow_but

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


def test_a_newer_journal_is_refused_in_words() -> None:
    ours = {"environment.function": "a:B", "rollout.group_size": "2 episodes of an environment"}
    record = state_of_one(ours).snapshot()
    assert record.fields["format"] == 3
    assert "format" not in state_of_one().snapshot().fields
    state_of_one(ours).apply(record)
    newer = Record("state", {**record.fields, "format": 4}, {})
    with pytest.raises(
        ConfigError, match="journal has format 4, this version of the program reads formats up"
    ):
        state_of_one(ours).apply(newer)
    # What a program that knows no environments compares:
    with pytest.raises(ConfigError, match="rollout.group_size=2 episodes of an environment, now it is 2"):
        SamplerState(PROMPTS, 2, {"rollout.group_size": 2}).apply(record)


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


async def test_a_thought_that_the_template_opened_and_that_has_no_end_is_one(tmp_path: Path) -> None:
    """Else a tool call within it would run. Also where an object is brought back. The last turn is judged."""
    asked: list[list[str]] = []
    judged: list[tuple[bool, str]] = []

    class Quiet(Async):
        async def step(self, turn: str) -> Reply:
            return dataclasses.replace(await super().step(turn), reward=None)

    class Lost(HereSteps):
        async def step(self, question: Question) -> StepResult:
            self.episodes = Episodes(Quiet, {})
            asked.append([turn.text for turn in question.turns()])
            return await super().step(question)

    class Opens(Brackets):
        def given_ids(self, observation: str | Sequence[str], last_token: int) -> np.ndarray:
            """It opens a thought behind the first answer, and none behind the second."""
            opened = "" if isinstance(observation, str) else "<think>\n"
            return np.append(super().given_ids(observation, last_token), [*map(ord, opened)]).astype(np.int32)

    class Judge(StartsWithY):
        async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
            judged.append((prompt.opens_thinking, response))
            return await super().score(prompt, response, tokens)

    said = ["so</think>two", "<think>\n2+2", "3+3"]
    world = EpisodeWorld(tmp_path, lambda _prompt, _sample, turn: said[turn], Lost(), max_turns=3)
    world.environments = {"": dataclasses.replace(world.stepping, template=Opens())}
    opened = [dataclasses.replace(one, opens_thinking=True) for one in world.dataset.prompts]
    world.dataset = dataclasses.replace(world.dataset, prompts=opened)
    world.score = Judge()
    await step_of(world)
    assert {*judged} == {(False, "3+3")}
    one, two, three = said[0], "<think>2+2", said[2]
    assert max(asked, key=len) == [one, "a\nb", two, f"2:{two}", three]


def told(state: SamplerState) -> Any:
    """All that a state knows of its groups and tokens."""
    groups = {
        number: [(one.so_far.token_ids_R.tolist(), one.episode, one.finish_reason) for one in group.responses]
        for number, group in state.open.items()
    }
    return groups, sorted(state.finished), +state.tokens, dict(state.dropped), state.weights_step


@pytest.mark.parametrize("other", ["segments", "dropped", "weights", "restarted"])
async def test_an_answer_that_shares_a_commit_is_in_the_journal(tmp_path: Path, other: str) -> None:
    """What is applied and not written would be made again after a kill: a step that costs, or acts."""
    world = EpisodeWorld(tmp_path, counting)
    [engine] = world.engines
    world.steps.gate.clear()
    engine.gate.clear()
    engine.holds = lambda request: request.request_id.split("-")[1] == "1"
    async with world.sampling(rounds=False):
        loop, state, journal = world.sampler._loop, world.sampler._state, world.sampler._journal
        assert loop._stepper is not None
        commits: list[set[str]] = []
        commit = journal.commit
        journal.commit = lambda events: (commits.append({one.kind for one in events}), commit(events))[1]  # type: ignore[func-returns-value, method-assign, misc]
        await until(lambda: len(world.steps.asked) == 3)
        async with loop.between_commits():
            world.steps.gate.set()
            await until(lambda: len(loop._stepper._answers) == 3)
            if other == "segments":
                engine.gate.set()
                await until(lambda: len(loop._dispatcher._segments) == 3)
            elif other == "dropped":
                assert loop._drop(state.open[2], "refused")
            elif other == "weights":
                loop.post(weights_loaded(0, 0))
            else:
                loop._stepper._restarts.append(Restart(state.open[1], 1, "it is gone"))
            world.steps.gate.clear()
        assert any({"given", other} <= kinds for kinds in commits), f"not written together: {commits}"
        async with loop.between_commits():
            replayed = accounts.state_of(world.journal, world.dataset.prompts, 2)
            assert told(replayed) == told(state)
            kept = (0, 1) if other == "dropped" else (0, 1, 2)
            assert (2 in replayed.open) == (2 in kept), "an answer opens no dropped group again"
            assert ("2-0-0" in world.steps.forgotten) == (2 not in kept)
            assert [replayed.open[one].responses[0].episode.rewards for one in kept] == [(0.5,)] * len(kept)
            before = list(world.steps.asked)
            world.kill()
    again = EpisodeWorld(tmp_path, counting)
    await step_of(again)
    answered = {(f"{number}-0-0", "turn0") for number in kept}
    assert answered <= {*before}
    assert not answered & {*again.steps.asked}, "a step that was answered is taken again"


class Forgetful(Async):
    """Answers with the number of its life, so a replay in another one differs."""

    lives = 0

    async def step(self, turn: str) -> Reply:  # type: ignore[override]
        """As its life says."""
        self.turns += 1
        return Reply(None, reward=1.0) if turn == "end" else Reply(f"life {Forgetful.lives}")


async def test_a_replay_that_differs_restarts_its_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forgetful, "lives", 0)
    world = EpisodeWorld(tmp_path, counting, HereSteps(Forgetful))
    engine = world.engines[0]
    engine.holds = lambda request: request.prefix_tokens > 8
    engine.gate.clear()
    async with world.sampling(rounds=False):
        await until(lambda: sum(request.prefix_tokens > 8 for request in engine.asked) == 6)
        world.kill()
    Forgetful.lives += 1
    again = EpisodeWorld(tmp_path, counting, HereSteps(Forgetful))
    batch = await step_of(again)
    texts = [row.text for group in rows_of(batch) for row in group]
    assert texts == ["turn0\x03[life 1]turn1\x03[life 1]end\x03", "turn0\x03[life 1]end\x03"] * 3
    assert batch.metrics["environment/restarts"] == 6.0
    (event,) = [event for event in again.events if event["kind"] == "episode_restarted"]
    assert "with 'life 0', and after a replay with 'life 1'" in event["detail"]
    assert {name for name, _ in again.steps.asked} == {
        f"{group}-{sample}-{attempt}" for group in range(3) for sample in range(2) for attempt in range(2)
    }
    ours = accounts.state_of(again.journal, again.dataset.prompts, 2).tokens
    assert ours["sampled"] == ours["trained"] + ours["dropped_restarted"]
    assert ours["dropped_restarted"] > 0


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


def test_a_first_step_whose_environments_all_fail_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = EpisodeWorld(tmp_path, lambda prompt, sample, turn: "raise")
    with pytest.raises(
        ConfigError, match=r"(?s)environment of all 6 responses .*the door is shut.* environment.settings"
    ):
        run(step_of(world), monkeypatch)


@pytest.mark.parametrize("seed", slow_but(range(20), 0, 1, 2, 3))
def test_kills_at_any_moment_keep_accounts_and_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Some with a torn record. Answers come late and in any order; in one seed of two replays differ."""
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
            steps.wait_s = lambda: float(random.uniform(0, 0.05))
            world = EpisodeWorld(tmp_path, counting, steps, max_staleness=2, segment_tokens=1 + seed % 5)
            world.engines[0].version = step - 1
            step = await live(world, step, 5, float(random.uniform(0.01, 0.3)) if lives < 30 else 1e9)
            await asyncio.sleep(0)
            if random.random() < 0.3:
                with sorted(world.journal.glob("segments-*.log"))[-1].open("ab") as file:
                    file.write(b"BPR1given" + random.bytes(int(random.integers(0, 40))))
        found = accounts.check_accounts(
            world.journal, world.journal, world.config.rollout, world.dataset.prompts
        )
        assert found.totals()["trained"] > 0
        assert sorted(given_to) == [1, 2, 3, 4, 5]

    run(check(), monkeypatch)


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
    assert {name for name, _ in world.steps.asked if name.startswith("0-0")} == {
        f"0-0-{attempt}" for attempt in range(4)
    }


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
