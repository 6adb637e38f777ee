"""Scoring: from the complete responses of a group to their rewards."""

from __future__ import annotations

import asyncio
from typing import Protocol

from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.failures import FailureReports
from bapo_megatron.reward.pool import RewardResult
from bapo_megatron.rollout.engines.pool import Report
from bapo_megatron.rollout.engines.requests import Dataset
from bapo_megatron.rollout.sampler.event_log.state import OpenGroup, SamplerState
from bapo_megatron.types import Prompt


class Scorer(Protocol):
    """A reward function for one response. It never raises for what a response does."""

    async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
        """The reward of a response of so many tokens; the kind of failure if it could not be scored."""


class RobustScorer:
    """A ``Scorer`` that reports failures, and whose score fails where the system lacks a process or file."""

    def __init__(self, scorer: Scorer, failed: float, report: Report) -> None:
        self._scorer, self._failed, self._reports = scorer, failed, FailureReports(report)

    async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
        """The reward that the inner scorer gives; ``failed`` if that raises OSError."""
        try:
            result = await self._scorer.score(prompt, response, tokens)
        except OSError as error:
            result = RewardResult(self._failed, "died", str(error), place=type(error).__name__)
        self._reports.note(result)
        return result


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


ScoredGroup = tuple[OpenGroup, list[RewardResult]]
"""A complete group and the results of its responses."""


class FirstStepScores:
    """The scores of a run's first step: groups whose scores all failed wait until another score succeeds.

    If none does, the run ends before its first update. The journal holds the groups without rewards then: the
    run that continues scores them again.
    """

    def __init__(self, groups_per_step: int) -> None:
        self._groups_per_step = groups_per_step
        self._waiting: list[ScoredGroup] = []
        self._is_over = False

    def begin(self, sampler_state: SamplerState) -> None:
        """Look whether the journal has a step, or a score that succeeded."""
        succeeded = any(len(one.failures) < len(one.rewards) for one in sampler_state.scored)
        self._is_over = sampler_state.served > 0 or succeeded

    def passed(self, group: OpenGroup, results: list[RewardResult]) -> list[ScoredGroup]:
        """The groups whose rewards now count, in the order in which they were scored.

        ConfigError if all scores of as many groups as a step has have failed.
        """
        self._waiting.append((group, results))
        if self._is_over or any(one.failure is None for one in results):
            self._is_over = True
            passed, self._waiting = self._waiting, []
            return passed
        if len(self._waiting) >= self._groups_per_step:
            raise ConfigError(_all_failed([one for _, found in self._waiting for one in found]))
        return []


def _all_failed(results: list[RewardResult]) -> str:
    first = results[0]
    what = first.traceback or f"{first.failure}: {first.detail}"
    limit = "; reward.time_limit_s and reward.memory_limit_mb are its limits" if not first.traceback else ""
    return (
        f"all {len(results)} scores of the first step failed, the first with\n\n{what}\n\n"
        f"Nothing was trained. Mend the reward function{limit}, then give the same command: the responses "
        "are kept, and are scored again"
    )
