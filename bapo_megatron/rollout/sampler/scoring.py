"""Who rewards responses, for training and for evaluations."""

from __future__ import annotations

from typing import Protocol

from bapo_megatron.reward.pool import Judgement
from bapo_megatron.rollout.engines.pool import Report
from bapo_megatron.types import Prompt


class Judge(Protocol):
    """Rewards a response; never raises for what a response does."""

    async def judge(self, prompt: Prompt, response: str, tokens: int) -> Judgement:
        """The reward, and what kind of failure it stands for, if any."""


class SteadyJudge:
    """``judge``; where there is no room for a process or its files, the reward is ``failed``."""

    def __init__(self, judge: Judge, failed: float, report: Report) -> None:
        self._judge, self._failed, self._report = judge, failed, report

    async def judge(self, prompt: Prompt, response: str, tokens: int) -> Judgement:
        """Its judgement."""
        try:
            return await self._judge.judge(prompt, response, tokens)
        except OSError as error:
            self._report("reward_failed", detail=str(error))
            return Judgement(self._failed, "died", str(error))
