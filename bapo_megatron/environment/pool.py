"""Environment pool: worker processes that hold the environment objects of thousands of concurrent episodes.

The sampler awaits ``EnvironmentPool.step``, which takes a ``Question`` (a model turn, with its episode) and
returns a ``StepResult`` (observation and reward, or a failure); an environment cannot make it raise. User
code runs only in workers: ``read_traits`` starts one before a run to get the class attributes, and checks the
settings. An object lives in one worker; a lost one is rebuilt from the episode's turns (worker.py).

- A step that raises or exceeds ``environment.step_limit_s`` ends its own episode, and so does exceeding
  ``environment.episode_limit_s``. Only step time counts, not waiting for a worker.
- A step that ends its worker, or a plain step past its limit, which only a kill ends, also loses the other
  objects there. The steps in flight are repeated on new objects, beside ever fewer others (workers/pool.py),
  until the culprit runs alone and fails. So a step may run twice; the episode name is an idempotency key.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from bapo_megatron.algo.settings import check_settings, settings_of
from bapo_megatron.config.sources import EnvironmentConfig
from bapo_megatron.environment import Resume, Role, SampledTurn, Task, Turn, own_interpreter
from bapo_megatron.environment import settings as own_settings
from bapo_megatron.environment.worker import THREADS
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.child_process import AnsweringChild, ChildError
from bapo_megatron.workers.pool import CallFailed, CallKind, WorkerPool
from bapo_megatron.workers.process import START_LIMIT_S, WorkerProgram

ASYNC_STEPS = 4000
"""Maximum number of concurrent async steps in a worker."""

CLOSE_S = 30.0

_ASYNC_GRACE_S, _PLAIN_GRACE_S = 15.0, 2.0
"""Seconds after its limit for an async step to handle its cancellation, or for a plain step to end."""

Failure = Literal["raised", "time", "died", "diverged"]
"""The step raised, timed out or ended its worker; or the episode could not be resumed."""


@dataclass(frozen=True)
class Question:
    """Argument of ``step``: a model turn, with its episode's task, turns, note and step time so far."""

    task: Task
    turn: str
    replies: int
    """Number of environment replies before this one."""
    turns: Callable[[], Sequence[Turn]]
    """Returns all turns, ending with ``turn``. Called only if a new object must be resumed."""
    note: Any = None
    seconds: float = 0.0
    """Total time of the steps so far."""


@dataclass(frozen=True)
class StepResult:
    """Outcome of ``step``: observation, reward, metrics, note; or the kind and details of its failure."""

    observation: str | None = None
    """None ends the episode. Several messages are joined as lines."""
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    note: Any = None
    seconds: float = 0.0
    failure: Failure | None = None
    detail: str = ""
    traceback: str = ""
    place: str = ""
    """Identity of an error in user code; see ``CallFailed``."""
    messages: Sequence[str] = ()
    """Messages of the observation if there are several."""
    context: dict[str, Any] | None = None
    """Fields of a ``Context``."""


@dataclass(frozen=True)
class Traits:
    """Class attributes of the user's ``Environment`` subclass (role, stops, resume, tools, ...), and whether
    ``step`` is async. From ``read_traits``, since the run's own process never imports the class."""

    role: Role
    stops: tuple[str, ...]
    resume: Resume
    own_random: bool
    is_async: bool
    tools: tuple[dict[str, Any], ...] = ()
    wants_tokens: bool = False
    settings_type: str | None = None
    """Settings dataclass as ``package.module:Name``."""

    @property
    def runs_program(self) -> bool:
        """Whether its episodes are those of an agent program."""
        return self.settings_type == f"{own_settings.__name__}:{own_settings.AgentSettings.__name__}"

    @staticmethod
    def of(note: str) -> Traits:
        """Parse the first note of a worker's reply to its settings."""
        traits: dict[str, Any] = json.loads(note)
        return Traits(**{**traits, "stops": tuple(traits["stops"]), "tools": tuple(traits["tools"])})


