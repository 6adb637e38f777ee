"""Scoring: from the complete responses of a group to their rewards."""

from __future__ import annotations

import asyncio
from typing import Protocol

from bapo_megatron.reward.pool import RewardResult
from bapo_megatron.rollout.engines.pool import Report
from bapo_megatron.rollout.engines.requests import Dataset
from bapo_megatron.rollout.sampler.event_log.state import OpenGroup
from bapo_megatron.types import Prompt


class Scorer(Protocol):
    """A reward function for one response. It never raises for what a response does."""

    async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
        """The reward of a response of so many tokens; the kind of failure if it could not be scored."""


class RobustScorer:
    """A ``Scorer`` that gives the reward ``failed`` where the system lacks a process or a file for it."""

    def __init__(self, scorer: Scorer, failed: float, report: Report) -> None:
        self._scorer, self._failed, self._report = scorer, failed, report

    async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
        """The reward that the inner scorer gives; ``failed``, with a report, if that raises OSError."""
        try:
            return await self._scorer.score(prompt, response, tokens)
        except OSError as error:
            self._report("reward_failed", detail=str(error))
            return RewardResult(self._failed, "died", str(error))


class GroupScorer:
    """The one step between complete responses and their rewards: decode, then score all at once."""

    def __init__(self, dataset: Dataset, scorer: Scorer) -> None:
        self._dataset, self._scorer = dataset, scorer

    async def score(self, group: OpenGroup) -> list[RewardResult]:
        """The results of a group whose responses are complete, in their order."""
        prompt = self._dataset.prompts[group.index]
        ids = [response.arrays()[0] for response in group.responses]
        texts = await asyncio.to_thread(self._dataset.texts, ids)  # it takes a while for long responses
        return await asyncio.gather(
            *(self._scorer.score(prompt, text, len(one)) for text, one in zip(texts, ids, strict=True))
        )
