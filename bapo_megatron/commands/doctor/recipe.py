"""Recipe check of ``bapo doctor``: the checks of ``bapo train``, run in a child process.

    python -m bapo_megatron.commands.doctor.recipe RECIPE [flags]

``check_recipe`` starts this child, and returns the recipe's rows and a ``RecipeFacts``. The child prints a
JSON object before its trials and one at its end, and the parent reads the last: `problems`; `facts` for the
other sections, null if the recipe cannot be loaded; `trials`, the rows of each source's reward and
environment, null before them. A reward trial scores one response to the source's first row, as a run would; a
failing reward becomes a row, not an exception. The child exits with code 2 if a flag is wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bapo_megatron.commands.doctor.environments import first_prompts, try_environments
from bapo_megatron.commands.doctor.rows import DoctorRow, State, one_line
from bapo_megatron.errors import ConfigError, RunStopped
from bapo_megatron.runtime.child_process import ChildError, run_module

if TYPE_CHECKING:
    from bapo_megatron.config import RunConfig
    from bapo_megatron.reward.pool import RewardResult
    from bapo_megatron.types import Prompt

SECTION = "recipe"
DEADLINE_S = 1800.0
"""Seconds for the whole check, which reads the dataset, parses its answers and tries each source."""
ENDPOINT_DEADLINE_S = 20.0
"""Seconds within which a reward endpoint must answer."""


_COMMAND = re.compile(r"`((?:bapo data prepare .* --output|pip install) [^`]+)`")
"""Matches the command in a message that fixes its problem: a missing suite, a missing package."""
_OTHER_FIX = "change the recipe, or lay a flag over it: the message says which and how"


@dataclass(frozen=True)
class RecipeFacts:
    """Facts about a recipe for the doctor's other sections: run directory, servers and their settings, model,
    disk need. The child process sends them as JSON; the defaults stand for no recipe."""

    directory: str = "runs"
    starts_servers: bool = False
    urls: list[str] = field(default_factory=list)
    python: str | None = None
    """Interpreter of SGLang's environment, if the recipe names one."""
    on_update: str = ""
    sync: str = "disk"
    disk_gb: float | None = None
    """Size of the finished run directory in GB."""
    api_key_file: str | None = None
    """API key file of the servers, if the recipe names one."""
    require_api_key: bool = False
    colocated: bool = False
    """Whether the servers share the trainer's GPUs."""


def check_recipe(recipe: Path, flags: Sequence[str]) -> tuple[list[DoctorRow], RecipeFacts | None]:
    """Return the recipe's rows, and its facts, None if it cannot be loaded. Raises ConfigError if a flag is
    wrong or there is no such file."""
    if not recipe.is_file():
        what = "is a folder: name a Python file in it" if recipe.is_dir() else "does not exist"
        raise ConfigError(f"recipe {recipe} {what}")
    child = run_module("bapo_megatron.commands.doctor.recipe", [str(recipe), *flags], DEADLINE_S)
    if child.code == 2 and not child.output:
        raise ConfigError((child.errors or child.ended).strip())
    try:
        answer = json.loads(child.output.splitlines()[-1])
    except (IndexError, ValueError):
        found = one_line(child.reason() or "its check printed nothing")
        fix = f"bapo train {recipe} shows the whole error; "
        fix += "most often a package of the first section is broken"
        return [DoctorRow(SECTION, str(recipe), "problem", found, "a recipe that can be checked", fix)], None
    facts = RecipeFacts(**answer["facts"]) if answer["facts"] else None
    rows = list(recipe_rows(str(recipe), answer["problems"]))
    if answer["trials"] is None:
        found = f"its process did not end them: {one_line(child.reason() or 'it told nothing')}"
        fix = "try them by hand (docs/rewards.md, docs/environments.md): a run may end as they did"
        rows.append(DoctorRow(SECTION, "trials", "optional", found, "an answer of each source", fix))
        return rows, facts
    return [*rows, *(DoctorRow(**row) for row in answer["trials"])], facts


