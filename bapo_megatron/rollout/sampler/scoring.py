"""Scoring of complete groups: decode the responses, compute their rewards, notice an outage of the scores.

``SamplerLoop`` scores a group as soon as its last response is complete, beside the sampling of others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from bapo_megatron.algo.advantages import LARGEST_REWARD
from bapo_megatron.config import RewardConfig
from bapo_megatron.errors import ConfigError, RunStopped
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
    """The scorer of a complete group: decodes its responses, then scores all at once."""

    def __init__(self, dataset: Dataset, scorer: Scorer, reward: RewardConfig) -> None:
        self._dataset, self._scorer, self._reward = dataset, scorer, reward

    def rewards(self, results: Sequence[RewardResult]) -> list[float | None]:
        """The rewards of a group; None for a failed response that is left out of it."""
        leaves_out = self._reward.on_failure == "leave_out"
        return [None if result.failure and leaves_out else result.reward for result in results]

    async def score(self, group: OpenGroup) -> list[RewardResult]:
        """The results of a complete group, in the order of its responses."""
        prompt = self._dataset.prompts[group.index]
        judged = await asyncio.to_thread(self._judged, prompt, group)  # it takes a while for long responses
        return await asyncio.gather(
            *(response_score(self._scorer, *arguments, self._reward.failed) for arguments in judged)
        )

    def _judged(self, prompt: Prompt, group: OpenGroup) -> list[tuple[Prompt, Response, str]]:
        texts = self._dataset.texts([response.last_turn_R for response in group.responses])
        prompts = [judged_prompt(self._dataset.tokenizer, prompt, text) for text in group.responses]
        return list(zip(prompts, group.responses, texts, strict=True))


def judged_prompt(tokenizer: Any, prompt: Prompt, response: Response) -> Prompt:
    """The prompt as of the last turn of a response, see ``prompt_of_turn``, with the turns of its branch
    before that."""
    ids_R, last, tree = response.so_far.token_ids_R, response.episode.last_turn_start, response.tree
    turns, forks = [], dict(tree.forks)
    for number in tree.way(len(tree.ends) - 1)[1][:-1]:
        start, (end, given) = tree.ends[number - 1] if number else 0, response.episode.turns[number]
        if number in forks:  # what the program asked is in the template's form
            given = response_text(tokenizer, ids_R[start:end])
        text = _turn_text(tokenizer, prompt, ids_R[:end], start) if given is None else given
        turns.append({"role": "assistant" if given is None else "environment", "content": text})
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
    gave; else ``scorer``'s reward for ``text``, the model's last turn. A failure if no advantage can be
    computed from it."""
    episode = response.episode
    if episode.failure is not None:
        return RewardResult(failed, "environment", f"{episode.failure}: {episode.detail}")
    if episode.reward is not None:
        return _finite(RewardResult(episode.reward, score=episode.reward), failed)
    return await text_score(scorer, prompt, text, response.longest_sampled, failed)


async def text_score(scorer: Scorer, prompt: Prompt, text: str, tokens: int, failed: float) -> RewardResult:
    """The reward of ``scorer`` for a text of ``tokens`` tokens; a failure as of ``response_score``."""
    return _finite(await scorer.score(prompt, text, tokens), failed)


def _finite(result: RewardResult, failed: float) -> RewardResult:
    if abs(result.reward) <= LARGEST_REWARD:
        return result
    return RewardResult(failed, "not finite", f"{result.reward:g}: a reward may be as large as 1e18")


ScoredGroup = tuple[OpenGroup, list[RewardResult]]
"""A complete group and the results of its responses."""

RETRY_S = 10.0
"""Seconds between two attempts to score a group again while no score succeeds."""


_OUTAGE_GROUPS = 8
"""Groups without a score, one after the other, that are not an accident of their prompts; fewer if a step
has."""


