"""Scoring of complete groups: decodes their responses, computes the rewards and detects scoring outages.

``group_scores`` returns a ``RewardResult`` per response of a group, and ``response_score`` that of one;
``FailedScores`` decides whether a group's results count; one whose scores all failed waits and is scored
again, and a long outage raises RunStopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from bapo_megatron.algo.advantages import LARGEST_REWARD
from bapo_megatron.errors import ConfigError, RunStopped
from bapo_megatron.reward.answer_text import THINKING, THOUGHT
from bapo_megatron.reward.pool import FailureReports, RewardResult
from bapo_megatron.rollout.engines.pool import Report
from bapo_megatron.rollout.engines.requests import Dataset, prompt_of_turn, response_text
from bapo_megatron.rollout.sampler.response import Response
from bapo_megatron.rollout.sampler.state import OpenGroup, SamplerState
from bapo_megatron.types import Prompt


class Scorer(Protocol):
    """Async reward function (protocol): ``score`` returns one response's ``RewardResult``, which may be a
    failure; a response's content never makes it raise. Implemented by ``RewardPool`` and ``RobustScorer``."""

    async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
        """Return the result for a text of ``tokens`` sampled tokens: a reward, or a kind of failure."""


class RobustScorer:
    """``Scorer`` that wraps another: turns its OSErrors (a worker cannot start) into failed scores, and
    reports the 1st, 10th, 100th ... failed score of each kind as a run event (``FailureReports``)."""

    def __init__(self, scorer: Scorer, failed: float, report: Report) -> None:
        self._scorer, self._failed, self._reports = scorer, failed, FailureReports(report)

    async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
        """Return the wrapped scorer's result, or a failed score (``died``) if it raises OSError."""
        try:
            result = await self._scorer.score(prompt, response, tokens)
        except OSError as error:
            result = RewardResult(self._failed, "died", str(error), place=type(error).__name__)
        self._reports.note(result)
        return result


async def group_scores(
    dataset: Dataset, scorer: Scorer, group: OpenGroup, failed: float
) -> list[RewardResult]:
    """Return the results of a complete group, in response order. ``failed``: as in ``response_score``."""

    def judged() -> list[tuple[Prompt, Response, str]]:
        prompt, responses = dataset.prompts[group.index], group.responses
        texts = dataset.texts([response.last_turn_R for response in responses])
        prompts = [judged_prompt(dataset.tokenizer, prompt, response) for response in responses]
        return list(zip(prompts, responses, texts, strict=True))

    each = await asyncio.to_thread(judged)  # slow for long responses
    return await asyncio.gather(*(response_score(scorer, *arguments, failed) for arguments in each))


def judged_prompt(tokenizer: Any, prompt: Prompt, response: Response) -> Prompt:
    """Return the prompt for scoring a response's last turn, with its branch's earlier turns in ``turns``."""
    ids_R, last, tree = response.so_far.token_ids_R, response.episode.last_turn_start, response.tree
    turns, forks = [], dict(tree.forks)
    for number in tree.way(len(tree.ends) - 1)[1][:-1]:
        start, (end, given) = tree.ends[number - 1] if number else 0, response.episode.turns[number]
        # The agent program's input of a fork is in template form.
        text = response_text(tokenizer, ids_R[start:end]) if given is None or number in forks else given
        if given is None:
            text = with_opened_thought(tokenizer, prompt, ids_R, start, text)
        turns.append({"role": "assistant" if given is None else "environment", "content": text})
    return replace(prompt_of_turn(tokenizer, prompt, ids_R, last), turns=turns)


def with_opened_thought(tokenizer: Any, prompt: Prompt, ids_R: np.ndarray, start: int, text: str) -> str:
    """Return the text of the turn at ``start``, prefixed by the thinking tag if the chat template opened a
    thinking part without an end; otherwise a call within the thoughts would look like a real one."""
    opened = prompt_of_turn(tokenizer, prompt, ids_R, start).opens_thinking
    return f"{THINKING}{text}" if opened and THOUGHT not in text else text


async def response_score(
    scorer: Scorer, prompt: Prompt, response: Response, text: str, failed: float
) -> RewardResult:
    """Return the result of a complete response: a failure with reward ``failed`` if its environment failed;
    otherwise the sum of its environment's rewards; without these, ``scorer``'s result for ``text``, the
    model's last turn. A reward that is too large or not finite counts as a failure."""
    episode = response.episode
    if episode.failure is not None:
        return RewardResult(failed, "environment", f"{episode.failure}: {episode.detail}")
    if episode.reward is not None:
        return _finite(RewardResult(episode.reward, score=episode.reward), failed)
    return await text_score(scorer, prompt, text, response.longest_sampled, failed)


async def text_score(scorer: Scorer, prompt: Prompt, text: str, tokens: int, failed: float) -> RewardResult:
    """Return ``scorer``'s result for a text of ``tokens`` tokens; failures as in ``response_score``."""
    return _finite(await scorer.score(prompt, text, tokens), failed)


def _finite(result: RewardResult, failed: float) -> RewardResult:
    if abs(result.reward) <= LARGEST_REWARD:
        return result
    return RewardResult(failed, "not finite", f"{result.reward:g}: a reward may be as large as 1e18")


ScoredGroup = tuple[OpenGroup, list[RewardResult]]
"""A complete group and its responses' results."""

