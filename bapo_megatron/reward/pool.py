"""Reward pool: scores responses in worker processes with time and memory limits.

Each worker (worker.py) scores one response at a time. One that takes too long is killed with its process
group; after that, or if it died, a new one tries the same response once more, then the reward is
``reward.failed``. A reward behind an HTTP endpoint needs no worker: the pool's event loop asks the endpoint
(endpoints/). The prompt's reward function decides which. Used in ``commands/doctor/``, ``evaluation/``,
this folder and ``rollout/sampler/``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from bapo_megatron.config import RewardConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.endpoints.scorer import EndpointScorer
from bapo_megatron.reward.functions import is_built_in, is_endpoint, prompt_fields_of
from bapo_megatron.reward.math_verify_process import COMMAND, START_LIMIT_S
from bapo_megatron.reward.penalties import overlong_penalty
from bapo_megatron.reward.scratch import Scratch, remove_abandoned
from bapo_megatron.runtime.child_process import AnsweringChild, ChildError, ChildTimeout, with_import_path
from bapo_megatron.types import Prompt

Failure = Literal["raised", "time", "died", "not finite", "endpoint"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardResult:
    """Reward of one response, or the failure to score it, as plain data.

    Made by ``RewardPool.score``, or by ``RobustScorer`` after an OSError.
    """

    reward: float
    """With all penalties; `reward.failed` without any if there is a failure."""
    failure: Failure | None = None
    """Kind of the failure: the function raised, timed out, ended its process, or returned no finite number;
    or the endpoint gave none. None on success."""
    detail: str = ""
    """Text of the failure, for the log."""
    traceback: str = dataclasses.field(default="", compare=False)
    """Traceback of a function that raised, shortened."""
    place: str = dataclasses.field(default="", compare=False)
    """Identity of a mistake in a function: the type of an error and the line that raised it, or the type of a
    value that is no number."""
    score: float | None = dataclasses.field(default=None, compare=False)
    """Value of the reward function, before penalties; None if there is a failure."""


class RewardPool:
    """Pool of ``reward.workers`` processes for one event loop, async.

    Rewards behind an endpoint need no process. ``start``, then ``score`` any number at once, then ``close``.
    A failure to score is a result, not an exception; ``failures`` counts them by kind. Made by the sampler's
    process, `bapo eval` and `bapo doctor`.
    """

    def __init__(self, config: RewardConfig, max_response_tokens: int, functions: Sequence[str] = ()) -> None:
        """``functions``: the reward functions of all prompts; by default ``config.function`` alone."""
        self._config = config
        self._max_response_tokens = max_response_tokens
        functions = tuple(functions) or (config.function,)
        in_workers = [function for function in functions if not is_endpoint(function)]
        self._endpoint = EndpointScorer(config) if len(in_workers) < len(functions) else None
        self._workers = [_Worker(config, in_workers) for _ in range(config.workers)] if in_workers else []
        self._threads = ThreadPoolExecutor(config.workers, thread_name_prefix="reward")
        self._jobs: asyncio.Queue[tuple[dict[str, Any], asyncio.Future[RewardResult]]] = asyncio.Queue()
        self._servers: list[asyncio.Task[None]] = []
        self._running = False
        self.failures: Counter[str] = Counter()

    async def start(self) -> None:
        """Start every worker, or wait for the endpoint.

        Raises ConfigError if the settings do not work, ChildError if a worker dies, RunStopped if there is no
        endpoint.
        """
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(remove_abandoned)
        try:
            notes = await asyncio.gather(
                *(loop.run_in_executor(self._threads, worker.start) for worker in self._workers)
            )
            if self._endpoint:
                await self._endpoint.open()
        except BaseException:
            await self.close()
            raise
        for note in notes[0] if notes else []:  # the workers share a machine
            _LOG.warning("reward sandbox: %s", note)
        self._servers = [asyncio.create_task(self._serve(worker)) for worker in self._workers]
        self._running = True

    async def score(self, prompt: Prompt, response: str, response_tokens: int) -> RewardResult:
        """Score a response of ``response_tokens`` tokens; in order of the calls. No response makes it raise.

        RuntimeError if the pool is not running. After a cancelled call its worker finishes the job, or times
        out, before it takes the next one.
        """
        if not self._running:
            raise RuntimeError("the reward pool is not running: start() it before score(), not after close()")
        function = prompt.reward or self._config.function
        if self._endpoint and is_endpoint(function):
            result = _result(self._config.failed, await self._endpoint.answer(prompt, response))
        else:
            job: asyncio.Future[RewardResult] = asyncio.get_running_loop().create_future()
            question = {"function": function, "prompt": _described(prompt, function), "response": response}
            self._jobs.put_nowait((question, job))
            result = await job
        if result.failure:
            self.failures[result.failure] += 1
            return result
        config = self._config
        penalty = overlong_penalty(
            response_tokens, self._max_response_tokens, config.overlong_tokens, config.overlong_penalty
        )
        return dataclasses.replace(result, reward=result.reward - penalty)

    async def close(self) -> None:
        """Kill every worker, and cancel the queued calls."""
        self._running = False
        if self._endpoint:
            await self._endpoint.close()
        for server in self._servers:
            server.cancel()
        for worker in self._workers:
            worker.kill_for_good()
        await asyncio.gather(*self._servers, return_exceptions=True)
        while not self._jobs.empty():
            self._jobs.get_nowait()[1].cancel()
        await asyncio.to_thread(self._threads.shutdown)
        for worker in self._workers:
            worker.close()

    async def _serve(self, worker: _Worker) -> None:
        loop = asyncio.get_running_loop()
        while True:
            question, job = await self._jobs.get()
            if job.done():  # cancelled while it waited
                continue
            try:
                result = await loop.run_in_executor(self._threads, worker.score, question)
            except BaseException as error:
                if not job.done():
                    job.set_exception(error) if isinstance(error, Exception) else job.cancel()
                if not isinstance(error, Exception):
                    raise
                continue
            if not job.done():
                job.set_result(result)


def _described(prompt: Prompt, function: str) -> dict[str, Any]:
    """The prompt as plain JSON; for a built-in ``function`` only the fields that it reads."""
    if is_built_in(function):
        return {name: getattr(prompt, name) for name in prompt_fields_of(function)}
    return {**vars(prompt), "token_ids_P": prompt.token_ids_P.tolist()}


def _result(failed: float, answer: dict[str, Any]) -> RewardResult:
    """Result from the reply of a worker or an endpoint."""
    return RewardResult(failed, **answer) if "failure" in answer else RewardResult(**answer)


class _Worker:
    """Handle of one worker process, which it replaces after a death, and its temporary directory."""

    def __init__(self, config: RewardConfig, functions: Sequence[str]) -> None:
        self._config, self._functions = config, functions
        self._child: AnsweringChild | None = None
        self._scratch: Scratch | None = None
        self._given_up = False
        self._changing = threading.Lock()

    def start(self) -> list[str]:
        """Start the process and wait until it can score; its notes. Raises ConfigError or ChildError."""
        with self._changing:
            if self._given_up:
                raise ChildError("the pool was closed")
            self._scratch = scratch = Scratch()
            try:
                self._child = child = AnsweringChild(
                    COMMAND, with_import_path({**os.environ, "TMPDIR": scratch.path})
                )
            except BaseException:
                self._remove_scratch()
                raise
        try:
            settings = {"reward": dataclasses.asdict(self._config), "functions": self._functions}
            answer = child.ask(settings, START_LIMIT_S)
        except BaseException:
            self.close()
            raise
        if "problem" in answer:
            self.close()
            raise ConfigError(answer["problem"])
        notes: list[str] = answer["notes"]
        return notes

    def score(self, question: dict[str, Any]) -> RewardResult:
        """Score in the process; after a death or timeout retry once in a new one.

        The out-of-memory killer may have hit the wrong process, and a paused machine loses time.
        """
        failed, limit_s = self._config.failed, self._config.time_limit_s
        try:
            try:
                answer = self._ask(question)
            except ChildError:
                self.close()
                answer = self._ask(question)
        except ChildTimeout:
            self.close()
            return RewardResult(failed, "time", f"twice more than reward.time_limit_s={limit_s}")
        except (ChildError, ConfigError) as error:
            self.close()
            return RewardResult(failed, "died", str(error))
        return _result(failed, answer)

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._child is None:
            self.start()
        assert self._child is not None
        answer: dict[str, Any] = self._child.ask(question, self._config.time_limit_s)
        return answer

    def kill_for_good(self) -> None:
        """Kill the process for good, from another thread. A thread that waits for a reply gets ChildDied."""
        with self._changing:
            self._given_up = True
            if self._child is not None:
                self._child.kill()

    def close(self) -> None:
        """Kill the process and delete its directory."""
        with self._changing:
            if self._child is not None:
                self._child.close()
                self._child = None
            self._remove_scratch()

    def _remove_scratch(self) -> None:
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None
