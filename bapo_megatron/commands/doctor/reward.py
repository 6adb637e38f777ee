"""Trial call of a recipe's reward: one response to one row of its data, scored as in a run.

It runs in the child process of ``recipe.py``, with one reward worker; an endpoint gets 20 s. A reward that
fails is a result, not an exception.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from bapo_megatron.errors import ConfigError, RunStopped
from bapo_megatron.runtime.child_process import ChildError

if TYPE_CHECKING:
    from bapo_megatron.config import RewardConfig, RunConfig
    from bapo_megatron.reward.pool import RewardResult
    from bapo_megatron.types import Prompt

ENDPOINT_DEADLINE_S = 20.0
"""Seconds within which a reward endpoint must answer."""


def try_reward(config: RunConfig, prompt: Prompt) -> tuple[bool, str]:
    """Whether the reward can score a response to ``prompt``; and its score, or the error with traceback."""
    response, what = _response(prompt.ground_truth)
    try:
        result = asyncio.run(_scored(config, prompt, response))
    except (ConfigError, ChildError, RunStopped) as error:
        return False, str(error)
    of_source = f" of source {prompt.source}" if prompt.source else ""
    where = f"row {prompt.prompt_id}{of_source} with {what}"
    if result.failure is None:
        return True, f"score {result.score:g} for {where}"
    return False, f"no score for {where}: {result.failure}: {result.detail}\n{result.traceback}".strip()


def _response(ground_truth: str) -> tuple[str, str]:
    """A plausible response to score, and its description."""
    from bapo_megatron.reward.code_tests import is_tests

    if is_tests(ground_truth):
        return "```python\npass\n```", "an empty program as the response"
    return f"\\boxed{{{ground_truth}}}", "its ground truth in a box as the response"


def _with_short_deadline(reward: RewardConfig) -> RewardConfig:
    """The reward's settings with one worker, and with a short deadline for an endpoint."""
    from bapo_megatron.reward.functions import is_endpoint

    deadline = {"give_up_s": min(ENDPOINT_DEADLINE_S, reward.settings.get("give_up_s", ENDPOINT_DEADLINE_S))}
    settings = reward.settings | (deadline if is_endpoint(reward.function) else {})
    return replace(reward, workers=1, settings=settings)


async def _scored(config: RunConfig, prompt: Prompt, response: str) -> RewardResult:
    from bapo_megatron.reward.functions import settings_for
    from bapo_megatron.reward.pool import RewardPool

    reward = settings_for(config.reward, prompt.reward or config.reward.function)
    pool = RewardPool(_with_short_deadline(reward), config.rollout.max_response_tokens)
    await pool.start()
    try:
        return await pool.score(prompt, response, 1)
    finally:
        await pool.close()
