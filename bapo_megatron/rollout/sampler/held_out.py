"""Held-out evaluations of a training run, in the sampler's process; and sampling of one whole response.

    evaluation/step_000040.jsonl    one scored response per line, sampled at the weights of step 40

``HeldOut`` writes this file, for which the trainer waits. Its requests use at most half of the engines'
capacity, alongside training requests. On an engine that samples in rounds, the turns of all episodes go out
together, for bit-exact repeats. The file is written atomically at the end; a killed evaluation starts over.

``whole_response`` (also for `bapo eval`) sends one request per segment and returns the complete response; an
engine loss costs only the in-flight request. Training responses go through ``dispatcher.py``, which journals
them. Both follow the state machine in ``response.py``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bapo_megatron.config import RunConfig
from bapo_megatron.config.validation import BOXED_REWARDS
from bapo_megatron.data.problem_sets import Suite, programs_of
from bapo_megatron.errors import RunStopped
from bapo_megatron.reward.answer_text import final_answer
from bapo_megatron.rollout.engines.pool import EngineLost, EnginePool
from bapo_megatron.rollout.engines.pool_state import CachedPrefix, EngineSlot
from bapo_megatron.rollout.engines.requests import Dataset, request_seed
from bapo_megatron.rollout.sampler.response import (
    Response,
    Sampling,
    Step,
    continued,
    finish_reason_of,
    given,
    given_up,
    needs,
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

_EPOCH = 2**32
"""Epoch in evaluation seeds, beyond training's; constant, as common random numbers reduce noise."""
_POLL_S = 1.0  # polling interval for an engine with room


@dataclass(frozen=True)
class _Item:
    """A response to sample in an evaluation: its suite, problem and sample number."""

    suite: Suite
    problem: int
    """Position of the problem in its suite."""
    sample: int


class HeldOut:
    """The run's held-out evaluations, one at a time, in the sampler's event loop. Per step: ``expect`` before
    its weights are loaded, ``begin`` afterwards, then poll ``responses``, which returns the file or None."""

    def __init__(
        self,
        config: RunConfig,
        suites: Sequence[Suite],
        dataset: Dataset,
        pool: EnginePool,
        scorer: Scorer,
        environments: Environments | None = None,
        rounds: bool = False,
        old: OldFiles | None = None,
    ) -> None:
        """``environments``: by source. ``rounds``: see ``GroupSampler``. ``old``: deletes old results."""
        self._config, self._suites = config, suites
        self._dataset, self._pool, self._scorer = dataset, pool, scorer
        temperature, most = config.evaluation_sampling
        stops, segment = dataset.stop_token_ids, config.rollout.segment_tokens
        environments = environments or {}
        plain = Sampling(temperature, most, config.seed, stops, segment)
        sources = {suite.name: config.source_of_suite(suite.name) for suite in suites}
        takers = turn_takers(environments, dataset, most)
        self._samplings = {name: within(plain, environments.get(source)) for name, source in sources.items()}
        """Sampling parameters by suite."""
        self._turns = {name: takers.get(source) for name, source in sources.items()}
        """Turn taker by suite; None without an environment."""
        self._programs = {suite.name: programs_of(suite, config.reward.function) for suite in suites}
        """By suite: problems that ask for a program, whose answers are unboxed."""
        self._in_rounds = rounds and any(self._turns.values())
        self._paths, self._old = config.paths, old or OldFiles()
        self._task: asyncio.Task[None] | None = None
        self._step: int | None = None  # step under evaluation, or due once its weights are loaded
        self._version = 0  # its weight version; tokens of other versions are refused

    def start(self, first_step: int) -> None:
        """Delete the results of ``first_step`` and later steps; undeletable ones remain in use."""
        self._delete(lambda step: step >= first_step)

    def delete(self, last: int) -> None:
        self._delete(lambda step: step <= last)

    def _delete(self, is_old: Callable[[int], bool]) -> None:
        for (step, _), path in step_entries(self._paths.evaluation, ".jsonl"):
            if is_old(step):
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
        """Return the file of ``step``; None if not ready within ``wait_s`` seconds. Raises its error."""
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
        samples = self._config.evaluation.samples
        items = [
            _Item(suite, problem, sample)
            for suite in self._suites
            for problem in range(len(suite.prompts))
            for sample in range(samples)
        ]
        room = max(1, self._pool.capacity // 2)  # the other half is for training
        try:
            rows = await (self._by_rounds if self._in_rounds else self._freely)(step, items, room)
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        with writing("an evaluation", self._paths.evaluation):
            self._paths.evaluation.mkdir(exist_ok=True)
            await asyncio.to_thread(write_atomically, self._path(step), lines)
        self._step = None
        self._pool.changed.set()

    async def _freely(self, step: int, items: Sequence[_Item], room: int) -> list[Row]:
        """Return the items' rows; sample each item as soon as fewer than ``room`` are in engines."""
        places = asyncio.Semaphore(room)

        async def row(item: _Item) -> Row:
            async with places:
                response = await self._sampled(step, item)
            return await self._scored(item, response)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(row(item)) for item in items]
        return [task.result() for task in tasks]

    async def _by_rounds(self, step: int, items: Sequence[_Item], room: int) -> list[Row]:
        """Return the items' rows; requests form the same batches regardless of environment step times."""
        rows = []
        for first in range(0, len(items), room):
            wave = items[first : first + room]
            barrier = RoundBarrier(len(wave))

            async def row(member: int, item: _Item, barrier: RoundBarrier = barrier) -> Row:
                response = await self._sampled(step, item, partial(barrier.meet, member))
                barrier.leave()
                return await self._scored(item, response)

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(row(member, item)) for member, item in enumerate(wave)]
            rows += [task.result() for task in tasks]
        return rows

    async def _sampled(
        self, step: int, item: _Item, together: Callable[[], Awaitable[None]] | None = None
    ) -> Response:
        prompt = item.suite.prompts[item.problem]
        name = f"evaluation.{step}.{item.suite.name}.{item.problem}-{item.sample}"
        place = (_EPOCH, item.problem, item.sample)
        return await whole_response(
            self._pool,
            self._samplings[item.suite.name],
            self._version,
            prompt,
            name,
            place,
            over_capacity=True,
            turns=self._turns[item.suite.name],
            together=together,
        )

    async def _scored(self, item: _Item, response: Response) -> Row:
        prompt, programs = item.suite.prompts[item.problem], self._programs[item.suite.name]
        ids = [response.so_far.token_ids_R, response.last_turn_R]
        text, last = await asyncio.to_thread(self._dataset.texts, ids)
        prompt = await asyncio.to_thread(judged_prompt, self._dataset.tokenizer, prompt, response)
        result = await response_score(self._scorer, prompt, response, last, self._config.reward.failed)
        return {
            "suite": item.suite.name,
            "problem": item.problem,
            "sample": item.sample,
            "correct": result.score is not None and result.score >= self._config.reward.correct,
            "failure": result.failure,
            "tokens": response.sampled_tokens,
            "finish_reason": response.finish_reason,
            "answer": None if item.problem in programs else final_answer(last, prompt.opens_thinking),
            "boxed": self._config.reward.function in BOXED_REWARDS and not programs,
            "response": text,
        }


