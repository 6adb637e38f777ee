"""Who rewards responses, for training and for evaluations."""

from __future__ import annotations

from typing import Protocol

from bapo_megatron.reward.pool import RewardResult
from bapo_megatron.rollout.engines.pool import Report
from bapo_megatron.types import Prompt


class Scorer(Protocol):
    """Rewards a response; never raises for what a response does."""

    async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
        """The reward, and what kind of failure it stands for, if any."""


class RobustScorer:
    """``judge``; where there is no room for a process or its files, the reward is ``failed``."""

    def __init__(self, scorer: Scorer, failed: float, report: Report) -> None:
        self._scorer, self._failed, self._report = scorer, failed, report

    async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
        """Its judgement."""
        try:
            return await self._scorer.score(prompt, response, tokens)
        except OSError as error:
            self._report("reward_failed", detail=str(error))
            return RewardResult(self._failed, "died", str(error))