def recipe_rows(name: str, problems: Sequence[str]) -> Iterator[DoctorRow]:
    """Yield a row for each problem that ``bapo train`` would report, or a single ok row."""
    if not problems:
        checked = "fields, model, tokenizer, layout, dataset and run directory fit together"
        yield DoctorRow(SECTION, name, "ok", checked)
    for problem in problems:
        command = _COMMAND.search(problem)
        fix = command[1] if command else _OTHER_FIX
        yield DoctorRow(SECTION, name, "problem", problem, "what `bapo train` accepts", fix)


def main(arguments: Sequence[str]) -> None:
    """Child process: check the recipe and print the result."""
    from bapo_megatron.commands.recipe_flags import recipe_config
    from bapo_megatron.config import RunConfig

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # before the recipe loads: its prints must not mix with the JSON
    problems: list[str] = []
    facts: RecipeFacts | None = None
    trials: list[DoctorRow] = []

    def tell(of_trials: list[DoctorRow] | None) -> None:
        rows = None if of_trials is None else [asdict(row) for row in of_trials]
        told = {"problems": problems, "facts": facts and asdict(facts), "trials": rows}
        print(json.dumps(told), file=answers, flush=True)

    try:
        config = recipe_config("doctor", RunConfig, arguments)
        passed: list[object] = []
        problems += problems_of(config, passed)
        facts = facts_of(config)
        tell(None)
        rewards = (try_reward(config, prompt) for prompt in first_prompts(passed).values())
        # The checks have already reported the problems of sandbox, placement and reward.
        found = (*_turn_end(config), *placement_rows(config), *rewards)
        trials += [row for row in found if row.found not in problems]
        trials += try_environments(config, passed)
    except ConfigError as error:
        problems.append(str(error))
    tell(trials)


def _turn_end(config: RunConfig) -> list[DoctorRow]:
    """Return a row if the chat template ends turns with a token that stops no response, else []."""
    from bapo_megatron.hf.tokenizer import load_tokenizer
    from bapo_megatron.rollout.engines.requests import stop_token_ids, unstopped_end

    folder = config.model.hf_path
    try:
        tokenizer = load_tokenizer(folder)
        end = unstopped_end(tokenizer, stop_token_ids(folder, tokenizer))
    except ConfigError:  # it is among the problems
        return []
    if end is None:
        return []
    number = tokenizer.convert_tokens_to_ids(end)
    found = f"its chat template ends turns with {end}, and no response stops there"
    fix = (
        f"a base model may write another question behind it, whose box would count: add {number} to the list "
        f"eos_token_id of {folder / 'generation_config.json'}"
    )
    return [DoctorRow(SECTION, "stop tokens", "optional", found, "the template's own end", fix)]


def placement_rows(config: RunConfig) -> list[DoctorRow]:
    """Return a row if servers that the run starts find no GPUs beside its training on this machine, else [].
    It is a problem only where no job can give them nodes of their own: without Slurm, and with GPUs left."""
    from bapo_megatron.rollout.engines.sglang.requirements import placement_problem
    from bapo_megatron.trainer.preflight import gpus_and_ranks

    rollout, (gpus, ranks) = config.rollout, gpus_and_ranks(config)
    starts = rollout.engine == "sglang" and rollout.replay is None and not rollout.sglang.colocated
    problem = placement_problem(rollout, gpus, ranks) if starts and gpus else None
    if problem is None:
        return []
    may_be_of_job = ranks >= gpus or "SLURM_JOB_ID" in os.environ or shutil.which("sbatch") is not None
    state: State = "optional" if may_be_of_job else "problem"
    fix = "bapo submit with rollout_nodes in the cluster file; on this machine alone as it says"
    return [DoctorRow(SECTION, "GPU placement", state, problem, "nodes of their own for servers", fix)]


