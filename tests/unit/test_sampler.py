"""The sampler, on an engine that writes what the test tells it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from bapo_megatron.config import DataConfig, ModelConfig, RolloutConfig, RunConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.sampler import GroupSampler, SamplingAborted, request_seed, stop_token_ids
from bapo_megatron.types import FinishReason, GenerateRequest, Generation, Prompt

EOS = 99
Answer = Callable[[int, int], str]
"""From the prompt's number and the sample's number to the text of the response."""


class Letters:
    """One token a character."""

    eos_token_id = EOS

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(token) for token in ids if token != EOS)


class ScriptedEngine:
    """Prompt ``n`` is the token ``n``; the response is ``answer(n, sample)`` and EOS, cut at the limit."""

    weight_version = 4

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.calls: list[list[GenerateRequest]] = []
        self.aborting = False

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        self.calls.append(list(requests))
        return [self._one(request) for request in requests]

    def _one(self, request: GenerateRequest) -> Generation:
        sample = int(request.request_id.rsplit("-", 1)[1])
        text = self.answer(int(request.input_ids[0]), sample)
        ids = [*map(ord, text), EOS][: request.params.max_new_tokens]
        reason: FinishReason = "stop" if ids[-1] == EOS else "length"
        return Generation(
            request_id=request.request_id,
            token_ids_R=np.array(ids, np.int32),
            log_probs_R=np.full(len(ids), -0.5, np.float32),
            versions_R=np.full(len(ids), self.weight_version, np.int32),
            finish_reason="abort" if self.aborting else reason,
        )

    def abort(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None: ...
    def close(self) -> None: ...


def starts_with_y(prompt: Prompt, response: str) -> float:
    return 1.0 if response.startswith("y") else 0.0


def sampler(
    answer: Answer, *, prompts: int = 12, reward: Any = starts_with_y, **rollout: Any
) -> GroupSampler:
    config = RunConfig(
        name="test",
        model=ModelConfig(Path("/nowhere")),
        data=DataConfig(Path("/nowhere"), shuffle=False),
        rollout=RolloutConfig(prompts_per_step=4, group_size=3, max_response_tokens=6, **rollout),
        seed=1,
    )
    made = [Prompt(n, np.array([n], np.int32), "", "test") for n in range(prompts)]
    return GroupSampler(ScriptedEngine(answer), made, reward, config, Letters())


def engine_of(made: GroupSampler) -> ScriptedEngine:
    engine = made._engine
    assert isinstance(engine, ScriptedEngine)
    return engine


def mixed(prompt: int, sample: int) -> str:
    """Every group has right and wrong responses."""
    return "y" if sample == 0 else "no"


def uniform_on(*numbers: int) -> Answer:
    """All wrong on these prompts, mixed on the others."""
    return lambda prompt, sample: "no" if prompt in numbers else mixed(prompt, sample)


def prompt_ids(batch: Any) -> list[int]:
    return [group.prompt.prompt_id for group in batch.groups]


def test_groups_hold_what_the_engine_said() -> None:
    made = sampler(mixed)
    batch = made.next_batch(0)
    assert prompt_ids(batch) == [0, 1, 2, 3]
    for group in batch.groups:
        assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.0, 0.0]
        first = group.rollouts[0]
        assert first.token_ids_R.tolist() == [ord("y"), EOS]
        assert first.log_probs_R.tolist() == [-0.5, -0.5]
        assert first.versions_R.tolist() == [4, 4]
        assert first.finish_reason == "stop"
    (call,) = engine_of(made).calls
    assert len(call) == 12
    assert {request.params.stop_token_ids for request in call} == {(EOS,)}
    assert {request.params.max_new_tokens for request in call} == {6}


def test_steps_go_on_through_the_data() -> None:
    made = sampler(mixed, prompts=6)
    assert [prompt_ids(made.next_batch(step)) for step in range(3)] == [
        [0, 1, 2, 3],
        [4, 5, 0, 1],
        [2, 3, 4, 5],
    ]


def test_uniform_groups_are_replaced() -> None:
    made = sampler(uniform_on(1, 2, 4))
    batch = made.next_batch(0)
    assert prompt_ids(batch) == [0, 3, 5, 6]
    assert [len(call) // 3 for call in engine_of(made).calls] == [4, 2, 1]
    assert batch.metrics["rollout/groups_sampled"] == 7
    assert batch.metrics["rollout/groups_dropped"] == 3
    assert batch.metrics["rollout/groups"] == 4


def test_rounds_are_bounded_and_fewer_groups_are_legal() -> None:
    made = sampler(uniform_on(*range(11)), resample_rounds=1)
    batch = made.next_batch(0)
    assert batch.groups == ()
    assert batch.metrics["rollout/groups_sampled"] == 8
    assert batch.metrics["reward/solved_none"] == 1.0
    assert batch.metrics["rollout/length_positive_mean"] is None
    assert prompt_ids(made.next_batch(1)) == [11]


def test_uniform_groups_stay_if_told_so() -> None:
    made = sampler(uniform_on(1, 2), drop_uniform_groups=False)
    batch = made.next_batch(0)
    assert prompt_ids(batch) == [0, 1, 2, 3]
    assert batch.metrics["rollout/groups_dropped"] == 0
    assert len(engine_of(made).calls) == 1


def test_metrics_are_over_all_that_was_sampled() -> None:
    def answer(prompt: int, sample: int) -> str:
        if prompt == 0:
            return "yy"
        if prompt == 1:
            return "nothing at all"
        return mixed(prompt, sample)

    metrics = sampler(answer, resample_rounds=1).next_batch(0).metrics
    # Of 6 groups one is all right (3 tokens each), one all wrong (cut at 6), four have a right (2) and two
    # wrong ones (3).
    assert metrics["reward/mean"] == pytest.approx(7 / 18)
    assert metrics["reward/solved_all"] == pytest.approx(1 / 6)
    assert metrics["reward/solved_none"] == pytest.approx(1 / 6)
    assert metrics["rollout/tokens"] == 9 + 18 + 4 * (2 + 3 + 3)
    assert metrics["rollout/length_mean"] == pytest.approx(59 / 18)
    assert metrics["rollout/length_max"] == 6
    assert metrics["rollout/length_positive_mean"] == pytest.approx((9 + 8) / 7)
    assert metrics["rollout/length_negative_mean"] == pytest.approx((18 + 24) / 11)
    assert metrics["rollout/truncated_fraction"] == pytest.approx(3 / 18)
    assert metrics["time/sample_s"] is not None
    assert metrics["time/reward_s"] is not None
    assert json.loads(json.dumps(metrics)) == metrics


def test_each_request_has_a_seed_of_its_own_that_comes_again() -> None:
    def seeds() -> list[int | None]:
        made = sampler(mixed, prompts=4)
        made.next_batch(0)
        made.next_batch(1)  # the second epoch
        return [request.params.seed for call in engine_of(made).calls for request in call]

    assert len(set(seeds())) == 24
    assert seeds() == seeds()
    assert request_seed(0, 1, 2, 3) == 6463705122041852897
    assert all(0 <= request_seed(-5, 0, n, 0) < 2**63 for n in range(100))


def test_a_continued_sampler_gives_the_same_batches() -> None:
    made = sampler(uniform_on(1, 2, 4))
    made.next_batch(0)
    state = json.loads(json.dumps(made.state()))
    other = sampler(uniform_on(1, 2, 4))
    other.load_state(state)
    assert prompt_ids(other.next_batch(1)) == prompt_ids(made.next_batch(1))
    with pytest.raises(ConfigError, match="num_prompts"):
        sampler(mixed, prompts=5).load_state(state)


def test_an_aborted_step_leaves_the_sampler_where_it_was() -> None:
    made = sampler(mixed)
    made.next_batch(0)
    before = made.state()
    engine_of(made).aborting = True
    with pytest.raises(SamplingAborted, match="12 of 12"):
        made.next_batch(1)
    assert made.state() == before
    engine_of(made).aborting = False
    assert prompt_ids(made.next_batch(1)) == [4, 5, 6, 7]


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_must_be_finite(reward: float) -> None:
    made = sampler(mixed, reward=lambda prompt, response: reward)
    before = made.state()
    with pytest.raises(ValueError, match="prompt 0"):
        made.next_batch(0)
    assert made.state() == before


def test_stop_tokens_come_from_both_files(tmp_path: Path) -> None:
    assert stop_token_ids(tmp_path, Letters()) == (99,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 99]}')
    assert stop_token_ids(tmp_path, Letters()) == (5, 99)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert stop_token_ids(tmp_path, Letters()) == (7, 99)
    (tmp_path / "generation_config.json").write_text("{}")
    assert stop_token_ids(tmp_path, dataclasses.make_dataclass("T", [("eos_token_id", Any)])(None)) == ()
