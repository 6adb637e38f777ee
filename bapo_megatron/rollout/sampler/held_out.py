"""Held-out problems, asked at the weights of a step: whole responses, judged, in one file.

    evaluation/step_000040.jsonl    a line for each response

They are asked beside what is sampled for training. An evaluation that a kill cuts begins anew; its file is
there when it is whole.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapo_megatron.config import RunConfig
from bapo_megatron.data.suites import Suite
from bapo_megatron.rollout.engines.pool import EnginePool
from bapo_megatron.rollout.engines.requests import Dataset
from bapo_megatron.rollout.engines.whole_response import Sampling, whole_response
from bapo_megatron.rollout.sampler.scoring import Scorer
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.run_paths import RunPaths, step_entries
from bapo_megatron.runtime.storage import writing

_EPOCH = 2**32
"""Of the seeds: none of the training's. They are the same at every step, so that steps differ by less."""


@dataclass(frozen=True)
class _Question:
    """One response that is wanted."""

    suite: Suite
    number: int
    """Of the problem."""
    sample: int


class HeldOut:
    """Evaluations of one run, in the sampler's event loop."""

    def __init__(
        self, config: RunConfig, suites: Sequence[Suite], dataset: Dataset, pool: EnginePool, scorer: Scorer
    ) -> None:
        self._config, self._suites = config, suites
        self._dataset, self._pool, self._scorer = dataset, pool, scorer
        temperature, most = config.evaluation_sampling
        stops, segment = dataset.stop_token_ids, config.rollout.segment_tokens
        self._sampling = Sampling(temperature, most, config.seed, stops, segment)
        self._paths = RunPaths(config.directory)
        self._task: asyncio.Task[None] | None = None
        self._step: int | None = None
        """That the task evaluates, or that is to come."""

    def start(self, first_step: int) -> None:
        """The run goes on before ``first_step``: what a life before it has found out later is void."""
        for (step, _), path in step_entries(self._paths.evaluation, ".jsonl"):
            if step >= first_step:
                path.unlink()

    def expect(self, step: int) -> None:
        """The weights of ``step`` are coming."""
        self._step = step if self._config.evaluates(step) and not self._path(step).exists() else None

    def begin(self) -> None:
        """They are there."""
        self._cancel()
        if self._step is not None:
            self._task = asyncio.create_task(self._evaluate(self._step))

    @property
    def is_busy(self) -> bool:
        """An evaluation goes on, or is about to."""
        return self._step is not None

    async def responses(self, step: int, wait_s: float) -> Path | None:
        """The file of ``step``; None if it does not exist after ``wait_s`` seconds. Raises its error."""
        path = self._path(step)
        if not path.exists() and self._task is not None:
            await asyncio.wait({self._task}, timeout=wait_s)
            if self._task.done():
                self._task.result()
        return path if path.exists() else None

    def close(self) -> None:
        """Give up what is going on."""
        self._cancel()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _path(self, step: int) -> Path:
        return self._paths.evaluation_responses(step)

    async def _evaluate(self, step: int) -> None:
        samples = self._config.evaluation.samples
        questions = [
            _Question(suite, number, sample)
            for suite in self._suites
            for number in range(len(suite.prompts))
            for sample in range(samples)
        ]
        try:
            room = asyncio.Semaphore(max(1, self._pool.places // 2))  # the rest is for the training
            async with asyncio.TaskGroup() as group:
                rows = [group.create_task(self._judged(step, question, room)) for question in questions]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        lines = "".join(json.dumps(row.result()) + "\n" for row in rows)
        with writing("an evaluation", self._paths.evaluation):
            self._paths.evaluation.mkdir(exist_ok=True)
            await asyncio.to_thread(write_atomically, self._path(step), lines)
        self._step = None
        self._pool.changed.set()

    async def _judged(self, step: int, question: _Question, room: asyncio.Semaphore) -> dict[str, Any]:
        prompt = question.suite.prompts[question.number]
        name = f"evaluation.{step}.{question.suite.name}.{question.number}-{question.sample}"
        place = (_EPOCH, question.number, question.sample)
        async with room:
            ids, finish_reason = await whole_response(
                self._pool, self._sampling, prompt, name, place, beyond=True
            )
        [text] = await asyncio.to_thread(self._dataset.texts, [ids])
        result = await self._scorer.score(prompt, text, len(ids))
        return {
            "suite": question.suite.name,
            "problem": question.number,
            "sample": question.sample,
            "correct": result.score is not None and result.score >= self._config.reward.correct,
            "failure": result.failure,
            "tokens": len(ids),
            "finish_reason": finish_reason,
            "response": text,
        }
