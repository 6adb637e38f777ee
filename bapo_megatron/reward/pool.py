"""Reward pool: scores responses in worker processes with time and memory limits, or at an HTTP endpoint.

The sampler and evaluations await ``RewardPool.score(prompt, response, response_tokens)``. It returns a
``RewardResult``: the score less the format penalty and ``overlong_penalty``, which alone needs the token
count, or a failure. A worker (worker.py) scores one response at a time. Past the time limit the pool kills
its process group. If that happens or the worker dies, a new worker retries the response once, then the score
has failed (workers/pool.py). Endpoint rewards need no worker (endpoint_scorer.py).
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from bapo_megatron.config import RewardConfig
from bapo_megatron.config.validation import REWARD_ENDPOINTS, REWARD_FUNCTIONS
from bapo_megatron.reward.endpoint_scorer import EndpointScorer
from bapo_megatron.reward.functions import prompt_fields_of, runs_code
from bapo_megatron.reward.math import COMMAND
from bapo_megatron.reward.sandbox.sandbox import CLOCK_FACTOR
from bapo_megatron.types import Prompt
from bapo_megatron.workers.pool import CallFailed, CallKind, WorkerPool
from bapo_megatron.workers.process import WorkerProgram

if TYPE_CHECKING:
    from bapo_megatron.environment.pool import StepResult

Failure = Literal["raised", "time", "died", "not finite", "endpoint", "environment"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardResult:
    """Result of scoring a response: reward with and without penalties, or the failure's kind and details."""

    reward: float
    """Reward with all penalties; on failure `reward.failed` without any (`reward.on_failure=value`)."""
    failure: Failure | None = None
    """Kind of failure: the function raised, timed out, ended its process, or returned no finite number; the
    endpoint gave no number; or a step of the response's environment failed. None on success."""
    detail: str = ""
    traceback: str = dataclasses.field(default="", compare=False)
    """Shortened traceback of a function that raised."""
    place: str = dataclasses.field(default="", compare=False)
    """Identity of an error: its type and the line that raised it, or the type of a non-number value."""
    score: float | None = dataclasses.field(default=None, compare=False)
    """Value of the reward function before penalties; None on failure."""
    named: dict[str, float] = dataclasses.field(default_factory=dict, compare=False)
    """Rewards of a function that returns several by name; ``score`` is their sum."""


class RewardPool:
    """Async pool of ``reward.workers`` processes for one event loop: ``start``, concurrent ``score`` calls,
    ``close``. Starts no process if all functions are endpoints."""

    def __init__(self, config: RewardConfig, max_response_tokens: int, functions: Sequence[str] = ()) -> None:
        """``functions``: reward functions of all prompts; by default only ``config.function``."""
        self._config = config
        self._max_response_tokens = max_response_tokens
        functions = tuple(functions) or (config.function,)
        in_workers = [function for function in functions if function not in REWARD_ENDPOINTS]
        self._endpoint = EndpointScorer(config) if len(in_workers) < len(functions) else None
        settings = {"reward": dataclasses.asdict(config), "functions": in_workers}
        self._workers = WorkerPool(WorkerProgram(COMMAND, settings), config.workers if in_workers else 0)
        # Repeatable: scoring has no side effects.
        self._scoring = CallKind("score", config.time_limit_s, repeatable=True)
        # The sandbox itself limits CPU time (code.py): a busy machine makes no program wrong.
        self._testing = CallKind("score", CLOCK_FACTOR * config.time_limit_s, repeatable=True)

    async def start(self) -> None:
        """Start every worker, and wait until the endpoint, if any, accepts a connection. Raises ConfigError,
        ChildError or OSError if a worker does not start, RunStopped if the endpoint is unreachable."""
        try:
            notes = await self._workers.start()
            if self._endpoint:
                await self._endpoint.open()
        except BaseException:
            await self.close()
            raise
        for note in notes:
            _LOG.warning("reward sandbox: %s", note)

    async def score(self, prompt: Prompt, response: str, response_tokens: int) -> RewardResult:
        """Return the result for a response of ``response_tokens`` tokens. Calls start in order, and no
        response makes one raise. After a cancelled call, its worker first finishes that job."""
        function = prompt.reward or self._config.function
        if self._endpoint and function in REWARD_ENDPOINTS:
            result = _result(self._config.failed, await self._endpoint.answer(prompt, response))
        else:
            result = await self._score_in_worker(prompt, function, response)
        if result.failure:
            return result
        config = self._config
        penalty = overlong_penalty(
            response_tokens, self._max_response_tokens, config.overlong_tokens, config.overlong_penalty
        )
        return dataclasses.replace(result, reward=result.reward - penalty)

    async def close(self) -> None:
        if self._endpoint:
            await self._endpoint.close()
        await self._workers.close()

    async def _score_in_worker(self, prompt: Prompt, function: str, response: str) -> RewardResult:
        question = {"function": function, "prompt": _described(prompt, function), "response": response}
        config, tests = self._config, runs_code(function)
        try:
            kind = self._testing if tests else self._scoring
            return _result(config.failed, await self._workers.call(kind, question))
        except CallFailed as error:
            times = f"{CLOCK_FACTOR} times " if tests else ""
            late = f"exceeded {times}reward.time_limit_s={config.time_limit_s} in both tries"
            detail = late if error.failure == "time" else error.detail
            return RewardResult(config.failed, error.failure, detail, error.traceback, error.place)


def _described(prompt: Prompt, function: str) -> dict[str, Any]:
    """Return the prompt as plain JSON; for a built-in ``function`` only the fields that it reads."""
    if function in REWARD_FUNCTIONS:
        return {name: getattr(prompt, name) for name in prompt_fields_of(function)}
    return {**vars(prompt), "token_ids_P": prompt.token_ids_P.tolist()}


def _result(failed: float, answer: dict[str, Any]) -> RewardResult:
    return RewardResult(failed, **answer) if "failure" in answer else RewardResult(**answer)


def overlong_penalty(
    response_tokens: int, max_response_tokens: int, zone_tokens: int, penalty: float
) -> float:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, Eq. 13) as a positive number to subtract. 0
    up to max - zone tokens; then penalty * (tokens - (max - zone)) / zone; ``penalty`` from max on. In the
    paper's symbols L_max is ``max_response_tokens``, L_cache is ``zone_tokens``, and the penalty is 1."""
    over = response_tokens - (max_response_tokens - zone_tokens)
    if zone_tokens == 0 or over <= 0:
        return 0.0
    return penalty * min(1.0, over / zone_tokens)


class FailureReports:
    """Reporter of failed rewards or environment steps as events: ``note`` reports the 1st, 10th, 100th ... of
    each kind (equal ``failure`` and ``place``), the first with its traceback, and ignores successes."""

    def __init__(self, report: Callable[..., None], event: str = "reward_failed") -> None:
        """``report`` gets the event name and its fields."""
        self._report, self._event = report, event
        self._counts: Counter[tuple[str, str]] = Counter()

    def note(self, result: RewardResult | StepResult) -> None:
        if result.failure is None:
            return
        kind: tuple[str, str] = (result.failure, result.place)
        self._counts[kind] += 1
        count = self._counts[kind]
        if count == 10 ** (len(str(count)) - 1):
            stack = {"traceback": result.traceback} if count == 1 and result.traceback else {}
            self._report(self._event, failure=kind[0], detail=result.detail, count=count, **stack)
