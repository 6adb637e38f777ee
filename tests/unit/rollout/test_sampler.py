"""The sampler on scripted engines, in virtual time."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.pool import RewardResult
from bapo_megatron.rollout.engines.requests import request_seed, stop_token_ids
from bapo_megatron.rollout.sampler import events
from bapo_megatron.rollout.sampler.step_batches import read_header
from bapo_megatron.rollout.sampler.write_ahead_log import Record, read_records
from bapo_megatron.types import GenerateRequest, Prompt, StepBatch
from tests.support.accounts import check_accounts
from tests.support.sampling import (
    EOS,
    Answer,
    Letters,
    ScriptedEngine,
    StartsWithY,
    World,
    mixed,
    prompt_ids,
    uniform_on,
    until,
)

pytestmark = pytest.mark.virtual_time


async def first_batch(folder: Path, answer: Answer, **world: Any) -> tuple[StepBatch, ScriptedEngine]:
    engine = ScriptedEngine(answer)
    made = World(folder, [engine], **world)
    async with made.sampling():
        return await made.batch(1), engine


async def test_oversampling_is_bounded_and_fewer_groups_are_legal(tmp_path: Path) -> None:
    engine = ScriptedEngine(uniform_on(*range(26)))
    world = World(tmp_path, [engine], prompts=40, max_oversampling=2.3, prompts_per_step=10)
    async with world.sampling():
        batch = await world.train(1)
        assert batch.groups == ()
        assert batch.metrics["rollout/groups_sampled"] == 23
        assert batch.metrics["sampled/reward/solved_none"] == 1.0
        assert batch.metrics["sampled/rollout/length_positive_mean"] is None
        nothing = [batch.metrics[f"reward/{name}"] for name in ("mean", "solved_none", "solved_all")]
        assert nothing == [None] * 3, "of the batch, which has no response"
        # Prompts 23 to 25 are uniform and replaced, in a new step's limit.
        assert prompt_ids(await world.batch(2)) == [*range(26, 36)]


class OneOfTwo:
    """Rewards by name whose sum is 1: the first letter says which is 1; of prompt 1 always the same."""

    async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
        first = float(response.startswith("y") or prompt.prompt_id == 1)
        return RewardResult(1.0, score=1.0, named={"correct": first, "format": 1 - first})


@pytest.mark.parametrize(("advantage", "kept"), [("gdpo", [0, 2, 3, 4]), ("grpo", [])])
async def test_equal_sums_of_different_rewards_train_where_they_are_told_apart(
    tmp_path: Path, advantage: str, kept: list[int]
) -> None:
    world = World(tmp_path, [ScriptedEngine(mixed)], scorer=OneOfTwo(), advantage=advantage)
    async with world.sampling():
        first = await world.batch(1)
    async with world.sampling():  # from the journal
        again = await world.batch(1)
    assert prompt_ids(first) == prompt_ids(again) == kept
    for group in (*first.groups, *again.groups):
        named = [one.named_rewards for one in group.rollouts]
        assert {one["correct"] for one in named} == {0.0, 1.0}
        assert all(one["correct"] + one["format"] == 1 for one in named)
    for group in read_header(world.journal, 1).groups:
        assert {one.named_rewards["format"] for one in group.responses} == {0.0, 1.0}


async def test_metrics_are_of_the_batch_and_of_all_that_was_sampled(tmp_path: Path) -> None:
    def answer(prompt: int, sample: int) -> str:
        return {0: "yy", 1: "nothing at all"}.get(prompt) or mixed(prompt, sample)

    metrics = (await first_batch(tmp_path, answer))[0].metrics
    # The batch: four groups with a right response of 2 tokens and two wrong ones of 3.
    assert metrics["reward/mean"] == metrics["reward/correct_fraction"] == pytest.approx(1 / 3)
    assert metrics["reward/solved_all"] == metrics["reward/solved_none"] == 0
    assert (metrics["rollout/tokens"], metrics["rollout/length_max"]) == (4 * 8, 3)
    assert metrics["rollout/truncated_fraction"] == 0
    counts = {name: metrics[f"rollout/groups{name}"] for name in ("", "_sampled", "_dropped")}
    assert counts == {"": 4, "_sampled": 6, "_dropped": 2}
    # Of 6 groups one is all right (3 tokens each), one all wrong (cut at 6), four have a right (2) and
    # two wrong ones (3).
    assert metrics["sampled/reward/mean"] == pytest.approx(7 / 18)
    assert metrics["sampled/reward/correct_fraction"] == pytest.approx(7 / 18)
    assert metrics["sampled/reward/solved_all"] == pytest.approx(1 / 6)
    assert metrics["sampled/reward/solved_none"] == pytest.approx(1 / 6)
    assert metrics["sampled/rollout/tokens"] == 9 + 18 + 4 * (2 + 3 + 3)
    assert metrics["sampled/rollout/length_mean"] == pytest.approx(59 / 18)
    assert metrics["sampled/rollout/length_max"] == 6
    assert metrics["sampled/rollout/length_positive_mean"] == pytest.approx((9 + 8) / 7)
    assert metrics["sampled/rollout/length_negative_mean"] == pytest.approx((18 + 24) / 11)
    assert metrics["sampled/rollout/truncated_fraction"] == pytest.approx(3 / 18)
    assert metrics["sampler/tokens_sampled"] == 59
    assert metrics["sampler/tokens_trained"] == 4 * 8
    assert metrics["sampler/tokens_dropped"] == 9 + 18
    assert metrics["sampler/tokens_kept"] == 0
    assert metrics["sampler/engines"] == 1
    assert json.loads(json.dumps(metrics)) == metrics


async def test_a_steps_metrics_are_of_its_batch_whenever_it_was_sampled(tmp_path: Path) -> None:
    """With a staleness of 1 the sampler is a batch ahead. The same after a kill, from the log alone."""

    def answer(prompt: int, sample: int) -> str:
        return "y" * (1 + prompt % 4) if sample == 0 else "n" * (prompt % 7)

    killed = World(tmp_path, [ScriptedEngine(answer)], max_staleness=1)
    async with killed.sampling(rounds=False):
        batches = [await killed.train(step) for step in (1, 2)]
        await until(lambda: len(killed.sampler._state.finished) == 8)
        killed.kill()
    continued = World(tmp_path, [ScriptedEngine(answer)], max_staleness=1)
    async with continued.sampling(first_step=3, rounds=False):
        batches += [await continued.train(step) for step in (3, 4)]
    for batch in batches:
        rollouts = [one for group in batch.groups for one in group.rollouts]
        lengths = [len(one.token_ids_R) for one in rollouts]
        found = {name: value for name, value in batch.metrics.items() if not name.startswith("sampled/")}
        assert found["rollout/groups"] == len(batch.groups) == 4
        assert found["reward/mean"] == pytest.approx(np.mean([one.reward for one in rollouts]))
        assert (found["rollout/tokens"], found["rollout/length_max"]) == (sum(lengths), max(lengths))
        cut = np.mean([one.finish_reason == "length" for one in rollouts])
        assert found["rollout/truncated_fraction"] == pytest.approx(cut)
    sampled = [batch.metrics["sampled/rollout/tokens"] for batch in batches]
    assert sum(sampled) == batches[-1].metrics["sampler/tokens_sampled"]
    assert sampled != [batch.metrics["rollout/tokens"] for batch in batches]


async def test_right_responses_are_those_without_penalties(tmp_path: Path) -> None:
    class Penalised:
        async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
            score = float(response.startswith("y"))
            return RewardResult(score - 0.75, score=score)

    metrics = (await first_batch(tmp_path, mixed, scorer=Penalised()))[0].metrics
    assert metrics["reward/mean"] == pytest.approx(1 / 3 - 0.75)
    assert metrics["reward/correct_fraction"] == pytest.approx(1 / 3)
    assert metrics["rollout/length_positive_mean"] == 2


async def test_request_seeds_are_of_the_place_in_the_data(tmp_path: Path) -> None:
    world = World(tmp_path, [engine := ScriptedEngine(mixed)], prompts=4)
    async with world.sampling():
        await world.train(1)
        await world.train(2)  # the second epoch
    assert len({request.params.seed for request in engine.asked}) == 24
    assert request_seed(0, 1, 2, 3) == 6463705122041852897  # a run that continues draws as before


async def test_rounds_give_the_same_groups_however_long_scoring_takes(tmp_path: Path) -> None:
    """A step that took what happened to be scored would depend on the machine's load."""

    class Slow(StartsWithY):
        def __init__(self, seed: int) -> None:
            self._chance = random.Random(seed)

        async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
            await asyncio.sleep(self._chance.random() / 20)
            return await super().score(prompt, response, tokens)

    for seed in range(2):
        world = World(tmp_path / str(seed), [ScriptedEngine(mixed)], 100, Slow(seed), max_staleness=2)
        async with world.sampling():
            batches = [await world.train(step) for step in range(1, 6)]
        for group in (group for batch in batches for group in batch.groups):
            assert [one.reward for one in group.rollouts] == [1, 0, 0], "not in the order of the responses"
        assert [prompt_ids(batch) for batch in batches] == [[*range(n, n + 4)] for n in range(0, 20, 4)]


