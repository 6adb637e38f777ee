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
from bapo_megatron.rollout.sampler.events import FORKED, OUTSTANDING
from bapo_megatron.rollout.sampler.step_batches import read_header
from bapo_megatron.types import Prompt, StepBatch
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


async def test_groups_hold_the_engines_tokens_and_log_probs(tmp_path: Path) -> None:
    engine = ScriptedEngine(mixed)
    engine.version = 4
    world = World(tmp_path, [engine])
    async with world.sampling():
        batch = await world.batch(1)
        assert world.sampler.state()["served"] == 1  # its record is committed before its file is served
    assert prompt_ids(batch) == [0, 1, 2, 3]
    for group in batch.groups:
        assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.0, 0.0]
        first = group.rollouts[0]
        assert first.token_ids_R.tolist() == [ord("y"), EOS]
        assert first.log_probs_R.tolist() == pytest.approx([-0.01, -0.02])
        assert first.versions_R.tolist() == [0, 0]
        assert first.finish_reason == "stop"
    assert len(engine.asked) == 12
    assert {request.params.stop_token_ids for request in engine.asked} == {(EOS,)}
    assert {request.params.max_new_tokens for request in engine.asked} == {6}


async def test_steps_take_the_data_in_order(tmp_path: Path) -> None:
    world = World(tmp_path, [ScriptedEngine(mixed)], prompts=6)
    async with world.sampling():
        found = [prompt_ids(await world.train(step)) for step in (1, 2, 3)]
    assert found == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]


@pytest.mark.parametrize(("drops", "kept", "dropped"), [(True, [0, 3, 5, 6], 3), (False, [0, 1, 2, 3], 0)])
async def test_uniform_groups_are_replaced(
    tmp_path: Path, drops: bool, kept: list[int], dropped: int
) -> None:
    batch, engine = await first_batch(tmp_path, uniform_on(1, 2, 4), drop_uniform_groups=drops)
    assert prompt_ids(batch) == kept
    assert len(engine.asked) == (4 + dropped) * 3
    counts = [batch.metrics[f"rollout/groups{name}"] for name in ("", "_sampled", "_dropped")]
    assert counts == [4, 4 + dropped, dropped]


async def test_oversampling_is_bounded_and_fewer_groups_are_legal(tmp_path: Path) -> None:
    engine = ScriptedEngine(uniform_on(*range(26)))
    world = World(tmp_path, [engine], prompts=40, max_oversampling=2.3, prompts_per_step=10)
    async with world.sampling():
        batch = await world.train(1)
        assert batch.groups == ()
        assert batch.metrics["rollout/groups_sampled"] == 23
        assert batch.metrics["sampled/reward/solved_none"] == 1.0
        assert batch.metrics["sampled/rollout/length_positive_mean"] is None
        assert batch.metrics["reward/mean"] is None, "of the batch, which has no response"
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


async def test_request_seeds_are_unique_and_reproducible(tmp_path: Path) -> None:
    async def seeds(folder: Path) -> list[int | None]:
        engine = ScriptedEngine(mixed)
        world = World(folder, [engine], prompts=4)
        async with world.sampling():
            await world.train(1)
            await world.train(2)  # the second epoch
        return [request.params.seed for request in engine.asked]

    first, second = [await seeds(tmp_path / name) for name in "ab"]
    assert len(set(first)) == 24
    assert first == second
    assert request_seed(0, 1, 2, 3) == 6463705122041852897
    assert all(0 <= request_seed(-5, 0, n, 0) < 2**63 for n in range(100))


async def test_partial_rollout_continues_under_newer_weights(tmp_path: Path) -> None:
    """Two tokens for each response under each version: a response of five takes three steps."""

    def answer(prompt: int, sample: int) -> str:
        return "y" if sample == 0 else ("long" if prompt % 2 else "n")

    engine = ScriptedEngine(answer)
    world = World(tmp_path, [engine], budget_tokens=2, max_staleness=2, prompts=100)
    async with world.sampling(rounds=False):
        batches = [await world.train(step) for step in range(1, 7)]
    odd = [group for batch in batches for group in batch.groups if group.prompt.prompt_id % 2]
    assert len(odd) >= 4
    for group in odd:
        versions = group.rollouts[1].versions_R.tolist()
        first = versions[0]
        assert versions == [first, first, first + 1, first + 1, first + 2]
        assert group.rollouts[1].token_ids_R.tolist() == [*map(ord, "long"), EOS]
    for step, batch in enumerate(batches, 1):
        metrics = batch.metrics
        assert metrics["sampler/tokens_sampled"] == (
            metrics["sampler/tokens_trained"]
            + metrics["sampler/tokens_dropped"]
            + metrics["sampler/tokens_kept"]
        )
        oldest = [int(r.versions_R.min()) for group in batch.groups for r in group.rollouts]
        assert all(step - 1 - version <= 2 for version in oldest)


