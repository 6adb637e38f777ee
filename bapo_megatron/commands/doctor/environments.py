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
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

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
_SHOWN, _SETTINGS_SHOWN = 60, 300
"""Most characters shown of an observation, and of the settings of a failed class."""


def environment_row(state: State, found: str, fix: str = "") -> DoctorRow:
    """Return the row of a trial step."""
    return DoctorRow("recipe", "environment", state, found, "an answer to a turn of the model", fix)


def try_environments(config: RunConfig, passed: Sequence[object]) -> Iterator[DoctorRow]:
    """Yield the row of each source's environment, tried one after another on the source's first row, or on
    that of an evaluation suite, if only suites use it. ``passed``: what the recipe's checks returned,
    including the datasets; an environment whose rows are missing is not tried."""
    from bapo_megatron.config.validation import environment_field

    rows = _first_rows(config, passed)
    own = {entry.name for entry in config.data.sources if entry.environment is not None}
    for name, environment in config.environments.items():
        if environment.function is not None and name in rows:
            section = environment_field(name) if name in own else "environment"
            where = f"row {rows[name].prompt_id}" + (f" of source {name}" if name else "")
            found = f"{section}.function={environment.function}, {where}"
            yield asyncio.run(_try(environment, rows[name], section, found))


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


async def _try(environment: EnvironmentConfig, prompt: Prompt, section: str, what: str) -> DoctorRow:
    """Return the row of one trial. ``section``: config path of the environment; ``what``: names it and the
    row."""
    from bapo_megatron.environment.pool import read_traits

    limit_s = min(MOST_WAIT_S, environment.step_limit_s)
    config = replace(environment, step_limit_s=limit_s, workers=1)
    try:
        traits = read_traits(config, _START_S)
        result, turns = await _stepped(config, prompt, traits)
    except Exception as error:  # a run would end here, too; keep the recipe's other rows
        text = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        return environment_row(
            "problem", f"{what}: no step: {text}", f"mend {section}, or the row; a run would end at this"
        )
    found = f"{what}: to {TURN!r}" + (f", {turns} times," if turns > 1 else "")
    if result.failure is not None:
        found += f": {result.failure}: {result.detail}\n{result.traceback}".rstrip()
        mend = "mend the class or the program, or the row that it cannot take (docs/environments.md)"
        if _fails_on_any_turn(result):
            settings = json.dumps(config.settings)[:_SETTINGS_SHOWN]
            return environment_row("problem", found, f"{mend}; {section}.settings is {settings}")
        if result.failure == "time" and environment.step_limit_s > limit_s:
            fix = f"none if {section}.step_limit_s={environment.step_limit_s:g} is meant; else lower it"
            return environment_row("optional", f"{found}; longer was not waited", fix)
        limits = " and ".join(f"{section}.{name}" for name in ("step_limit_s", "memory_limit_mb"))
        fix = f"a run continues, and this response fails (reward.on_failure); if it should not, {mend}"
        return environment_row("optional", found, f"{fix}; {limits} are its limits, here {limit_s:g} s")
    found += f" it gave {_answer(result, traits)}"
    if traits.runs_program and result.observation is not None:
        fix = f"none if that is meant; else let it end sooner, or raise {section}.max_turns"
        return environment_row("optional", f"{found}. It had not ended", fix)
    return environment_row("ok", found)


async def _stepped(config: EnvironmentConfig, prompt: Prompt, traits: Traits) -> tuple[StepResult, int]:
    """Return the last answer of a new environment, and the number of turns it got: one, or an agent program's
    up to its end or ``max_turns``. Closes the environment as at the end of an episode."""
    from bapo_megatron.environment import Task, Turn
    from bapo_megatron.environment.pool import EnvironmentPool, Question

    # Unique to this trial: an environment may use it as the key of an outside effect.
    episode = f"doctor-{uuid.uuid4().hex}"
    task = Task(prompt.messages, prompt.ground_truth, prompt.data_source, prompt.extra_info, episode)
    pool = EnvironmentPool(config, traits, repeats=False)
    await pool.start()
    most, turns = config.max_turns if traits.runs_program else 1, [Turn("sampled", TURN)]
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


def _answer(result: StepResult, traits: Traits) -> str:
    reward = "no reward" if result.reward is None else f"reward {result.reward:g}"
    if result.observation is None:
        judged = " (reward.function judges)" if result.reward is None else ""
        return f"no turn, {reward}{judged}, done"
    shown = result.observation[:_SHOWN] + ("…" if len(result.observation) > _SHOWN else "")
    return f"a turn of role {traits.role} ({shown!r}), {reward}, not done"


def _fails_on_any_turn(result: StepResult) -> bool:
    """Whether no turn could avoid the failure: the environment could not be built, its answer was not a valid
    ``Reply``, or its program asked nothing.

    Decided by the traceback, which starts in the class: in ``__init__``, in `json` for an invalid note, in
    ``Reply.text``, or nowhere if the worker rejected the answer.
    """
    if NO_REQUEST in result.detail:
        return True
    if result.failure != "raised" or not result.place:  # found by the pool, without a traceback
        return False
    if " at " not in result.place:
        return True
    # The last one: causes of an error are printed first.
    begins = re.findall(
        r"Traceback \(most recent call last\):\n +File \".*\", line \d+, in (\S+)", result.traceback
    )
    return bool(begins) and begins[-1] in ("__init__", "__new__", "dumps", "text")