class EnvironmentPool:
    """Async pool of ``environment.workers`` processes that hold episodes: ``start``, concurrent ``step``
    calls (``forget`` an episode that ends early), ``close``. Failed steps are results, not errors."""

    def __init__(
        self, config: EnvironmentConfig, traits: Traits, repeats: bool = True, logs_dir: Path | None = None
    ) -> None:
        """``repeats``: retry a step whose worker ended, as a run must. ``logs_dir``: for program logs."""
        self._config, self._repeats = config, repeats
        concurrency = 1 if traits.own_random else ASYNC_STEPS if traits.is_async else THREADS
        self._grace_s = _ASYNC_GRACE_S if traits.is_async else _PLAIN_GRACE_S
        self._workers = WorkerPool(worker_program(config, logs_dir), config.workers, concurrency)
        self._held: set[str] = set()
        """Episodes believed to have an object in a worker."""
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start all workers. On ConfigError, ChildError or OSError none keeps running."""
        await self._workers.start()

    async def step(self, question: Question) -> StepResult:
        """Return the environment's reply to a turn, or its failure, after which the object is closed."""
        name = question.task.episode
        if self._left_s(question) <= 0:
            self.forget(name)
            took = f"its steps took environment.episode_limit_s={self._config.episode_limit_s:g} s"
            return StepResult(failure="time", detail=took)
        is_held = False
        try:
            answer = await self._held_step(question) if name in self._held else None
            if answer is None:
                answer = await self._resumed(question)
            if "diverged" in answer:
                return StepResult(failure="diverged", detail=answer["diverged"])
            is_held = answer["observation"] is not None
            return StepResult(**answer)
        except CallFailed as failed:
            return StepResult(
                failure=failed.failure, detail=failed.detail, traceback=failed.traceback, place=failed.place
            )
        finally:
            if is_held:
                self._held.add(name)
            else:  # also if this step is cancelled: the worker then closes the object
                self._held.discard(name)
                self._workers.forget(name)

    def forget(self, episode: str) -> None:
        """Close an episode's object, if there is one, in the background: the episode has no more steps."""
        if episode in self._held:
            self._held.discard(episode)
            self._closing.add(task := asyncio.create_task(self.release(episode)))
            task.add_done_callback(self._closing.discard)

    async def release(self, episode: str) -> None:
        """Close an episode's object, and wait until that succeeds or fails."""
        self._held.discard(episode)
        try:
            await self._workers.call(CallKind("close", CLOSE_S, repeatable=False), episode, episode)
        except CallFailed:
            pass  # already lost
        finally:
            self._workers.forget(episode)

    async def close(self) -> None:
        for task in [*self._closing]:
            task.cancel()
        await self._workers.close()

    async def _held_step(self, question: Question) -> dict[str, Any] | None:
        """Return the reply of the episode's object; None if the object is lost. Raises CallFailed."""
        name = question.task.episode
        asked = {"episode": name, "replies": question.replies, "turn": SampledTurn.as_json(question.turn)}
        try:
            answer = await self._call("step", self._limit_s(question), asked, name)
        except CallFailed as failed:
            if not _may_be_anothers(failed):
                raise
            return None
        return None if "missing" in answer else answer

    async def _resumed(self, question: Question) -> dict[str, Any]:
        turns = await asyncio.to_thread(question.turns)
        lines = [[turn.kind, *SampledTurn.as_json(turn.text)] for turn in turns]
        asked = {"task": asdict(question.task), "turns": lines, "note": question.note}
        limit_s = self._config.step_limit_s * question.replies + self._limit_s(question)
        name = question.task.episode
        try:
            return await self._call("resume", limit_s, asked, name)
        except CallFailed as failed:
            if not (self._repeats and _may_be_anothers(failed)):
                raise
        # Now a suspect: retried beside fewer others.
        return await self._call("resume", limit_s, asked, name, repeatable=True)

    async def _call(
        self, function: str, limit_s: float, asked: Any, name: str, repeatable: bool = False
    ) -> dict[str, Any]:
        kind = CallKind(function, limit_s, repeatable, self._grace_s)
        answer: dict[str, Any] = await self._workers.call(kind, asked, name)
        return answer

    def _left_s(self, question: Question) -> float:
        return self._config.episode_limit_s - question.seconds

    def _limit_s(self, question: Question) -> float:
        return min(self._config.step_limit_s, self._left_s(question))


def _may_be_anothers(failed: CallFailed) -> bool:
    """Whether another step may have ended the worker or blocked its event loop."""
    return failed.failure == "died" or failed.beside > 0


def worker_program(config: EnvironmentConfig, logs_dir: Path | None = None) -> WorkerProgram:
    """Return the worker program for ``config``."""
    settings = {
        "function": config.function,
        "settings": config.settings,
        "memory_limit_mb": config.memory_limit_mb,
        "logs_dir": logs_dir and str(logs_dir.absolute()),
    }
    if config.python is None:
        return WorkerProgram((sys.executable, "-m", "bapo_megatron.environment.worker"), settings)
    # Without the run's import path, whose packages conflict.
    return WorkerProgram((str(config.python), own_interpreter.__file__), settings, os.environ)


def read_traits(config: EnvironmentConfig, limit_s: float = START_LIMIT_S) -> Traits:
    """Return the class traits from a worker that is started, imports the class within ``limit_s``, and is
    closed; check the settings. Blocks. Raises ConfigError for an invalid class, settings or interpreter."""
    program = worker_program(config)
    try:
        child = AnsweringChild(program.command, program.environment)
    except OSError as error:
        raise ConfigError(f"environment.python={config.python} is not a program: {error}") from error
    try:
        answer = child.ask(program.settings, limit_s)
    except ChildError as error:
        did_not = f"its worker did not start (environment.python={config.python}): {error}"
        raise ConfigError(f"environment.function={config.function}: {did_not}; see above") from error
    finally:
        child.close()
    if "problem" in answer:
        raise ConfigError(answer["problem"])
    traits = Traits.of(answer["notes"][0])
    _check_settings(config, traits.settings_type)
    return traits


def _check_settings(config: EnvironmentConfig, kind: str | None) -> None:
    """Raise ConfigError for settings that do not fit a dataclass of this package. Not in the worker, whose
    separate interpreter may lack the packages for it."""
    module, _, name = (kind or "").partition(":")
    if module == own_settings.__name__:
        owner = f"environment.function={config.function}"
        taken = settings_of(getattr(own_settings, name), skip=0)
        check_settings("environment.settings", owner, taken, config.settings)


def stop_ids(traits: Traits, tokenizer: Any) -> tuple[int, ...]:
    """Return the token ids of texts that end a turn. Raises ConfigError for a text of several tokens."""
    stops = []
    for text in traits.stops:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ConfigError(
                f"environment.function: stops has {text!r}, which is {len(ids)} tokens of this model: give a "
                "single token, or let step() look for the text"
            )
        stops.append(int(ids[0]))
    return tuple(stops)


def command_problem(config: EnvironmentConfig, traits: Traits) -> str | None:
    """Return why this machine cannot start the command of an agent program, or None."""
    if not traits.runs_program or shutil.which(program := config.settings["command"][0]) is not None:
        return None
    missing = f"{program} is not a program here: give one of PATH, or the path of an executable file"
    return f"environment.settings.command={config.settings['command']}: {missing}"