class FailedScores:
    """The check of scores that fail one after the other, as a judge's do that is out.

    Groups whose scores all failed wait until another score succeeds; then they are scored once more, and what
    comes counts. Where none succeeds: in the first step of a run ConfigError, before any update, once a whole
    step's groups wait; later RunStopped after ``outage_minutes``, in which they are tried again and again.
    The journal keeps them without rewards, and a resumed run scores them again. Fewer groups than an outage
    has are tried once more, and then dropped; so are the first ones of an outage.
    """

    def __init__(self, groups_per_step: int, outage_minutes: float, report: Report) -> None:
        self._groups_per_step, self._outage_minutes, self._report = groups_per_step, outage_minutes, report
        self._waiting: dict[int, ScoredGroup] = {}
        self._failed: set[int] = set()
        """Numbers of the groups without a score since the last score."""
        self._since_s = 0.0
        """When the first of them had none."""
        self._has_scores = False
        """Whether a score of the run has succeeded."""
        self.scores = 0
        """Groups with a score in this process."""

    def begin(self, sampler_state: SamplerState) -> None:
        """Skip the check of the first step if the journal has a step, or a score that succeeded."""
        succeeded = any(len(summary.failures) < len(summary.rewards) for summary in sampler_state.scored)
        self._has_scores = sampler_state.served > 0 or succeeded

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def forget(self, number: int) -> None:
        self._waiting.pop(number, None)

    def passes(self, group: OpenGroup, results: list[RewardResult], is_last_try: bool, now_s: float) -> bool:
        """Whether the results of a group count; if not, the group waits.

        ``is_last_try``: they count, unless so many groups have failed in a row that what scores is out: a
        score before that says nothing. ConfigError if all scores of a first step's groups failed.
        """
        if any(result.failure is None for result in results):
            self.scores += 1
            self._has_scores = True
            self._failed.clear()
            return True
        if not self._failed:
            self._since_s = now_s
        is_new = group.number not in self._failed
        self._failed.add(group.number)
        if self._has_scores and is_last_try and len(self._failed) < self._outage_groups:
            return True
        self._waiting[group.number] = group, results
        if not self._has_scores and len(self._waiting) >= self._groups_per_step:
            raise ConfigError(
                _all_failed([result for _, waiting in self._waiting.values() for result in waiting])
            )
        if self._has_scores and is_new and len(self._failed) == self._outage_groups:
            self._report("reward_outage", detail=f"{self._told}; tried for {self._outage_minutes:g} minutes")
        return False

    def to_score_again(self, now_s: float) -> tuple[list[OpenGroup], bool]:
        """The waiting groups to score now, which then wait no more, and whether it is their last try.

        RunStopped if no score has succeeded for ``outage_minutes``.
        """
        if not self._has_scores or not self._waiting:  # which may have been dropped meanwhile, as too old
            return [], False
        is_outage = len(self._failed) >= self._outage_groups
        if is_outage and now_s - self._since_s >= self._outage_minutes * 60:
            raise RunStopped(
                f"no response could be scored for {self._outage_minutes:g} minutes (reward.outage_minutes): "
                f"{self._told}. Nothing was trained on them. Mend what scores, then give the same command: "
                "the responses are kept, and are scored again"
            )
        chosen = [group for group, _ in self._waiting.values()]
        chosen = chosen[:1] if is_outage else chosen
        for group in chosen:
            del self._waiting[group.number]
        return chosen, not is_outage

    @property
    def _outage_groups(self) -> int:
        return max(2, min(_OUTAGE_GROUPS, self._groups_per_step))

    @property
    def _told(self) -> str:
        _, results = next(reversed(self._waiting.values()))
        last = results[-1]
        return (
            f"{len(self._failed)} groups in a row have no score, the last for {last.failure}: {last.detail}"
        )


def _all_failed(results: list[RewardResult]) -> str:
    first = results[0]
    if all(result.failure == "environment" for result in results):
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