async def test_no_step_is_taken_while_answers_wait_to_be_written(tmp_path: Path) -> None:
    """Else the trainer would get what there is: nothing, where the last answers of a round have just come."""
    world = World(tmp_path, [engine := ScriptedEngine(mixed)])
    engine.gate.clear()
    async with world.sampling() as sampler:
        batch = asyncio.create_task(world.batch(1))
        await until(lambda: len(engine.asked) == 12)
        async with sampler._loop.between_commits():
            engine.gate.set()
            await until(lambda: not sampler._dispatcher._running)
            assert not sampler._loop.is_exhausted
        assert prompt_ids(await batch) == [0, 1, 2, 3]


async def test_a_resume_samples_no_group_that_it_then_drops(tmp_path: Path) -> None:
    """A checkpoint at step 4 and a log to step 7, which has opened the groups of step 9 at the weights of 7.

    The trainer makes steps 5 to 7 again. At the weights of step 6, with the batch of 7, only the groups of
    step 8 may sample: those of step 9 would be two steps old, and were all dropped.
    """
    killed = World(tmp_path, [ScriptedEngine(mixed)], prompts=60, max_staleness=1)
    async with killed.sampling(rounds=False):
        for step in range(1, 7):
            await killed.train(step)
        await killed.batch(7)
        killed.engines[0].gate.clear()
        await killed.weights(7)
        await until(lambda: len(killed.sampler._state.open) == 4)
        killed.kill()

    engine = ScriptedEngine(mixed)
    again = World(tmp_path, [engine], prompts=60, max_staleness=1)
    async with again.sampling(first_step=5, rounds=False):
        assert again.sampler._state.served == 7
        assert {*again.sampler._state.open} == {32, 33, 34, 35}
        for step in (5, 6, 7):
            await again.batch(step)
            await asyncio.sleep(10)  # training
            assert not engine.asked, f"sampled for step 9 with the weights of step {step - 1}"
            await again.weights(step)
        batches = [await again.train(step) for step in (8, 9, 10)]
    assert prompt_ids(batches[1]) == [32, 33, 34, 35]
    assert again.sampler._state.tokens["dropped_stale"] == 0
    assert [batch.metrics["rollout/groups_stale"] for batch in batches] == [0, 0, 0]
    check_accounts(tmp_path / "journal", again.journal, again.config.rollout, again.dataset.prompts)


