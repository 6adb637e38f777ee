"""Reward pool: scores responses in worker processes with time and memory limits.

Each worker (worker.py) scores one response at a time. One that takes too long is killed with its process
group; after that, or if it died, a new one tries the same response once more, then the score has failed
(workers/pool.py). A reward behind an HTTP endpoint needs no worker: the pool's event loop
asks the endpoint (endpoint_scorer.py). The prompt's reward function decides which. ``FailureReports`` tells
of what failed, now and then.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from bapo_megatron.config import RewardConfig
from bapo_megatron.config.validation import REWARD_ENDPOINTS, REWARD_FUNCTIONS
from bapo_megatron.reward.endpoint_scorer import EndpointScorer
from bapo_megatron.reward.functions import prompt_fields_of, runs_code
from bapo_megatron.reward.math import COMMAND
from bapo_megatron.reward.sandbox.sandbox import CLOCK_FACTOR
from bapo_megatron.types import Prompt
from bapo_megatron.workers.pool import CallFailed, CallKind, WorkerPool
from bapo_megatron.workers.process import WorkerProgram

Failure = Literal["raised", "time", "died", "not finite", "endpoint", "environment"]

_MOST_KINDS = 50
"""Limit of distinct failures that are reported apart; further ones count together."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardResult:
    """Reward of one response, or the failure to score it, as plain data."""

    reward: float
    """With all penalties; `reward.failed` without any if there is a failure (`reward.on_failure=value`)."""
    failure: Failure | None = None
    """Kind of the failure: the function raised, timed out, ended its process, or returned no finite number;
    or the endpoint gave none; or a step of the response's environment failed. None on success."""
    detail: str = ""
    traceback: str = dataclasses.field(default="", compare=False)
    """Traceback of a function that raised, shortened."""
    place: str = dataclasses.field(default="", compare=False)
    """Identity of a mistake in a function: the type of an error and the line that raised it, or the type of a
    value that is not a number."""
    score: float | None = dataclasses.field(default=None, compare=False)
    """Value of the reward function, before penalties; None if there is a failure."""
    named: dict[str, float] = dataclasses.field(default_factory=dict, compare=False)
    """The rewards of a function that returns several by name; ``score`` is their sum."""


class RewardPool:
    """Pool of ``reward.workers`` processes for one event loop, async.

    Rewards behind an endpoint need no process. ``start``, then ``score`` any number at once, then ``close``.
    A failure to score is a result, not an exception.
    """

    def __init__(self, config: RewardConfig, max_response_tokens: int, functions: Sequence[str] = ()) -> None:
        """``functions``: the reward functions of all prompts; by default ``config.function`` alone."""
        self._config = config
        self._max_response_tokens = max_response_tokens
        functions = tuple(functions) or (config.function,)
        in_workers = [function for function in functions if function not in REWARD_ENDPOINTS]
        self._endpoint = EndpointScorer(config) if len(in_workers) < len(functions) else None
        settings = {"reward": dataclasses.asdict(config), "functions": in_workers}
        self._workers = WorkerPool(WorkerProgram(COMMAND, settings), config.workers if in_workers else 0)
        # A score may be computed twice: it changes nothing, and is a function of the response.
        self._scoring = CallKind("score", config.time_limit_s, repeatable=True)
        # The sandbox counts processor time within it (code.py): a busy machine makes no program wrong.
        self._testing = CallKind("score", CLOCK_FACTOR * config.time_limit_s, repeatable=True)
        self._running = False

    async def start(self) -> None:
        """Start every worker, or wait for the endpoint.

        Raises ConfigError if the settings do not work, ChildError if a worker dies, RunStopped if there is no
        endpoint.
        """
        try:
            notes = await self._workers.start()
            if self._endpoint:
                await self._endpoint.open()
        except BaseException:
            await self.close()
            raise
        for note in notes:
            _LOG.warning("reward sandbox: %s", note)
        self._running = True

    async def score(self, prompt: Prompt, response: str, response_tokens: int) -> RewardResult:
        """Score a response of ``response_tokens`` tokens; in order of the calls. No response makes it raise.

        RuntimeError if the pool is not running. After a cancelled call its worker finishes the job, or times
        out, before it takes the next one.
        """
        if not self._running:
            raise RuntimeError("the reward pool is not running: start() it before score(), not after close()")
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
        self._running = False
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
            late = f"twice more than {times}reward.time_limit_s={config.time_limit_s}"
            detail = late if error.failure == "time" else error.detail
            return RewardResult(config.failed, error.failure, detail, error.traceback, error.place)


def _described(prompt: Prompt, function: str) -> dict[str, Any]:
    """The prompt as plain JSON; for a built-in ``function`` only the fields that it reads."""
    if function in REWARD_FUNCTIONS:
        return {name: getattr(prompt, name) for name in prompt_fields_of(function)}
    return {**vars(prompt), "token_ids_P": prompt.token_ids_P.tolist()}


def _result(failed: float, answer: dict[str, Any]) -> RewardResult:
    return RewardResult(failed, **answer) if "failure" in answer else RewardResult(**answer)


def overlong_penalty(
    response_tokens: int, max_response_tokens: int, zone_tokens: int, penalty: float
) -> float:
    """DAPO's soft over-long punishment (arXiv 2503.14476, Eq. 13) as a positive number to subtract.

    0 up to max - zone tokens; then penalty * (tokens - (max - zone)) / zone; ``penalty`` from max on. In the
    paper's symbols L_max is ``max_response_tokens``, L_cache is ``zone_tokens``, and the penalty is 1.
    """
    over = response_tokens - (max_response_tokens - zone_tokens)
    if zone_tokens == 0 or over <= 0:
        return 0.0
    return penalty * min(1.0, over / zone_tokens)


class _Result(Protocol):
    """A result that may be a failure: of a score, or of an environment's step."""

    @property
    def failure(self) -> str | None: ...
    @property
    def detail(self) -> str: ...
    @property
    def traceback(self) -> str: ...
    @property
    def place(self) -> str: ...


class FailureReports:
    """Reporter of failures: the 1st, 10th, 100th ... of each kind, the first with its traceback.

    Two failures are of one kind if their ``failure`` and ``place`` are equal. The counts live in memory, so
    they begin anew with the process.
    """

    def __init__(self, report: Callable[..., None], event: str = "reward_failed") -> None:
        """``report`` is called with the kind of the event, and its fields."""
        self._report, self._event = report, event
        self._counts: Counter[tuple[str, str]] = Counter()

    def note(self, result: _Result) -> None:
        """Count ``result``, which may have no failure."""
        if result.failure is None:
            return
        kind: tuple[str, str] = (result.failure, result.place)
        if kind not in self._counts and len(self._counts) >= _MOST_KINDS:
            kind = ("others", "")
        self._counts[kind] += 1
        count = self._counts[kind]
        if count == 10 ** (len(str(count)) - 1):
            stack = {"traceback": result.traceback} if count == 1 and result.traceback else {}
            self._report(self._event, failure=kind[0], detail=result.detail, count=count, **stack)
