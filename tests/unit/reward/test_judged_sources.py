"""Several sources of which one is judged behind an endpoint: who is asked, and with whose settings."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.config import DataConfig, ModelConfig, RewardConfig, RunConfig, SourceConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.pool import RewardPool, RewardResult
from bapo_megatron.types import Prompt
from tests.support.judge_server import judge_server, judged

pytestmark = pytest.mark.integration

MINE = "tests.support.reward_functions:with_more"
"""Its keyword argument `scale` is the reward; 1 without settings."""


def run_of(reward: RewardConfig, **rewards: str | None) -> RunConfig:
    """A run with a source of each name, and its reward."""
    sources = tuple(SourceConfig(Path(f"{name}.jsonl"), reward=one) for name, one in rewards.items())
    return RunConfig("run", ModelConfig(Path("model")), DataConfig(sources=sources), reward=reward)


def scored(config: RunConfig, *rewards: str) -> tuple[list[RewardResult], int]:
    """The response `\\boxed{2}` to 1+1, scored for prompts with these rewards; and the workers."""
    messages = [{"role": "user", "content": "1+1="}]

    async def main() -> tuple[list[RewardResult], int]:
        pool = RewardPool(config.reward, 100, config.reward_functions)
        await pool.start()
        try:
            prompts = [
                Prompt(0, np.array([3], np.int32), "2", "", messages=messages, reward=one) for one in rewards
            ]
            calls = [pool.score(prompt, r"\boxed{2}", 1) for prompt in prompts]
            return list(await asyncio.wait_for(asyncio.gather(*calls), 240)), len(pool._workers._workers)
        finally:
            await pool.close()

    return asyncio.run(main())


def test_each_response_goes_to_the_judge_or_to_a_worker_by_its_source() -> None:
    """The judge says 0, math-verify says right, and the user's function gets no setting of the judge's."""
    with judge_server(judged("Score: 0")) as server:
        settings = {"url": server.url, "model": "m"}
        reward = RewardConfig("llm_judge", settings=settings, correct=3.0, wrong=-1.0, workers=1)
        config = run_of(reward, sums="math", essays=None, others=MINE)
        config.check()
        found, workers = scored(config, "math", "", MINE, "llm_judge")
        assert len(server.bodies) == 1  # equal questions are asked once
    assert [one.reward for one in found] == [3.0, -1.0, 1.0, -1.0]
    assert not any(one.failure for one in found)
    assert workers == 1


def test_no_judge_is_asked_where_no_source_has_it() -> None:
    """Nothing listens at its address, and the pool starts."""
    settings = {"url": "http://127.0.0.1:9/v1", "model": "m", "give_up_s": 0.1}
    config = run_of(RewardConfig("llm_judge", settings=settings, workers=1), sums="math")
    assert [one.reward for one in scored(config, "math")[0]] == [1.0]


def test_settings_of_a_function_are_not_another_ones() -> None:
    config = run_of(
        RewardConfig(MINE, settings={"scale": 7.0}, workers=1), plain=None, named=MINE, sums="math"
    )
    assert [one.reward for one in scored(config, "", MINE, "math")[0]] == [7.0, 7.0, 1.0]


@pytest.mark.parametrize("function", ["math", "llm_judge", MINE])
def test_an_endpoint_without_settings_is_refused(function: str) -> None:
    settings = {} if function == "math" else {"url": "http://judge/v1"}
    config = run_of(RewardConfig(function, settings=settings), sums=None, essays="reward_model")
    with pytest.raises(
        ConfigError,
        match=rf"^data.sources\[essays\].reward=reward_model has no settings: reward.settings are those of "
        rf"reward.function={function}; set reward.function=reward_model, and name {function} as the reward",
    ):
        config.check()
    run_of(RewardConfig("reward_model"), sums="math", essays="reward_model").check()
