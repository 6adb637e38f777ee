"""Background scoring of complete groups, part of ``SamplerLoop``; drops groups useless for training.

``GroupScoring.begin(group)`` starts a task when the last response is complete: it computes the rewards
(``scoring.group_scores``), in distillation also the teacher's log-probs, and posts them as an event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from bapo_megatron.algo.advantages import is_uniform
from bapo_megatron.config import RunConfig
from bapo_megatron.reward.pool import RewardResult
from bapo_megatron.rollout.engines.pool import Report
from bapo_megatron.rollout.engines.requests import Dataset
from bapo_megatron.rollout.sampler.events import group_scored
from bapo_megatron.rollout.sampler.scoring import FailedScores, Scorer, group_scores
from bapo_megatron.rollout.sampler.state import FinishedGroup, OpenGroup, SamplerState
from bapo_megatron.rollout.sampler.teacher import Teacher, group_log_probs
from bapo_megatron.rollout.sampler.write_ahead_log import Record


class GroupScoring:
    """Background scoring of groups: ``begin`` starts a complete group's task. It posts
    the rewards as an event, and drops the group if it has too few scores or, with
    ``rollout.drop_uniform_groups``, equal rewards (and equal named rewards, if the advantage may read them).
    Groups whose scores all failed wait and are rescored (``FailedScores``)."""

    def __init__(
        self, config: RunConfig, dataset: Dataset, scorer: Scorer, report: Report, teacher: Teacher | None
    ) -> None:
        rollout, reward = config.rollout, config.reward
        self._drops_uniform = rollout.drop_uniform_groups
        self._reads_named = ":" in config.algorithm.advantage or config.algorithm.advantage == "gdpo"
        """Whether the advantage may use named rewards."""
        self._dataset, self._scorer, self._reward = dataset, scorer, reward
        self._failed = FailedScores(rollout.prompts_per_step, reward.outage_minutes, report)
        self._teacher = teacher
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def start(
        self,
        state: SamplerState,
        post: Callable[[Record], None],
        drop: Callable[[OpenGroup, str], bool],
        end: Callable[[Exception], None],
    ) -> list[FinishedGroup]:
        """Set the callbacks; return the finished groups that lack log-probs of a teacher added later, to be
        dropped. ``post`` takes an event, ``drop`` a group and a reason, ``end`` an error to end the loop."""
        self._post, self._drop, self._end = post, drop, end
        self._failed.begin(state)
        if not self._teacher:
            return []
        return [
            finished
            for finished in state.finished.values()
            if any(rollout.teacher_log_probs_R is None for rollout in finished.group.rollouts)
        ]

    @property
    def is_busy(self) -> bool:
        return bool(self._tasks)

    def begin(self, group: OpenGroup) -> None:
        self._tasks[group.number] = task = asyncio.create_task(self._score(group))
        task.add_done_callback(self._note_error)

    def cancel(self, number: int) -> None:
        if task := self._tasks.pop(number, None):
            task.cancel()

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _score(self, group: OpenGroup) -> None:
        """Score a group, post its rewards, and drop it if it is useless for training."""
        results = await self._results(group)
        failures = [result.failure for result in results if result.failure]
        # Without any score `reward.failed` would be the reward of all, for what says nothing about them.
        leaves_out = self._reward.on_failure == "leave_out" or len(failures) == len(results)
        rewards = [None if result.failure and leaves_out else result.reward for result in results]
        named = [result.named for result in results]
        why = self._why_useless(rewards, named)
        taught = None
        if self._teacher and not why:
            prompt = self._dataset.prompts[group.index].token_ids_P
            taught = await group_log_probs(self._teacher, prompt, group)
        del self._tasks[group.number]
        scores = [
            None if reward is None else reward if result.score is None else result.score
            for reward, result in zip(rewards, results, strict=True)
        ]
        self._post(group_scored(group.number, rewards, failures, taught, scores, named))
        if why:
            self._drop(group, why)

    async def _results(self, group: OpenGroup) -> list[RewardResult]:
        """Return a group's results once they count (``FailedScores``)."""
        is_retry = False
        while True:
            results = await group_scores(self._dataset, self._scorer, group)
            if self._failed.count(group.number, results, is_retry):
                return results
            await self._failed.pause()
            is_retry = True

    def _why_useless(
        self, rewards: Sequence[float | None], named: Sequence[Mapping[str, float]]
    ) -> str | None:
        scored = [reward for reward in rewards if reward is not None]
        if len(scored) < min(2, len(rewards)):
            return "failed"
        if not self._drops_uniform or not is_uniform(scored):
            return None
        if self._reads_named:  # GDPO distinguishes equal sums of different rewards
            kept = [values for values, reward in zip(named, rewards, strict=True) if reward is not None]
            if any(not is_uniform([values.get(name, 0.0) for values in kept]) for name in set().union(*kept)):
                return None
        return "uniform"

    def _note_error(self, task: asyncio.Task[None]) -> None:
        """End the loop after a scoring error; the trainer's next call raises it."""
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._end(error)
