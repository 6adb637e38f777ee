"""Environment check of ``bapo doctor``: one step of the environment of each source of prompts.

It runs in the child process of ``recipe.py``, as in a run: in a worker of the pool, with the interpreter,
settings and limits of the recipe, an object for the first row of the source. The turn is ``TURN``, which
calls no tool. A step that fails is a result, no exception. Used by ``recipe.py``.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bapo_megatron.commands.doctor.rows import DoctorRow, State
from bapo_megatron.errors import ConfigError

if TYPE_CHECKING:
    from bapo_megatron.config import EnvironmentConfig, RunConfig
    from bapo_megatron.environment.pool import StepResult
    from bapo_megatron.environment.traits import Traits
    from bapo_megatron.types import Prompt

TURN = "I do not know."
"""The model's turn: any environment may meet it, and it asks for nothing."""
MOST_WAIT_S = 120.0
"""Seconds that the doctor gives to a step whose own limit is longer."""
AT_A_TIME = 4
"""Environments that are tried at a time."""
_SHOWN = 60
"""Most characters of an observation in the report."""


@dataclass(frozen=True)
class EnvironmentTrial:
    """Outcome of one step of an environment, as text for a row of the report.

    Made by ``try_environments`` in the child process, which sends it as JSON; read by ``trial_row``.
    """

    state: State
    """`optional`: no answer in ``MOST_WAIT_S``, where the step may take longer."""
    found: str
    fix: str = ""


@dataclass(frozen=True)
class _Tried:
    """An environment and the row that its step is tried on. Made by ``try_environments``."""

    section: str
    """Its field: ``environment``, or that of a source."""
    config: EnvironmentConfig
    """With one worker, and with a limit of at most ``MOST_WAIT_S``."""
    allowed_s: float
    """Time that the run gives to the step."""
    limit_field: str
    """The field of the section that is that limit."""
    where: str
    prompt: Prompt


def trial_row(trial: EnvironmentTrial) -> DoctorRow:
    """Row of a trial step."""
    return DoctorRow(
        "recipe", "environment", trial.state, trial.found, "an answer to a turn of the model", trial.fix
    )


def try_environments(config: RunConfig, passed: Sequence[object]) -> list[EnvironmentTrial]:
    """A step of each source's environment on its first row, in the sources' order.

    ``passed``: what the checks of the recipe returned; no data among it, no trial. An environment that only
    evaluation suites have is tried on the first row of the first of them.
    """
    rows = _first_rows(config, passed)
    environments = {name: one for name, one in config.environments.items() if one.function is not None}
    tried = [_tried(config, name, one, rows[name]) for name, one in environments.items() if name in rows]
    return asyncio.run(_try_all(tried))


def _first_rows(config: RunConfig, passed: Sequence[object]) -> Mapping[str, Prompt]:
    """The first row of each source of prompts, and where a source has none that of its first suite."""
    from bapo_megatron.data.prompts import PromptSet
    from bapo_megatron.data.suites import Suite

    found: dict[str, Prompt] = {}
    for prompts in (one.prompts for one in passed if isinstance(one, PromptSet)):
        found |= {prompt.source: prompt for prompt in reversed(prompts)}
    suites = [suite for one in passed if isinstance(one, tuple) for suite in one]
    for suite in suites:
        if isinstance(suite, Suite):
            found.setdefault(config.source_of_suite(suite.name), suite.prompts[0])
    return found


def _tried(config: RunConfig, source: str, environment: EnvironmentConfig, prompt: Prompt) -> _Tried:
    from bapo_megatron.config.validation import environment_field

    own = any(one.name == source and one.environment is not None for one in config.data.sources)
    limits = {"step_limit_s": environment.step_limit_s, "episode_limit_s": environment.episode_limit_s}
    limit_field = min(limits, key=lambda name: limits[name])
    wait_s = min(MOST_WAIT_S, environment.step_limit_s)
    return _Tried(
        section=environment_field(source) if own else "environment",
        config=replace(environment, step_limit_s=wait_s, workers=1),
        allowed_s=limits[limit_field],
        limit_field=limit_field,
        where=f"row {prompt.prompt_id}" + (f" of source {source}" if source else ""),
        prompt=prompt,
    )


