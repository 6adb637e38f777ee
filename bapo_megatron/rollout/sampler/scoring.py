"""Scoring of complete groups: decodes their responses, computes the rewards and detects scoring outages.

``group_scores`` returns a ``RewardResult`` per response of a group, and ``response_score`` that of one;
``FailedScores`` decides whether a group's results count, or whether it waits and is scored again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from bapo_megatron.algo.advantages import LARGEST_REWARD
from bapo_megatron.errors import ConfigError, RunStopped
from bapo_megatron.reward.answer_text import THINKING, THOUGHT
from bapo_megatron.reward.pool import FailureReports, RewardPool, RewardResult
from bapo_megatron.rollout.engines.pool import Report
from bapo_megatron.rollout.engines.requests import Dataset, prompt_of_turn, response_text
from bapo_megatron.rollout.sampler.response import Response
from bapo_megatron.rollout.sampler.state import OpenGroup, SamplerState
from bapo_megatron.types import Prompt


class Scorer:
    """Scores responses by a reward pool. Its OSErrors (a worker cannot start), and rewards that are too large
    or not finite, become failed scores with the reward ``failed``. Reports the 1st, 10th, 100th ... failed
    score of each kind as a run event (``FailureReports``)."""

    def __init__(self, pool: RewardPool, failed: float, report: Report) -> None:
        self._pool, self.failed, self._reports = pool, failed, FailureReports(report)

    async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
        """Return the result for a text of ``tokens`` sampled tokens: a reward, or a kind of failure."""
        try:
            result = _finite(await self._pool.score(prompt, response, tokens), self.failed)
        except OSError as error:
            result = RewardResult(self.failed, "died", str(error), place=type(error).__name__)
        self._reports.note(result)
        return result


async def group_scores(dataset: Dataset, scorer: Scorer, group: OpenGroup) -> list[RewardResult]:
    """Return the results of a complete group, in response order."""

    def judged() -> list[tuple[Prompt, Response, str]]:
        prompt, responses = dataset.prompts[group.index], group.responses
        texts = dataset.texts([response.last_turn_R for response in responses])
        prompts = [judged_prompt(dataset.tokenizer, prompt, response) for response in responses]
        return list(zip(prompts, responses, texts, strict=True))

    each = await asyncio.to_thread(judged)  # slow for long responses
    return await asyncio.gather(*(response_score(scorer, *arguments) for arguments in each))


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


async def response_score(scorer: Scorer, prompt: Prompt, response: Response, text: str) -> RewardResult:
    """Return the result of a complete response: a failure if its environment failed; otherwise the sum of its
    environment's rewards; without these, ``scorer``'s result for ``text``, the model's last turn."""
    episode = response.episode
    if episode.failure is not None:
        return RewardResult(scorer.failed, "environment", f"{episode.failure}: {episode.detail}")
    if episode.reward is not None:
        return _finite(RewardResult(episode.reward, score=episode.reward), scorer.failed)
    return await scorer.score(prompt, text, response.longest_sampled)


def _finite(result: RewardResult, failed: float) -> RewardResult:
    if abs(result.reward) <= LARGEST_REWARD:
        return result
    return RewardResult(failed, "not finite", f"{result.reward:g}: a reward may be as large as 1e18")


RETRY_S = 10.0  # seconds between attempts to rescore waiting groups

_OUTAGE_GROUPS = 8
"""Consecutive groups without a score that count as an outage, at most ``groups_per_step`` but at least 2."""


class FailedScores:
    """Rules for groups whose scores all failed (a judge is down); many in a row are an *outage*.

    ``count`` returns whether a group's results count: with a score, or, outside an outage, at a retry.
    Otherwise the group waits (``pause``) and is scored again: once another group has a score, else about one
    group every ``RETRY_S`` seconds. An outage of ``outage_minutes`` raises RunStopped; before a run's first
    score no failure counts, and a whole step's groups without one raise ConfigError. No retry helps a group
    whose environments all failed: it counts at its retry also in an outage, and the new group in its place
    shows whether environments work again.
    """

    def __init__(self, groups_per_step: int, outage_minutes: float, report: Report) -> None:
        self._groups_per_step, self._outage_minutes, self._report = groups_per_step, outage_minutes, report
        self._outage_groups = max(2, min(_OUTAGE_GROUPS, groups_per_step))
        self._failed: dict[int, list[RewardResult]] = {}  # by number, groups since the last successful score
        self._since_s = 0.0  # time of the first of these failures
        self._has_scores = False  # whether any score of the run has succeeded
        self._works = asyncio.Event()
        self._waiting = 0

    def begin(self, sampler_state: SamplerState) -> None:
        """Skip the check of the first scores if the journal has a step or a successful score."""
        scored = sampler_state.scored
        self._has_scores = sampler_state.served > 0 or any(len(x.failures) < len(x.rewards) for x in scored)

    def count(self, number: int, results: list[RewardResult], is_retry: bool) -> bool:
        """Return whether the results of the group ``number`` count. Reports the start of an outage."""
        if any(result.failure is None for result in results):
            self._has_scores = True
            self._failed.clear()
            self._works.set()
            self._works.clear()
            return True
        now_s = asyncio.get_running_loop().time()
        if not self._failed:
            self._since_s = now_s
        is_new = number not in self._failed
        self._failed[number] = results
        failed, last, limit = len(self._failed), results[-1], f"{self._outage_minutes:g} minutes"
        if not self._has_scores:
            if failed >= self._groups_per_step:
                raise ConfigError(_all_failed([*chain(*self._failed.values())]))
            return False
        told = f"{failed} groups in a row have no score, the last for {last.failure}: {last.detail}"
        if is_new and failed == self._outage_groups:
            self._report("reward_outage", detail=f"{told}; tried for {limit}")
        is_outage = failed >= self._outage_groups
        if is_outage and now_s - self._since_s >= self._outage_minutes * 60:
            raise RunStopped(
                f"no response could be scored for {limit} (reward.outage_minutes): {told}. Nothing was "
                "trained on them. Mend what scores, then give the same command: the responses are kept and "
                "are scored again, but failed episodes begin anew"
            )
        return is_retry and (not is_outage or _is_of_environments(results))

    async def pause(self) -> None:
        """Wait until a score succeeds, or until it is this group's turn to be scored again."""
        self._waiting += 1
        try:
            async with asyncio.timeout(RETRY_S * self._waiting):
                await self._works.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting -= 1


def _is_of_environments(results: Sequence[RewardResult]) -> bool:
    """Whether all failed in their episode, which is over."""
    return all(result.failure == "environment" for result in results)


def _all_failed(results: list[RewardResult]) -> str:
    first = results[0]
    return (
        f"all {len(results)} scores of the first step failed, the first with\n\n"
        f"{first.traceback or f'{first.failure}: {first.detail}'}\n\n"
        "Nothing was trained. Mend the reward function, its settings or limits, then give the same command: "
        "the responses are kept, and are scored again. Where an environment failed, mend that, and give "
        "another --run-dir: its responses are complete"
    )