def try_reward(config: RunConfig, prompt: Prompt) -> DoctorRow:
    """Score a made-up response to ``prompt``; return the row: the score, or the error with its traceback."""
    fix = "mend the reward function, or the row that it cannot read (docs/rewards.md)"
    response, what = _response(prompt.ground_truth)
    try:
        result = asyncio.run(_scored(config, prompt, response))
    except (ConfigError, ChildError, RunStopped) as error:
        return DoctorRow(SECTION, "reward", "problem", str(error), "a score", fix)
    of_source = f" of source {prompt.source}" if prompt.source else ""
    where = f"row {prompt.prompt_id}{of_source} with {what}"
    if result.failure is None:
        return DoctorRow(SECTION, "reward", "ok", f"score {result.score:g} for {where}", "a score")
    found = f"no score for {where}: {result.failure}: {result.detail}\n{result.traceback}".strip()
    return DoctorRow(SECTION, "reward", "problem", found, "a score", fix)


def _response(ground_truth: str) -> tuple[str, str]:
    """Return a plausible response to score, and its description."""
    from bapo_megatron.reward.code_tests import is_tests

    if is_tests(ground_truth):
        return "```python\npass\n```", "an empty program as the response"
    return f"\\boxed{{{ground_truth}}}", "its ground truth in a box as the response"


async def _scored(config: RunConfig, prompt: Prompt, response: str) -> RewardResult:
    from bapo_megatron.config.validation import REWARD_ENDPOINTS
    from bapo_megatron.reward.functions import settings_for
    from bapo_megatron.reward.pool import RewardPool

    reward = settings_for(config.reward, prompt.reward or config.reward.function)
    if reward.function in REWARD_ENDPOINTS:
        limit_s = min(ENDPOINT_DEADLINE_S, reward.settings.get("give_up_s", ENDPOINT_DEADLINE_S))
        reward = replace(reward, settings=reward.settings | {"give_up_s": limit_s})
    pool = RewardPool(replace(reward, workers=1), config.rollout.max_response_tokens)
    await pool.start()
    try:
        return await pool.score(prompt, response, 1)
    finally:
        await pool.close()


def problems_of(config: RunConfig, passed: list[object]) -> Iterator[str]:
    """Yield each problem of the recipe once, and append the results of passing checks to ``passed``. If the
    first check finds wrong fields, repetitions of these by later checks are dropped, and their crashes."""
    from bapo_megatron.trainer.preflight import run_checks

    told: set[str] = set()
    wrong_fields: set[str] = set()
    for number, check in enumerate(run_checks(config, of_job=True)):
        try:
            passed.append(check())
            continue
        except ConfigError as error:
            problems = [
                message for message in _messages(str(error)) if message.partition("=")[0] not in wrong_fields
            ]
            if number == 0:
                wrong_fields = {message.partition("=")[0] for message in problems}
        except Exception as error:  # a crash is reported like a failure
            if wrong_fields:
                continue
            where = traceback.extract_tb(error.__traceback__)[-1]
            problems = [f"{type(error).__name__} in {where.name}: {one_line(error)}"]
        yield from (problem for problem in problems if problem not in told)
        told.update(problems)


def _messages(text: str) -> list[str]:
    """Return the problems in an error text: one per line, or one in all if the first line ends in a colon."""
    first, *rest = text.splitlines()
    return [f"{first} {'; '.join(rest)}"] if first.endswith(":") else [first, *rest]


def facts_of(config: RunConfig) -> RecipeFacts:
    """Return the facts of a configuration, whose fields may be invalid."""
    rollout, sglang = config.rollout, config.rollout.sglang
    samples = rollout.engine == "sglang" and rollout.replay is None
    return RecipeFacts(
        directory=str(config.directory),
        starts_servers=samples and not sglang.urls,
        urls=list(sglang.urls) if samples else [],
        python=None if sglang.python is None else str(sglang.python),
        on_update=sglang.on_update,
        sync=sglang.sync,
        colocated=sglang.colocated,
        disk_gb=_disk_gb(config),
        api_key_file=None if sglang.api_key_file is None else str(sglang.api_key_file),
        require_api_key=sglang.require_api_key,
    )


def _disk_gb(config: RunConfig) -> float | None:
    from bapo_megatron.hf.config import read_model_shape
    from bapo_megatron.planning.job import Job, PlanOptions

    try:
        job = Job(config, read_model_shape(config.model.hf_path), PlanOptions())
        return (job.disk + job.rollouts) / 1e9
    except ConfigError:  # it is among the problems
        return None


if __name__ == "__main__":
    main(sys.argv[1:])