async def _try_all(tried: Sequence[_Tried]) -> list[EnvironmentTrial]:
    places = asyncio.Semaphore(AT_A_TIME)

    async def in_turn(one: _Tried) -> EnvironmentTrial:
        async with places:
            return await _try(one)

    return await asyncio.gather(*(in_turn(one) for one in tried))


async def _try(tried: _Tried) -> EnvironmentTrial:
    from bapo_megatron.environment.traits import read_traits

    began = time.monotonic()
    try:
        traits = await asyncio.to_thread(read_traits, tried.config)
        start_s = time.monotonic() - began
        result = await _stepped(tried, traits)
    except Exception as error:  # one that a run would end with, too; the recipe's other rows must not be lost
        text = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        found = f"{tried.section}.function={tried.config.function}, {tried.where}: no step: {text}"
        return EnvironmentTrial(
            "problem", found, f"mend {tried.section}, or the row; a run would end at this"
        )
    if result.failure is not None:
        return _failed(tried, result)
    found = f"{tried.config.function}, {tried.where}: {_answer(traits, result)}; start {start_s:.1f} s"
    return EnvironmentTrial("ok", f"{found}; {_described(traits)}")


async def _stepped(tried: _Tried, traits: Traits) -> StepResult:
    """The answer of a new object to ``TURN``. The object is closed, as at the end of an episode."""
    from bapo_megatron.environment import Task, Turn
    from bapo_megatron.environment.pool import EnvironmentPool, Question

    prompt = tried.prompt
    # A name that no run and no earlier trial has had: it may be the key of an effect outside.
    episode = f"doctor-{uuid.uuid4().hex}"
    task = Task(prompt.messages, prompt.ground_truth, prompt.data_source, prompt.extra_info, episode)
    pool = EnvironmentPool(tried.config, traits)
    await pool.start()
    try:
        result = await pool.step(Question(task, TURN, 0, lambda: [Turn("sampled", TURN)]))
        if result.observation is not None:
            await pool.release(episode)
        return result
    finally:
        await pool.close()


def _answer(traits: Traits, result: StepResult) -> str:
    """What the step answered, in words."""
    given = "no turn"
    if result.observation is not None:
        shown = result.observation[:_SHOWN] + ("…" if len(result.observation) > _SHOWN else "")
        given = f"a turn of role {traits.role}, {len(result.observation)} characters ({shown!r})"
    reward = "no reward" if result.reward is None else f"reward {result.reward:g}"
    if result.reward is None and result.observation is None:
        reward = "no reward (reward.function judges)"
    done = "done" if result.observation is None else "not done"
    return f"to {TURN!r} it gave {given}, {reward}, {done}, in {result.seconds:.1f} s"


def _described(traits: Traits) -> str:
    """The attributes of the class that decide how a run treats it."""
    tools = [str(tool["function"]["name"]) for tool in traits.tools]
    return f"resume {traits.resume}, tools: {', '.join(tools) or 'none'}"


def _failed(tried: _Tried, result: StepResult) -> EnvironmentTrial:
    """The trial of a step that failed: the field, its value, what went wrong, the fix."""
    section, config = tried.section, tried.config
    limit = f"{section}.{tried.limit_field}"
    if result.failure == "time" and tried.allowed_s > MOST_WAIT_S:
        found = f"{config.function}, {tried.where}: {result.detail}; longer was not waited"
        return EnvironmentTrial(
            "optional", found, f"none if {limit}={tried.allowed_s:g} is meant; else lower it"
        )
    what = f"{section}.function={config.function} failed at {tried.where}, to {TURN!r}: {result.failure}"
    fixes: dict[Any, str] = {
        "time": f"let step() return within {limit}={tried.allowed_s:g} s, or raise that",
        "died": f"its process ended: leave out os._exit, raise {section}.memory_limit_mb="
        f"{config.memory_limit_mb}, or mend the library that crashes",
    }
    mend = "mend the class where the traceback ends, or the row that it cannot take (docs/environments.md)"
    found = f"{what}: {result.detail}\n{result.traceback}".strip()
    return EnvironmentTrial("problem", found, fixes.get(result.failure, mend))
