"""Scoring of complete groups: decode the responses, compute their rewards, check the run's first scores.

``SamplerLoop`` scores a group as soon as its last response is complete, beside the sampling of others. Used
in ``evaluation/`` and this folder.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.answer_text import THINKING, THOUGHT
from bapo_megatron.reward.pool import FailureReports, RewardResult
from bapo_megatron.rollout.engines.pool import Report
from bapo_megatron.rollout.engines.requests import Dataset, prompt_of_turn, response_text
from bapo_megatron.rollout.sampler.response import Response
from bapo_megatron.rollout.sampler.state import OpenGroup, SamplerState
from bapo_megatron.types import Prompt


class Scorer(Protocol):
    """A reward function for one response (protocol).

    Async; it never raises because of a response's content. ``RewardPool`` is one, ``RobustScorer`` another
    around it; ``GroupScorer`` and evaluations call it.
    """

    async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
        """The reward of a response with ``tokens`` tokens; the kind of failure if it could not be scored."""


class RobustScorer:
    """A ``Scorer`` that reports failures, and turns an OSError (no process, no file) into a failed score.

    Around the reward pool, in the sampler's process and in `bapo eval`.
    """

    def __init__(self, scorer: Scorer, failed: float, report: Report) -> None:
        self._scorer, self._failed, self._reports = scorer, failed, FailureReports(report)

    async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
        """The inner scorer's reward; the reward ``failed`` if it raises OSError."""
        try:
            result = await self._scorer.score(prompt, response, tokens)
        except OSError as error:
            result = RewardResult(self._failed, "died", str(error), place=type(error).__name__)
        self._reports.note(result)
        return result


class GroupScorer:
    """The scorer of a complete group: decodes its responses, then scores all at once.

    Made by ``GroupSampler``, called by ``SamplerLoop``.
    """

    def __init__(self, dataset: Dataset, scorer: Scorer, failed: float) -> None:
        """``failed``: the reward of a response whose environment failed."""
        self._dataset, self._scorer, self._failed = dataset, scorer, failed

    async def score(self, group: OpenGroup) -> list[RewardResult]:
        """The results of a complete group, in the order of its responses."""
        prompt = self._dataset.prompts[group.index]
        judged = await asyncio.to_thread(self._judged, prompt, group)  # it takes a while for long responses
        return await asyncio.gather(*(response_score(self._scorer, *one, self._failed) for one in judged))

    def _judged(self, prompt: Prompt, group: OpenGroup) -> list[tuple[Prompt, Response, str]]:
        texts = self._dataset.texts([response.last_turn_R for response in group.responses])
        prompts = [judged_prompt(self._dataset.tokenizer, prompt, one) for one in group.responses]
        return list(zip(prompts, group.responses, texts, strict=True))


def judged_prompt(tokenizer: Any, prompt: Prompt, response: Response) -> Prompt:
    """The prompt as of the last turn of a response, see ``prompt_of_turn``, with the turns before that."""
    ids_R, last, start = response.so_far.token_ids_R, response.episode.last_turn_start, 0
    turns = []
    for end, given in response.episode.turns:
        if end > last:
            break
        text = _turn_text(tokenizer, prompt, ids_R[:end], start) if given is None else given
        turns.append({"role": "assistant" if given is None else "environment", "content": text})
        start = end
    return replace(prompt_of_turn(tokenizer, prompt, ids_R, last), turns=turns)


def _turn_text(tokenizer: Any, prompt: Prompt, ids_R: np.ndarray, start: int) -> str:
    """A turn as text; with the tag of its thinking part where the template has opened one without end."""
    text = response_text(tokenizer, ids_R[start:])
    opened = prompt_of_turn(tokenizer, prompt, ids_R, start).opens_thinking
    return f"{THINKING}{text}" if opened and THOUGHT not in text else text


async def response_score(
    scorer: Scorer, prompt: Prompt, response: Response, text: str, failed: float
) -> RewardResult:
    """The result of a complete response: ``failed`` if its environment failed; else the sum of what that
    gave; else ``scorer``'s reward for ``text``, the model's last turn."""
    episode = response.episode
    if episode.failure is not None:
        return RewardResult(failed, "environment", f"{episode.failure}: {episode.detail}")
    if episode.reward is not None:
        return RewardResult(episode.reward, score=episode.reward)
    return await scorer.score(prompt, text, response.sampled_tokens)


ScoredGroup = tuple[OpenGroup, list[RewardResult]]
"""A complete group and the results of its responses."""


class FirstStepScores:
    """The check of a run's first scores: a reward function that always fails ends the run before any update.

    Groups whose scores all failed are held back until another score succeeds. If none does, ``passed`` raises
    ConfigError; the journal keeps them without rewards, and a resumed run scores them again. Made by
    ``SamplerLoop``.
    """

    def __init__(self, groups_per_step: int) -> None:
        self._groups_per_step = groups_per_step
        self._waiting: list[ScoredGroup] = []
        self._is_over = False

    def begin(self, sampler_state: SamplerState) -> None:
        """Skip the check if the journal has a step, or a score that succeeded."""
        succeeded = any(len(one.failures) < len(one.rewards) for one in sampler_state.scored)
        self._is_over = sampler_state.served > 0 or succeeded

    def passed(self, group: OpenGroup, results: list[RewardResult]) -> list[ScoredGroup]:
        """Add a scored group; returns the groups whose rewards now count, in the order of scoring.

        ConfigError if all scores of a whole step's groups have failed.
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
    if all(one.failure == "environment" for one in results):
        return (
            f"the environment of all {len(results)} responses of the first step failed, the first with\n\n"
            f"{first.detail}\n\nNothing was trained. Mend environment.function or environment.settings, or "
            "raise environment.step_limit_s, then give another --run-dir: these responses are complete"
        )
    what = first.traceback or f"{first.failure}: {first.detail}"
    limit = "; reward.time_limit_s and reward.memory_limit_mb are its limits" if not first.traceback else ""
    return (
        f"all {len(results)} scores of the first step failed, the first with\n\n{what}\n\n"
        f"Nothing was trained. Mend the reward function{limit}, then give the same command: the responses "
        "are kept, and are scored again"
    )
