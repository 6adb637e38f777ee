"""Rescoring of stored responses that could not be scored before: a judge was down, or a test timed out.

``unjudged_responses`` returns them, and ``score_again`` scores their stored texts and appends rows.
Sampling them again would favour responses that are quick to score. Only responses in an environment, which
scores them during the episode, are sampled again (``suite_task.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from bapo_megatron.config import RunConfig
from bapo_megatron.evaluation.responses import Responses, all_responses
from bapo_megatron.evaluation.scoring import ScoredResponse
from bapo_megatron.reward.pool import RewardPool
from bapo_megatron.rollout.engines.pool import Report
from bapo_megatron.rollout.sampler.scoring import Scorer
from bapo_megatron.types import Prompt

StoredResponse = tuple[ScoredResponse, str]


def unjudged_responses(path: Path, samples: int) -> list[StoredResponse]:
    """Return, sorted, those of each problem's first ``samples`` responses whose last row has a failure."""
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
    """Rescore a suite's unjudged responses in a reward pool of its own. Appends a row, which replaces the old
    one, for each that can now be scored, and prints their number."""

    async def with_pool() -> int:
        pool = RewardPool(config.reward, config.rollout.max_response_tokens)
        try:
            await pool.start()
            scorer = Scorer(pool, config.reward.failed, report)
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
    """Score the responses and store those that ``scorer`` could score. Returns their number."""

    async def judge(response: ScoredResponse, text: str) -> bool:
        prompt = prompts[response.problem]
        result = await scorer.score(prompt, text, response.tokens)
        if result.failure is not None:
            return False
        correct = result.score is not None and result.score >= right_from
        row = {**asdict(replace(response, correct=correct, failure=None)), "text": text}
        await asyncio.to_thread(log.append_all, [row])
        return True

    return sum(await asyncio.gather(*(judge(*response) for response in unjudged)))