class RoundBarrier:
    """Barrier for an evaluation's responses: ``meet`` waits and releases all requests, in member order.

    For an engine whose last bits depend on its batch (``EngineBackend.rounds``): environment steps vary in
    duration, so evaluations would otherwise form different batches. A round begins when every member waits or
    has left.
    """

    def __init__(self, members: int) -> None:
        self._left = members
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def meet(self, member: int) -> None:
        loop = asyncio.get_running_loop()
        self._waiting[member] = future = loop.create_future()
        loop.call_soon(self._begin_if_all_wait)  # deferred, or the last arrival would go first
        await future

    def leave(self) -> None:
        """Remove a member, which makes no more requests."""
        self._left -= 1
        asyncio.get_running_loop().call_soon(self._begin_if_all_wait)

    def _begin_if_all_wait(self) -> None:
        if len(self._waiting) < self._left:
            return
        waiting, self._waiting = self._waiting, {}
        # Sorted, because the position in a batch also affects last bits.
        for _, future in sorted(waiting.items(), key=lambda item: item[0]):
            if not future.done():  # cancelled
                future.set_result(None)


async def whole_response(
    pool: EnginePool,
    sampling: Sampling,
    version: int,
    prompt: Prompt,
    name: str,
    seed_place: tuple[int, int, int],
    slot: EngineSlot | None = None,
    over_capacity: bool = False,
    turns: TurnTaker | None = None,
    together: Callable[[], Awaitable[None]] | None = None,
) -> Response:
    """Sample a complete response from weights ``version`` and return it.

    ``name``: unique prefix of the request ids. ``seed_place``: see `request_seed`. ``slot``: an engine
    reserved by the caller. ``over_capacity``: see `EnginePool.reserve`. ``turns``: required if
    `Sampling.in_environment`; environment failures are stored in the response. ``together``: awaited before
    each request, such as ``RoundBarrier.meet``.

    An engine that returns a token of other weights is lost and its answer discarded. Waits indefinitely for
    an engine with room; the caller watches ``EnginePool.check``. Raises RunStopped if the request is refused
    or ``MOST_LOSSES`` engines fail with it.
    """
    response, losses = Response(), 0
    cached: CachedPrefix | None = None
    seed = request_seed(sampling.seed, *seed_place)
    try:
        while need := needs(response, sampling):
            if isinstance(need, Step):
                assert turns is not None
                response = await _stepped(turns, prompt, response, name)
                continue
            if together is not None:
                await together()
            while slot is None and (slot := pool.reserve(over_capacity, cached)) is None:
                await asyncio.sleep(_POLL_S)
            request = next_request(response, need, sampling, prompt, name, seed)
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
                slot = None
                pool.changed.set()
            response = continued(response, answer, finish_reason_of(response.branch.tokens, answer, sampling))
    finally:
        if turns is not None:
            turns.forget(_episode(name, response))
    return response


def _episode(name: str, response: Response) -> str:
    return f"{name}-{response.episode.restarts}"


async def _stepped(turns: TurnTaker, prompt: Prompt, response: Response, name: str) -> Response:
    """Return the response after its environment's answer, restarted if the environment was not restored."""
    result = await turns.result(prompt, response, _episode(name, response))
    if turns.must_restart(response, result):
        return restarted(response)
    return given(response, await turns.answer(prompt, response, result))