RETRY_S = 10.0  # seconds between attempts to rescore waiting groups

_OUTAGE_GROUPS = 8
"""Consecutive groups without a score that count as an outage, at most ``groups_per_step`` but at least 2."""


class FailedScores:
    """Rescoring rules for groups whose scores all failed (a judge is down); many in a row are an *outage*.

    ``passes`` returns whether a group's results count. If not, the group waits; every ``RETRY_S`` seconds and
    after a successful score, ``GroupScoring`` rescores what ``to_score_again`` returns. Outside an outage a
    group is rescored once, and then its results count. In an outage one group is rescored at a time until a
    score succeeds; after ``outage_minutes`` RunStopped is raised. Before a run's first successful score no
    group is rescored, and ConfigError is raised once a whole step's groups wait. A resumed run rescores the
    waiting groups. No retry helps a group whose environments all failed: in an outage one such group is
    dropped at each retry, and the new one in its place shows whether environments work again.
    """

    def __init__(self, groups_per_step: int, outage_minutes: float, report: Report) -> None:
        self._groups_per_step, self._outage_minutes, self._report = groups_per_step, outage_minutes, report
        self._waiting: dict[int, ScoredGroup] = {}
        self._failed: set[int] = set()  # numbers of groups that failed since the last successful score
        self._since_s = 0.0  # time of the first of these failures
        self._has_scores = False  # whether any score of the run has succeeded

    def begin(self, sampler_state: SamplerState) -> None:
        """Skip the check of the first scores if the journal has a step or a successful score."""
        succeeded = any(len(summary.failures) < len(summary.rewards) for summary in sampler_state.scored)
        self._has_scores = sampler_state.served > 0 or succeeded

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def is_outage(self) -> bool:
        """Whether ``_outage_groups`` groups failed since the last score; then what passes is not used."""
        return len(self._failed) >= self._outage_groups

    def forget(self, number: int) -> None:
        self._waiting.pop(number, None)

    def passes(self, group: OpenGroup, results: list[RewardResult], is_last_try: bool, now_s: float) -> bool:
        """Return whether a group's results count; if not, the group waits. ``is_last_try``: failures count,
        in an outage only those of environments. Reports the start of an outage as a run event. Raises
        ConfigError if all scores of the first step failed."""
        if any(result.failure is None for result in results):
            self._has_scores = True
            self._failed.clear()
            return True
        if not self._failed:
            self._since_s = now_s
        is_new = group.number not in self._failed
        self._failed.add(group.number)
        if self._has_scores and is_new and len(self._failed) == self._outage_groups:
            told = f"{self._told(results)}; tried for {self._outage_minutes:g} minutes"
            self._report("reward_outage", detail=told)
        if self._has_scores and is_last_try and (not self.is_outage or _is_of_environments(results)):
            return True
        self._waiting[group.number] = group, results
        if not self._has_scores and len(self._waiting) >= self._groups_per_step:
            raise ConfigError(
                _all_failed([result for _, waiting in self._waiting.values() for result in waiting])
            )
        return False

    def to_score_again(self, now_s: float) -> tuple[list[OpenGroup], bool]:
        """Remove and return the waiting groups to rescore (in an outage, one), and whether this is their last
        try. Raises RunStopped if an outage has lasted ``outage_minutes``."""
        if not self._has_scores or not self._waiting:  # waiting groups may have been dropped as stale
            return [], False
        is_outage = self.is_outage
        (_, oldest), (_, newest) = (next(order(self._waiting.values())) for order in (iter, reversed))
        if is_outage and now_s - self._since_s >= self._outage_minutes * 60:
            raise RunStopped(
                f"no response could be scored for {self._outage_minutes:g} minutes (reward.outage_minutes): "
                f"{self._told(newest)}. Nothing was trained on them. Mend what scores, then give the same "
                "command: the responses are kept and are scored again, but failed episodes begin anew"
            )
        chosen = [group for group, _ in self._waiting.values()]
        chosen = chosen[:1] if is_outage else chosen
        for group in chosen:
            del self._waiting[group.number]
        return chosen, not is_outage or _is_of_environments(oldest)

    @property
    def _outage_groups(self) -> int:
        return max(2, min(_OUTAGE_GROUPS, self._groups_per_step))

    def _told(self, results: Sequence[RewardResult]) -> str:
        last = results[-1]
        return (
            f"{len(self._failed)} groups in a row have no score, the last for {last.failure}: {last.detail}"
        )


def _is_of_environments(results: Sequence[RewardResult]) -> bool:
    """Whether all failed in their episode, which is over."""
    return all(result.failure == "environment" for result in results)


def _all_failed(results: list[RewardResult]) -> str:
    first = results[0]
    if _is_of_environments(results):
        return (
            f"the environment of all {len(results)} responses of the first step failed, the first with\n\n"
            f"{first.detail}\n\nNothing was trained. Mend environment.function, environment.settings or its "
            "limits, then give another --run-dir: these responses are complete"
        )
    what = first.traceback or f"{first.failure}: {first.detail}"
    return (
        f"all {len(results)} scores of the first step failed, the first with\n\n{what}\n\n"
        "Nothing was trained. Mend the reward function or its limits (reward.time_limit_s, "
        "reward.memory_limit_mb), then give the same command: the responses are kept, and are scored again"
    )