async def test_budgets_count_the_steps_since_a_group_was_opened(tmp_path: Path) -> None:
    """Groups 0 to 3 wait through step 1, which trains on nothing; 12 to 15 begin in step 2 with one budget.

    New weights come while their first request is at the engine: they get no more tokens of these, either.
    """

    def answer(prompt: int, sample: int) -> str:
        if prompt < 4:
            return "y" if sample else "lon"
        return "n" if prompt < 12 else ("yonge" if sample else "longe")

    engine = ScriptedEngine(answer)
    engine.holds = lambda request: request.request_id.startswith("12-")
    engine.gate.clear()
    world = World(tmp_path, [engine], budget_tokens=2, max_staleness=2, prompts=100, max_oversampling=1)
    world.version_of = lambda step: (0, 0, 8)[step]
    async with world.sampling(rounds=False):
        assert (await world.train(1)).groups == ()
        assert prompt_ids(await world.batch(2)) == [0, 1, 2, 3]
        await until(lambda: any(request.request_id == "12-2-0" for request in engine.asked))
        await world.weights(2)
        engine.gate.set()
        await until(lambda: len(world.sampler._state.open[12].responses[2].so_far.token_ids_R) > 0)
        await asyncio.sleep(0.05)
        world.kill()
    asked = {r.request_id: r.params.max_new_tokens for r in engine.asked}
    assert asked["0-0-2"] == 2  # the second budget of the first weights
    assert {asked[f"12-{sample}-0"] for sample in range(3)} == {2}
    assert "12-2-2" not in asked
    check_accounts(world.journal, world.journal, world.config.rollout, world.dataset.prompts)


async def test_rounds_give_the_same_groups_however_long_scoring_takes(tmp_path: Path) -> None:
    """A step that took what happened to be scored would depend on the machine's load."""

    class Slow(StartsWithY):
        def __init__(self, seed: int) -> None:
            self._chance = random.Random(seed)

        async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
            await asyncio.sleep(self._chance.random() / 20)
            return await super().score(prompt, response, tokens)

    for seed in range(4):
        world = World(tmp_path / str(seed), [ScriptedEngine(mixed)], 100, Slow(seed), max_staleness=2)
        async with world.sampling():
            batches = [await world.train(step) for step in range(1, 6)]
        for group in (group for batch in batches for group in batch.groups):
            assert [one.reward for one in group.rollouts] == [1, 0, 0], "not in the order of the responses"
        assert [prompt_ids(batch) for batch in batches] == [[*range(n, n + 4)] for n in range(0, 20, 4)]


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
    engine = ScriptedEngine(uniform_on(*range(0, 100, 3)))
    world = World(tmp_path / "run", [engine], prompts=100)
    async with world.sampling(rounds=True) as sampler:
        await world.train(1)
        before = len(engine.asked)
        await asyncio.sleep(0.1)
        assert len(engine.asked) == before
        state = sampler.state()
        assert state[OUTSTANDING] == []
        await world.batch(2)
        rest = [int(request.input_ids[0]) for request in engine.asked[before:]]
    fork = ScriptedEngine(engine.answer)
    forked = World(tmp_path / "fork", [fork], prompts=100)
    async with forked.sampling(2, {**state, FORKED: None}, rounds=True):
        await forked.batch(2)
    assert [int(request.input_ids[0]) for request in fork.asked] == rest


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


@pytest.mark.parametrize("policy", ["drop", "resample", "train"])
async def test_stale_groups_are_dropped_resampled_or_trained(tmp_path: Path, policy: str) -> None:
    """The first group hangs after its first tokens until step 3; one step late is allowed."""
    engine = ScriptedEngine(mixed)
    engine.holds = lambda request: request.input_ids[0] == 0 and request.prefix_tokens > 0
    engine.gate.clear()
    world = World(tmp_path, [engine], max_staleness=1, on_stale=policy, prompts=100, segment_tokens=1)
    async with world.sampling(rounds=False):
        assert prompt_ids(await world.train(1)) == [1, 2, 3, 4]
        assert prompt_ids(await world.train(2)) == [5, 6, 7, 8]  # now it is too old for step 3
        await asyncio.sleep(0.05)
        engine.gate.set()
        await asyncio.sleep(0.1)
        batches = [await world.train(step) for step in (3, 4, 5)]
        tokens = world.sampler.state()["tokens"]
    zero = [group for batch in batches for group in batch.groups if group.prompt.prompt_id == 0]
    assert sum(batch.metrics["rollout/groups_stale"] or 0 for batch in batches) == 1
    if policy == "train":
        assert zero[0].rollouts[0].versions_R.tolist() == [0, 2]
        assert prompt_ids(batches[0])[0] == 0
        return
    assert tokens["dropped_stale"] == 3  # the first token of each response
    assert len(zero) == (policy == "resample")
    assert all(version >= 1 for group in zero for r in group.rollouts for version in r.versions_R)


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


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"temperature": 0.5}, "rollout.temperature=1.0, now it is 0.5"),
        ({"prompts": 5}, "prompts=12, now it is 5"),
        ({}, "prompts_sha256=.* the same settings, data, tokenizer"),
    ],
)
async def test_a_journal_of_other_settings_is_refused(
    tmp_path: Path, other: dict[str, Any], says: str
) -> None:
    await first_batch(tmp_path, mixed)
    world = World(tmp_path, [ScriptedEngine(mixed)], **other)
    world.dataset.prompts[3].token_ids_P[:] = 3 if other else 7  # by another chat template
    with pytest.raises(ConfigError, match=says):
        async with world.sampling():
            pass


async def test_only_one_process_writes_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bapo_megatron.rollout.sampler.write_ahead_log._LOCK_WAIT_S", 0.2)
    async with World(tmp_path, [ScriptedEngine(mixed)]).sampling():
        with pytest.raises(ConfigError, match="another process writes to the journal"):
            async with World(tmp_path, [ScriptedEngine(mixed)]).sampling():
                pass


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
