"""Rescoring, from their stored text, of responses that an earlier evaluation could not score.

``unjudged_responses`` returns them, and ``score_again`` appends rows with the new scores. A judge was down or
a test timed out. Sampling again instead would favour short responses over those that take long to score.
Environment responses are sampled again, since the environment scores them during the episode
(``evaluation/suite_task.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from bapo_megatron.config import RewardConfig, RunConfig
from bapo_megatron.evaluation.responses import Responses, all_responses
from bapo_megatron.evaluation.scoring import ScoredResponse
from bapo_megatron.reward.pool import RewardPool
from bapo_megatron.rollout.engines.pool import Report
from bapo_megatron.rollout.sampler.scoring import RobustScorer, Scorer, text_score
from bapo_megatron.types import Prompt

StoredResponse = tuple[ScoredResponse, str]


def unjudged_responses(path: Path, samples: int) -> list[StoredResponse]:
    """Return responses among the first ``samples`` of each problem whose last row has a failure, in order."""
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
    """Rescore a suite's unjudged responses and append rows that replace those of newly scored ones. Prints
    the number rescored."""

    async def with_pool() -> int:
        pool = RewardPool(config.reward, config.rollout.max_response_tokens)
        try:
            await pool.start()
            scorer = RobustScorer(pool, config.reward.failed, report)
            return await scored_now(unjudged, prompts, scorer, config.reward.correct, log)
        finally:
            await pool.close()

    print(f"{name}: {asyncio.run(with_pool())} of {len(unjudged)} could be scored now", flush=True)


async def scored_now(
    unjudged: Sequence[StoredResponse],
    prompts: Sequence[Prompt],
    scorer: Scorer,
    right_from: float,
    log: Responses,
) -> int:
    """Score and store the responses. Returns the number that ``scorer`` could score."""

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