async def test_a_round_starts_when_the_trainer_asks(tmp_path: Path) -> None:
    """Not when the weights are new: a checkpoint comes between them, and its fork samples whole rounds."""
    world = World(tmp_path, [engine := ScriptedEngine(mixed)], prompts=100)
    async with world.sampling() as sampler:
        await world.train(1)
        await asyncio.sleep(1)
        assert (len(engine.asked), sampler.state()[events.OUTSTANDING]) == (12, [])
        await world.batch(2)
    assert len(engine.asked) == 24


async def test_without_overlap_nothing_is_sampled_during_training(tmp_path: Path) -> None:
    engine = ScriptedEngine(mixed)
    engine.holds = lambda request: request.input_ids[0] >= 4
    engine.gate.clear()
    world = World(tmp_path, [engine], max_staleness=2, overlap=False, prompts=100)
    async with world.sampling(rounds=False):
        await world.batch(1)  # then the requests of the other groups are aborted
        before = len(engine.asked)
        await asyncio.sleep(0.1)
        assert len(engine.asked) == before
        engine.gate.set()
        await world.weights(1)
        batch = await world.batch(2)
    assert prompt_ids(batch) == [4, 5, 6, 7]
    assert batch.groups[0].rollouts[0].versions_R.tolist() == [0, 1]


async def test_scored_groups_beyond_a_smaller_staleness_are_sampled_anew(tmp_path: Path) -> None:
    """They would wait for ever in the place of others."""
    ahead = World(tmp_path, [ScriptedEngine(mixed)], max_staleness=1)
    async with ahead.sampling(rounds=False):
        await ahead.batch(1)
        await until(lambda: len(ahead.sampler._state.finished) == 4)
        ahead.kill()
    world = World(tmp_path, [ScriptedEngine(mixed)], max_staleness=0)
    async with world.sampling(first_step=2, rounds=False):
        batch = await world.batch(2)
    assert prompt_ids(batch) == [4, 5, 6, 7]
    assert {int(one) for group in batch.groups for r in group.rollouts for one in r.versions_R} == {1}
    assert batch.metrics["rollout/groups_stale"] == 4


