"""Trial of a recipe's reward: one response to one row of its data, scored by a worker as in a run."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.child_process import ChildError

if TYPE_CHECKING:
    from bapo_megatron.config import RunConfig
    from bapo_megatron.reward.pool import RewardResult
    from bapo_megatron.types import Prompt


def tried_reward(config: RunConfig, prompt: Prompt) -> tuple[bool, str]:
    """Whether the reward can score a response to ``prompt``; its score, or why it has none, with the
    traceback."""
    response, what = _response(prompt.ground_truth)
    try:
        result = asyncio.run(_scored(config, prompt, response))
    except (ConfigError, ChildError) as error:
        return False, str(error)
    of_source = f" of source {prompt.source}" if prompt.source else ""
    where = f"row {prompt.prompt_id}{of_source} with {what}"
    if result.failure is None:
        return True, f"score {result.score:g} for {where}"
    return False, f"no score for {where}: {result.failure}: {result.detail}\n{result.traceback}".strip()


def _response(ground_truth: str) -> tuple[str, str]:
    """A response that a reward may well call right, and what it is."""
    from bapo_megatron.reward.code_tests import is_tests

    if is_tests(ground_truth):
        return "```python\npass\n```", "an empty program as the response"
    return f"\\boxed{{{ground_truth}}}", "its ground truth in a box as the response"


async def _scored(config: RunConfig, prompt: Prompt, response: str) -> RewardResult:
    from bapo_megatron.reward.pool import RewardPool

    reward = replace(config.reward, workers=1, function=prompt.reward or config.reward.function)
    pool = RewardPool(reward, config.rollout.max_response_tokens)
    await pool.start()
    try:
        return await pool.score(prompt, response, 1)
    finally:
        await pool.close()
