"""Environment check of ``bapo doctor``: a trial of the environment of each prompt source.

``try_environments`` yields a row for each; it is called in the child process of ``recipe.py``. The
environment runs in a pool worker with the recipe's interpreter and settings, on the source's first row: one
step of at most 120 s, or an agent program to its end, for about as long. There are no retries, since an
environment may have outside effects. A failure becomes a row, not an exception: a `problem` if no turn of the
model could avoid it (the environment cannot be built, returns no valid ``Reply``, or sends the model no
request); `optional` if it failed on the doctor's turn, which no model wrote, or needed more time.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bapo_megatron.commands.doctor.rows import DoctorRow, State
from bapo_megatron.errors import NO_REQUEST, ConfigError

if TYPE_CHECKING:
    from bapo_megatron.config import EnvironmentConfig, RunConfig
    from bapo_megatron.environment.pool import StepResult, Traits
    from bapo_megatron.types import Prompt

TURN = "I do not know."
"""The model's turn, plausible for any environment; it asks for nothing."""
MOST_WAIT_S = 120.0
"""Longest wait for a step, seconds, even if its own limit is longer."""
_START_S = 120.0
"""Seconds for a worker's imports."""
GOES_ON = "a run continues, and this response fails (reward.on_failure)"
_SHOWN, _SETTINGS_SHOWN = 60, 300
"""Most characters shown of an observation, and of the settings of a failed class."""
_LAST_LINES, _LAST_BYTES = 5, 4000
"""Most lines and bytes of an environment's stderr in the report."""


MEND_CLASS = "mend the class where the traceback ends, or the row that it cannot take (docs/environments.md)"
MEND_PROGRAM = "mend the program, or the row that it cannot take (docs/environments.md)"


@dataclass(frozen=True)
class _Tried:
    """An environment to try: its section in the recipe, its configuration, the time limit, and a prompt."""

    section: str
    """Config path of the environment: ``environment``, or the source's own."""
    config: EnvironmentConfig
    """With one worker, and a step limit of at most ``MOST_WAIT_S``."""
    allowed_s: float
    limit_field: str
    """Field of the section that sets ``allowed_s``."""
    where: str
    prompt: Prompt


def environment_row(state: State, found: str, fix: str = "") -> DoctorRow:
    """Return the row of a trial step."""
    return DoctorRow("recipe", "environment", state, found, "an answer to a turn of the model", fix)


def try_environments(config: RunConfig, passed: Sequence[object]) -> Iterator[DoctorRow]:
    """Yield the row of each source's environment, tried one after another on the source's first row, or on
    that of an evaluation suite, if only suites use it. ``passed``: what the recipe's checks returned,
    including the datasets; an environment whose rows are missing is not tried."""
    rows = _first_rows(config, passed)
    for name, environment in config.environments.items():
        if environment.function is not None and name in rows:
            yield asyncio.run(_try(_tried(config, name, environment, rows[name])))


def first_prompts(passed: Sequence[object]) -> dict[str, Prompt]:
    """Return the first prompt of each source of the dataset among the results of the recipe's checks."""
    from bapo_megatron.data.prompts import PromptSet

    first: dict[str, Prompt] = {}
    for prompt in (one for result in passed if isinstance(result, PromptSet) for one in result.prompts):
        first.setdefault(prompt.source, prompt)
    return first


def _first_rows(config: RunConfig, passed: Sequence[object]) -> dict[str, Prompt]:
    from bapo_megatron.data.problem_sets import Suite

    first = first_prompts(passed)
    suites = [suite for result in passed if isinstance(result, tuple) for suite in result]
    for suite in suites:
        if isinstance(suite, Suite):
            first.setdefault(config.source_of_suite(suite.name), suite.prompts[0])
    return first


def _tried(config: RunConfig, source: str, environment: EnvironmentConfig, prompt: Prompt) -> _Tried:
    from bapo_megatron.config.validation import environment_field

    own = any(entry.name == source and entry.environment is not None for entry in config.data.sources)
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


async def _try(tried: _Tried) -> DoctorRow:
    from bapo_megatron.environment.pool import read_traits

    began, errors = time.monotonic(), _stderr_bytes()
    try:
        traits = read_traits(tried.config, _START_S)
        start_s = time.monotonic() - began
        result, turns = await _stepped(tried, traits)
    except Exception as error:  # a run would end here, too; keep the recipe's other rows
        text = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        found = f"{tried.section}.function={tried.config.function}, {tried.where}: no step: {text}"
        found += _last_lines(errors)
        return environment_row("problem", found, f"mend {tried.section}, or the row; a run would end at this")
    if result.failure is not None:
        says = result.failure == "died" or traits.runs_program
        mend = MEND_PROGRAM if traits.runs_program else MEND_CLASS
        return _failed(tried, result, _last_lines(errors) if says else "", mend)
    answer = _answer(traits, result, turns)
    tools = ", ".join(str(tool["function"]["name"]) for tool in traits.tools) or "none"
    found = f"{tried.config.function}, {tried.where}: {answer}; start {start_s:.1f} s"
    found += f"; resume {traits.resume}, tools: {tools}"
    if traits.runs_program and result.observation is not None:
        if turns < tried.config.max_turns:
            return environment_row("optional", f"{found}. Longer was not waited", "none if that is meant")
        found += ". A run ends the program there, before its reward, and reward.function judges"
        fix = f"none if it ends sooner with better turns; else raise {tried.section}.max_turns"
        return environment_row("optional", found, fix)
    return environment_row("ok", found)


