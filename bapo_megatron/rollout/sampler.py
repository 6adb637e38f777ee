"""Prompts in, groups of rewarded responses out."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.algo.filters import drop_uniform
from bapo_megatron.config import RunConfig
from bapo_megatron.data.prompts import PromptCursor
from bapo_megatron.interfaces import Engine, Reward
from bapo_megatron.rollout.rollout_metrics import rollout_metrics
from bapo_megatron.types import (
    GenerateRequest,
    Generation,
    Group,
    Prompt,
    Rollout,
    SamplingParams,
    StepBatch,
)


class SamplingAborted(Exception):
    """The engine was told to abort while a batch was sampled. The sampler stands where it stood before."""


class GroupSampler:
    """A ``Sampler`` (see interfaces.py) that waits for every response of a step."""

    def __init__(
        self, engine: Engine, prompts: Sequence[Prompt], reward: Reward, config: RunConfig, tokenizer: Any
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._reward = reward
        self._config = config
        self._tokenizer = tokenizer
        self._stop_token_ids = stop_token_ids(config.model.hf_path, tokenizer)
        self._cursor = PromptCursor(len(prompts), config.seed, config.data.shuffle)

    def next_batch(self, step: int) -> StepBatch:
        """``prompts_per_step`` groups; fewer, even none, if too many were uniform in every round.

        A call that raises (SamplingAborted, or what engine or reward raise) leaves the sampler as it was.
        """
        before = self.state()
        try:
            return self._sample_step()
        except BaseException:
            self.load_state(before)
            raise

    def state(self) -> dict[str, Any]:
        """The place in the dataset; plain JSON."""
        return {"cursor": self._cursor.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken. Raises ConfigError if the dataset is not the same."""
        self._cursor.load_state(state["cursor"])

    def _sample_step(self) -> StepBatch:
        rollout = self._config.rollout
        rounds = 1 + (rollout.resample_rounds if rollout.drop_uniform_groups else 0)
        clock = _Clock()
        sampled: list[Group] = []
        kept: list[Group] = []
        for _ in range(rounds):
            sampled_now = self._sample_groups(rollout.prompts_per_step - len(kept), clock)
            sampled += sampled_now
            kept += drop_uniform(sampled_now) if rollout.drop_uniform_groups else sampled_now
            if len(kept) == rollout.prompts_per_step:
                break
        metrics = rollout_metrics(sampled, kept, self._config.reward)
        return StepBatch(tuple(kept), {**metrics, **clock.metrics()})

    def _sample_groups(self, count: int, clock: _Clock) -> list[Group]:
        places = self._cursor.take(count)
        requests = [request for place in places for request in self._requests(*place)]
        with clock.sample:
            generations = self._engine.generate(requests)
        aborted = sum(generation.finish_reason == "abort" for generation in generations)
        if aborted:
            raise SamplingAborted(f"{aborted} of {len(generations)} responses were aborted")
        size = self._config.rollout.group_size
        with clock.reward:
            return [
                self._group(self._prompts[index], generations[number * size : (number + 1) * size])
                for number, (_, index) in enumerate(places)
            ]

    def _requests(self, epoch: int, index: int) -> list[GenerateRequest]:
        rollout = self._config.rollout
        return [
            GenerateRequest(
                request_id=f"{epoch}-{index}-{sample}",
                input_ids=self._prompts[index].token_ids_P,
                params=SamplingParams(
                    temperature=rollout.temperature,
                    max_new_tokens=rollout.max_response_tokens,
                    stop_token_ids=self._stop_token_ids,
                    seed=request_seed(self._config.seed, epoch, index, sample),
                ),
            )
            for sample in range(rollout.group_size)
        ]

    def _group(self, prompt: Prompt, generations: Sequence[Generation]) -> Group:
        return Group(prompt, tuple(self._rollout(prompt, generation) for generation in generations))

    def _rollout(self, prompt: Prompt, generation: Generation) -> Rollout:
        response = self._tokenizer.decode(generation.token_ids_R.tolist(), skip_special_tokens=True)
        reward = float(self._reward(prompt, response))
        if not math.isfinite(reward):
            raise ValueError(f"the reward of a response to prompt {prompt.prompt_id} is {reward}")
        return Rollout(
            token_ids_R=generation.token_ids_R,
            log_probs_R=generation.log_probs_R,
            versions_R=generation.versions_R,
            finish_reason=generation.finish_reason,
            reward=reward,
        )


def request_seed(run_seed: int, epoch: int, index: int, sample: int) -> int:
    """63 bits that depend on all four, the same on every machine."""
    entropy = np.random.SeedSequence([run_seed % 2**64, epoch, index, sample])
    return int(entropy.generate_state(1, np.uint64)[0] >> np.uint64(1))


def stop_token_ids(hf_path: Path, tokenizer: Any) -> tuple[int, ...]:
    """The tokenizer's end of sequence, and those of generation_config.json (chat models have several)."""
    stops = {tokenizer.eos_token_id}
    path = Path(hf_path) / "generation_config.json"
    if path.is_file():
        listed = json.loads(path.read_text()).get("eos_token_id")
        stops.update(listed if isinstance(listed, list) else [listed])
    return tuple(sorted(stops - {None}))


class _Stopwatch:
    """Adds up the seconds spent in its ``with`` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start


class _Clock:
    """Where the time of a step goes."""

    def __init__(self) -> None:
        self.sample = _Stopwatch()
        self.reward = _Stopwatch()

    def metrics(self) -> dict[str, float | None]:
        return {"time/sample_s": self.sample.seconds, "time/reward_s": self.reward.seconds}
