"""Responses of an earlier evaluation that could not be scored: scored again by their stored texts.

A judge was out, a test took too long. The engines are not asked again: another response in place of one whose
scoring takes long would favour short ones. A response of an environment is scored by what that gave, so it is
sampled again instead (``evaluation/suite_task.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from bapo_megatron.config import RewardConfig, RunConfig
from bapo_megatron.errors import ConfigError, RunStopped
from bapo_megatron.evaluation.responses import Responses, all_responses
from bapo_megatron.evaluation.scoring import ScoredResponse
from bapo_megatron.reward.pool import RewardPool
from bapo_megatron.rollout.engines.pool import Report
from bapo_megatron.rollout.sampler.scoring import RobustScorer, Scorer, text_score
from bapo_megatron.runtime.child_process import ChildError
from bapo_megatron.types import Prompt

StoredResponse = tuple[ScoredResponse, str]
"""A response with its text."""


def unjudged_responses(path: Path, samples: int) -> list[StoredResponse]:
    """Responses among the first ``samples`` of each problem whose last row has a failure, in order."""
    unjudged: dict[tuple[int, int], StoredResponse] = {}
    for response, text in all_responses(path):
        if response.failure is None:
            unjudged.pop((response.problem, response.sample), None)
        elif response.sample < samples:
            unjudged[response.problem, response.sample] = response, text
    return [unjudged[place] for place in sorted(unjudged)]


def score_again(
    name: str,
    unjudged: Sequence[StoredResponse],
    prompts: Sequence[Prompt],
    config: RunConfig,
    log: Responses,
    report: Report,
) -> None:
    """Score the responses of a suite, ``name``. Those that can be scored now are stored behind their former
    rows, which they replace; how many is printed. Without a judge they stay what they were, which is told."""

    async def with_pool() -> str:
        pool = RewardPool(config.reward, config.rollout.max_response_tokens)
        try:
            try:
                await pool.start()
            except (ChildError, ConfigError, RunStopped) as error:
                return f"{len(unjudged)} responses are not scored again: {error}"
            scorer = RobustScorer(pool, config.reward.failed, report)
            scored = await scored_now(unjudged, prompts, scorer, config.reward.correct, log)
            return f"{scored} of {len(unjudged)} could be scored now"
        finally:
            await pool.close()

    print(f"{name}: {asyncio.run(with_pool())}", flush=True)


async def scored_now(
    unjudged: Sequence[StoredResponse],
    prompts: Sequence[Prompt],
    scorer: Scorer,
    right_from: float,
    log: Responses,
) -> int:
    """Number of the responses that ``scorer`` scores; each is stored as soon as it is."""

    async def judge(response: ScoredResponse, text: str) -> bool:
        prompt = prompts[response.problem]
        result = await text_score(scorer, prompt, text, response.tokens, RewardConfig.failed)
        if result.failure is not None:
            return False
        correct = result.score is not None and result.score >= right_from
        row = {**asdict(replace(response, correct=correct, failure=None)), "text": text}
        await asyncio.to_thread(log.append_all, [row])
        return True

    return sum(await asyncio.gather(*(judge(*response) for response in unjudged)))