async def _stepped(tried: _Tried, traits: Traits) -> tuple[StepResult, int]:
    """Return the last answer of a new environment, and the number of turns it got: one, or an agent program's
    up to its end or ``max_turns``. Closes the environment as at the end of an episode."""
    from bapo_megatron.environment import Task, Turn
    from bapo_megatron.environment.pool import EnvironmentPool, Question

    prompt = tried.prompt
    # Unique to this trial: an environment may use it as the key of an outside effect.
    episode = f"doctor-{uuid.uuid4().hex}"
    task = Task(prompt.messages, prompt.ground_truth, prompt.data_source, prompt.extra_info, episode)
    pool = EnvironmentPool(tried.config, traits, repeats=False)
    await pool.start()
    most, turns = tried.config.max_turns if traits.runs_program else 1, [Turn("sampled", TURN)]
    try:
        seconds, number = 0.0, 0
        while number < most and seconds < MOST_WAIT_S:
            result = await pool.step(Question(task, TURN, number, lambda: turns, None, seconds))
            seconds, number = seconds + result.seconds, number + 1
            if result.observation is None:
                return result, number
            turns.extend((Turn("given", result.observation), Turn("sampled", TURN)))
        await pool.release(episode)
        return result, number
    finally:
        await pool.close()


def _answer(traits: Traits, result: StepResult, turns: int) -> str:
    reward = "no reward" if result.reward is None else f"reward {result.reward:g}"
    if result.observation is None:
        judged = " (reward.function judges)" if result.reward is None else ""
        said = f"no turn, {reward}{judged}, done"
    else:
        shown = result.observation[:_SHOWN] + ("…" if len(result.observation) > _SHOWN else "")
        observation = f"a turn of role {traits.role}, {len(result.observation)} characters ({shown!r})"
        said = f"{observation}, {reward}, not done"
    times = f", {turns} times," if turns > 1 else ""
    return f"to {TURN!r}{times} it gave {said}, in {result.seconds:.1f} s"


def _failed(tried: _Tried, result: StepResult, errors: str, mend: str) -> DoctorRow:
    section, config = tried.section, tried.config
    limit = f"{section}.{tried.limit_field}"
    if result.failure == "time" and tried.allowed_s > MOST_WAIT_S:
        found = f"{config.function}, {tried.where}: {result.detail}; longer was not waited"
        fix = f"none if {limit}={tried.allowed_s:g} is meant; else lower it"
        return environment_row("optional", found, fix)
    what = f"{section}.function={config.function} failed at {tried.where}, to {TURN!r}: {result.failure}"
    fixes: dict[Any, str] = {
        "time": f"let step() return within {limit}={tried.allowed_s:g} s, or raise that",
        "died": f"its process ended: leave out os._exit, raise {section}.memory_limit_mb="
        f"{config.memory_limit_mb}, or mend the library that crashes",
    }
    found = f"{what}: {result.detail}\n{result.traceback}".strip() + errors
    if _fails_on_any_turn(result) or NO_REQUEST in result.detail:
        settings = f"; {section}.settings is {json.dumps(config.settings)[:_SETTINGS_SHOWN]}"
        return environment_row("problem", found, mend + settings)
    fix = f"{GOES_ON}; if it should not, {fixes.get(result.failure, mend)}"
    return environment_row("optional", found, fix)


def _fails_on_any_turn(result: StepResult) -> bool:
    """Whether the environment could not be built, or its answer was not a valid ``Reply``.

    Decided by the traceback, which starts in the class: in ``__init__``, in `json` for an invalid note, in
    ``Reply.text``, or nowhere if the worker rejected the answer.
    """
    if result.failure != "raised" or not result.place:  # found by the pool, without a traceback
        return False
    if " at " not in result.place:
        return True
    # The last one: causes of an error are printed first.
    begins = re.findall(
        r"Traceback \(most recent call last\):\n +File \".*\", line \d+, in (\S+)", result.traceback
    )
    return bool(begins) and begins[-1] in ("__init__", "__new__", "dumps", "text")


def _stderr_bytes() -> int | None:
    """Return the size of stderr in bytes if it is a file, as under ``check_recipe``, else None."""
    status = os.fstat(2)
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _last_lines(begin: int | None) -> str:
    """Return the last lines of stderr after byte ``begin``, including those of concurrent trials."""
    if begin is None:
        return ""
    with open("/proc/self/fd/2", "rb") as file:
        file.seek(max(begin, os.fstat(2).st_size - _LAST_BYTES))
        text = file.read(_LAST_BYTES).decode(errors="replace").strip()
    return "\n".join(["", "last lines of stderr:", *text.splitlines()[-_LAST_LINES:]]) if text else ""