async def test_a_journal_of_other_settings_or_prompts_is_refused(tmp_path: Path) -> None:
    await first_batch(tmp_path, mixed)
    cooler, other = (World(tmp_path, [ScriptedEngine(mixed)], temperature=one) for one in (0.5, 1.0))
    other.dataset.prompts[3].token_ids_P[:] = 7  # by another chat template
    for world, says in ((cooler, "rollout.temperature=1.0, now it is 0.5"), (other, "prompts_sha256=")):
        with pytest.raises(ConfigError, match=f"{says}.* the same settings, data, tokenizer"):
            async with world.sampling():
                pass


async def test_only_one_process_writes_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bapo_megatron.rollout.sampler.write_ahead_log._LOCK_WAIT_S", 0.2)
    async with World(tmp_path, [ScriptedEngine(mixed)]).sampling():
        with pytest.raises(ConfigError, match="another process writes to the journal"):
            async with World(tmp_path, [ScriptedEngine(mixed)]).sampling():
                pass


async def test_segments_that_come_at_once_are_cut_into_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record counts its bytes in 32 bits: an abort of requests with routes brings more than that."""
    assert 2 * events.MOST_BYTES < 2**32
    monkeypatch.setattr(events, "MOST_BYTES", 2 * 3 * 12)  # two segments of three tokens, of 12 bytes each
    batch, _ = await first_batch(tmp_path, mixed)
    (log,) = (tmp_path / "journal").glob("segments-*.log")
    records = [one for one in read_records(log) if isinstance(one, Record) and one.kind == "segments"]
    assert {len(one.fields["parts"]) for one in records} == {2}
    assert prompt_ids(batch) == [0, 1, 2, 3]


@pytest.mark.parametrize("error", [ValueError("too long for the model"), RuntimeError("the server has died")])
async def test_a_request_that_engines_refuse_or_die_of_is_dropped_once(
    tmp_path: Path, error: Exception
) -> None:
    """All requests of its group are; the next prompt takes its place."""

    def trouble(request: GenerateRequest) -> None:
        if request.input_ids[0] == 1:
            raise error

    engine = ScriptedEngine(mixed)
    engine.trouble = trouble
    world = World(tmp_path, [engine])
    async with world.sampling() as sampler:
        assert prompt_ids(await world.batch(1, wait_s=60)) == [0, 2, 3, 4]
        assert not sampler._dispatcher._losses  # of the others that were in flight: a month has many
    [event] = [event for event in world.events if event["kind"] == "request_refused"]
    refused = isinstance(error, ValueError)
    assert ("too long" if refused else "20 engines were lost with request") in event["detail"]
    found = check_accounts(world.journal, world.journal, world.config.rollout, world.dataset.prompts)
    assert [group.end for group in found.groups[:5]] == ["trained", "refused", *["trained"] * 3]


async def test_a_scorer_that_cannot_start_a_worker_fails_its_scores(tmp_path: Path) -> None:
    class Broken(StartsWithY):
        async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
            if prompt.prompt_id == 1:
                raise OSError(24, "too many open files")
            return await super().score(prompt, response, tokens)

    world = World(tmp_path, [ScriptedEngine(mixed)], scorer=Broken())
    async with world.sampling():
        assert prompt_ids(await world.batch(1)) == [0, 2, 3, 4]
    [event] = [event for event in world.events if event["kind"] == "reward_failed"]
    assert (event["failure"], event["detail"]) == ("died", "[Errno 24] too many open files")


def test_stop_tokens_come_from_all_files(tmp_path: Path) -> None:
    """SGLang's stop tokens (``_get_hf_eos_token_id`` in model_config.py), and the tokenizer's."""
    assert stop_token_ids(tmp_path, Letters()) == (EOS,)
    for config, generation, stops in [([9, 3], 7, (3, 7, 9)), (None, [5, 3], (3, 5)), (None, 7, (3, 7))]:
        for name, ids in (("config", config), ("generation_config", generation)):
            (tmp_path / f"{name}.json").write_text(json.dumps({"eos_token_id": ids}))
        assert stop_token_ids(tmp_path, Letters()) == stops
    (tmp_path / "generation_config.json").write_text("{}")
    assert stop_token_ids(tmp_path, dataclasses.make_dataclass("T", [("eos_token_id", Any)])(None)) == ()
    llama = SimpleNamespace(eos_token_id=1, get_added_vocab=lambda: {"<|eom_id|>": 8, "<|eot_id|>": 9})
    assert stop_token_ids(tmp_path, llama) == (1, 8)  # ``attach_additional_stop_token_ids`` in SGLang
