"""Held-out evaluations of a training run, in the sampler process; and sampling of one complete response.

    evaluation/step_000040.jsonl    one scored response per line, sampled at the weights of step 40

``HeldOut`` writes this file, for which the trainer waits. Its requests use at most half of the engines'
capacity, alongside training requests. The file is written only at the end; a killed evaluation starts over.

``whole_response`` (also for `bapo eval`) sends one request per segment and returns the complete response; an
engine loss costs only the in-flight request. Training responses go through ``dispatcher.py`` instead, and
into the journal. Both follow the state machine in ``response.py``.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bapo_megatron.config import RunConfig
from bapo_megatron.config.validation import BOXED_REWARDS
from bapo_megatron.data.problem_sets import Suite, programs_of
from bapo_megatron.errors import RunStopped
from bapo_megatron.reward.answer_text import final_answer
from bapo_megatron.rollout.engines.pool import EngineLost, EnginePool
from bapo_megatron.rollout.engines.pool_state import CachedPrefix
from bapo_megatron.rollout.engines.requests import Dataset, request_seed, response_text
from bapo_megatron.rollout.sampler.response import (
    Response,
    Sampling,
    continued,
    finish_reason_of,
    given,
    given_up,
    most_tokens,
    next_request,
    restarted,
)
from bapo_megatron.rollout.sampler.scoring import Scorer, judged_prompt, response_score
from bapo_megatron.rollout.sampler.turns import Environments, TurnTaker, turn_takers, within
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.jsonl_log import Row
from bapo_megatron.runtime.run_paths import step_entries
from bapo_megatron.runtime.storage import OldFiles, writing
from bapo_megatron.types import Prompt

_EPOCH = 2**32  # in all evaluation seeds, beyond training's: common random numbers reduce noise
_POLL_S = 1.0  # polling interval for a working engine


class HeldOut:
    """Held-out evaluations of a training run, in the sampler process: samples and scores the suites' problems
    with a step's weights, one step at a time. Per step: ``expect`` before its weights are loaded, ``begin``
    afterwards (starts the evaluation if it is due), then poll ``responses``, which returns the response file,
    or None until it is ready."""

    def __init__(
        self,
        config: RunConfig,
        suites: Sequence[Suite],
        dataset: Dataset,
        pool: EnginePool,
        scorer: Scorer,
        environments: Environments = MappingProxyType({}),
        old: OldFiles | None = None,
    ) -> None:
        """``environments``: by source. ``old``: deletes old results."""
        self._config, self._suites = config, suites
        self._dataset, self._pool, self._scorer = dataset, pool, scorer
        temperature, most = config.evaluation_sampling
        stops, segment = dataset.stop_token_ids, config.rollout.segment_tokens
        plain = Sampling(temperature, most, config.seed, stops, segment)
        sources = {suite.name: config.source_of_suite(suite.name) for suite in suites}
        takers = turn_takers(environments, dataset, most)
        self._samplings = {name: within(plain, environments.get(source)) for name, source in sources.items()}
        """Sampling parameters by suite."""
        self._turns = {name: takers.get(source) for name, source in sources.items()}
        """Turn taker by suite; None without an environment."""
        self._programs = {suite.name: programs_of(suite, config.reward.function) for suite in suites}
        """By suite: problems that ask for a program, whose answers are unboxed."""
        self._paths, self._old = config.paths, old or OldFiles()
        self._task: asyncio.Task[None] | None = None
        self._step: int | None = None  # step under evaluation, or due once its weights are loaded
        self._version = 0  # its weight version; tokens of other versions are refused

    def delete(self, first: float = 0, last: float = math.inf) -> None:
        """Delete the results of the steps ``first`` to ``last``; undeletable ones remain in use."""
        for (step, _), path in step_entries(self._paths.evaluation, ".jsonl"):
            if first <= step <= last:
                with self._old.deleting(path):
                    path.unlink()

    def expect(self, step: int, version: int) -> None:
        """Prepare the evaluation of ``step``, if it is due and not done, while ``version`` loads.
        Cancels an earlier evaluation, because engines would answer with different weights."""
        self.close()
        self._version = version
        self._step = step if self._config.evaluates(step) and not self._path(step).exists() else None

    def begin(self) -> None:
        """Start the prepared evaluation, after the weights are loaded."""
        if self._step is not None:
            self._task = asyncio.create_task(self._evaluate(self._step))

    @property
    def is_busy(self) -> bool:
        return self._step is not None

    async def responses(self, step: int, wait_s: float) -> Path | None:
        """Return the file of ``step``; None if not ready in ``wait_s`` s. Raises the evaluation's error."""
        path = self._path(step)
        if not path.exists() and self._task is not None:
            await asyncio.wait({self._task}, timeout=wait_s)
            if self._task.done():
                self._task.result()
        return path if path.exists() else None

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _path(self, step: int) -> Path:
        return self._paths.evaluation_responses(step)

    async def _evaluate(self, step: int) -> None:
        places = asyncio.Semaphore(max(1, self._pool.capacity // 2))  # the other half is for training
        try:
            async with asyncio.TaskGroup() as group:
                rows = [
                    group.create_task(self._row(step, suite, problem, sample, places))
                    for suite in self._suites
                    for problem in range(len(suite.prompts))
                    for sample in range(self._config.evaluation.samples)
                ]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        lines = "".join(json.dumps(row.result()) + "\n" for row in rows)
        with writing("an evaluation", self._paths.evaluation):
            self._paths.evaluation.mkdir(exist_ok=True)
            await asyncio.to_thread(write_atomically, self._path(step), lines)
        self._step = None
        self._pool.changed.set()

    async def _row(
        self, step: int, suite: Suite, problem: int, sample: int, places: asyncio.Semaphore
    ) -> Row:
        prompt, name = suite.prompts[problem], f"evaluation.{step}.{suite.name}.{problem}-{sample}"
        sampling, turns = self._samplings[suite.name], self._turns[suite.name]
        async with places:
            response = await whole_response(
                self._pool, sampling, self._version, prompt, name, (_EPOCH, problem, sample), turns
            )
        reward, programs = self._config.reward, self._programs[suite.name]
        row, text = await judged_row(self._scorer, self._dataset.tokenizer, prompt, response, reward.correct)
        if problem in programs:
            row["answer"] = None
        place = {"suite": suite.name, "problem": problem, "sample": sample}
        boxed = reward.function in BOXED_REWARDS and not programs
        return {**place, **row, "boxed": boxed, "response": text}


async def judged_row(
    scorer: Scorer, tokenizer: Any, prompt: Prompt, response: Response, right_from: float
) -> tuple[Row, str]:
    """Score a complete response. Returns its text, and what the rows of all evaluations have of it, where
    ``answer`` is its last box. ``right_from``: lowest score of a right response."""
    ids = (response.so_far.token_ids_R, response.last_turn_R)
    text, last = await asyncio.to_thread(lambda: [response_text(tokenizer, one) for one in ids])
    prompt = await asyncio.to_thread(judged_prompt, tokenizer, prompt, response)
    result = await response_score(scorer, prompt, response, last)
    row = {
        "correct": result.score is not None and result.score >= right_from,
        "answer": final_answer(last, prompt.opens_thinking),
        "tokens": response.sampled_tokens,
        "finish_reason": response.finish_reason,
        "failure": result.failure,
    }
    return row, text


async def whole_response(
    pool: EnginePool,
    sampling: Sampling,
    version: int,
    prompt: Prompt,
    name: str,
    seed_place: tuple[int, int, int],
    turns: TurnTaker | None = None,
) -> Response:
    """Sample a complete response from weights ``version`` and return it.

    ``name``: unique prefix of the request ids. ``seed_place``: see `request_seed`. ``turns``: required if
    `Sampling.in_environment`; environment failures are stored in the response.

    An engine that returns a token of other weights counts as lost, and its answer is discarded. The caller
    limits the concurrent calls, which may exceed an engine's capacity, and calls ``EnginePool.check``: this
    waits for an engine without limit. Raises RunStopped if the request is refused or ``MOST_LOSSES`` engines
    fail with it.
    """
    response, losses = Response(), 0
    cached: CachedPrefix | None = None
    seed = request_seed(sampling.seed, *seed_place)
    try:
        while not response.is_complete:
            if response.episode.is_waiting:
                assert turns is not None
                reply = await turns.answer(prompt, response, _episode(name, response))
                response = restarted(response) if isinstance(reply, str) else given(response, reply)
                continue
            while (slot := pool.reserve(over_capacity=True, cached=cached)) is None:
                await asyncio.sleep(_POLL_S)
            most = most_tokens(response, sampling)
            request = next_request(response, most, sampling, prompt, name, seed)
            try:
                answer = await pool.generate(
                    slot, request, lambda actual: actual == version, f"the evaluation's weights {version}"
                )
                cached = pool.cached_at(slot)
            except EngineLost as lost:
                losses += lost.by_this_request
                if why := given_up(losses, name):
                    raise RunStopped(f"{why}: {lost}") from lost
                continue
            except ValueError as error:  # every engine would refuse it
                raise RunStopped(f"a request of an evaluation was refused: {error}") from error
            finally:
                slot.load -= 1
                pool.changed.set()
            response = continued(response, answer, finish_reason_of(response.branch.tokens, answer, sampling))
    finally:
        if turns is not None:
            turns.forget(_episode(name, response))
    return response


def _episode(name: str, response: Response) -> str:
    return f"{name}-{response.episode.restarts}"
