"""Command `bapo study real-model`: its problems, its arms, and its page.

Used by ``benchmarks/study/command.py``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from annotated_types import Ge

from bapo_megatron.checkpoint.run_directory import only_writer
from bapo_megatron.config import RunConfig
from bapo_megatron.config.flags import parse_options
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import check_output_file, write_atomically
from benchmarks.study.command import run_missing
from benchmarks.study.controller.arms import STALE, START, arm_of, base_of
from benchmarks.study.controller.options import ControllerOptions
from benchmarks.study.lives import Main
from benchmarks.study.plan import StudyPlan, check_same_study, store_plan
from benchmarks.study.real_model.page import page
from benchmarks.study.real_model.recipe import HELD_OUT, TRAIN
from benchmarks.study.results import store_results, stored_arms

RECIPE = Path(__file__).with_name("recipe.py")
DESIGN = "real-model-1"
CELLS = (
    ("grpo", 1),
    *((name, STALE) for name in ("grpo", "grpo_sequence", "fixed_0.9_1.2", START, "paper", "gspo")),
)
"""Methods and staleness of the arms: on-policy no method clips anything, so GRPO alone runs there."""
_MEMORY = "4.5 GB in each of two processes"
"""Memory of an arm: trainer and sampler."""
_QUICK = (("grpo", 1), ("paper", STALE))
_TASKS = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "products": {"min_digits": 1, "max_digits": 1},
}
_PROMPT = "Think step by step, then write the result."


@dataclass(frozen=True)
class RealModelOptions(ControllerOptions):
    """The flags of the third study: what is run, where, and what is written."""

    folder: Path = Path("runs/real_model")
    """Folder of the arms; a study that is there is continued. Of an arm that is done no weights are kept."""
    recipe: Path = RECIPE
    """Task, model, steps and learning rate of all arms."""
    seeds: Annotated[int, Ge(1)] = 4
    """Runs of each arm: seeds 0, 1, ..."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Two arms of two steps: to see the study work. Says nothing."""
    calibrate: tyro.conf.Suppress[bool] = False

    def resolved(self) -> RealModelOptions:
        """The options with ``quick`` spelled out; its arms lie in a folder of their own."""
        if not self.quick:
            return self
        return replace(self, folder=self.folder / "quick", seeds=1, steps=self.steps or 2)


def real_model_command(arguments: Sequence[str], main: Main) -> int:
    """Prepare the problems, run the arms that are missing, write the page; ``main`` runs ``bapo``.

    1 if an arm has failed, else 0. ConfigError for wrong flags, and without the model; Preempted on a stop
    signal.
    """
    options = parse_options(RealModelOptions, "bapo study real-model", arguments).resolved()
    options.check()
    if options.analyse:
        check_output_file("--write", options.document)
        plan = make_plan(options)
        check_same_study(plan)
        return _write(plan, ())
    for command in prepare_commands(options):
        if code := main(command):
            return code
    plan = make_plan(options)
    store_plan(plan)
    with only_writer(options.folder):
        stored = stored_arms(plan)
        missing = [arm for arm in plan.arms if arm.name not in stored]
        failures = run_missing(missing, options.parallel, main)
        return _write(plan, [f"{one.arm.name}: {one.reason}" for one in failures])


def make_plan(options: RealModelOptions) -> StudyPlan:
    """The plan, seed by seed: if it is cut, all arms have the same seeds."""
    base = base_of(options)
    cells = _QUICK if options.quick else CELLS
    made = (arm_of(options, base, *cell, seed) for seed in range(options.seeds) for cell in cells)
    arms = [replace(arm, memory=_MEMORY) for arm in made]
    return StudyPlan(options, base, tuple(arms), DESIGN)


def prepare_commands(options: RealModelOptions) -> list[list[str]]:
    """Commands that prepare the recipe's problems where they are missing, those that are held out first.

    ConfigError without the model.
    """
    base = load_recipe(options.recipe, RunConfig)  # not checked: its files are what is made here
    if (base.data.path, base.evaluation.suites) != (TRAIN, (str(HELD_OUT),)):
        return []  # the problems of a recipe of the user's
    if not (base.model.hf_path / "config.json").is_file():
        raise ConfigError(f"the study's model is not in {base.model.hf_path}: `make real-model` fetches it")
    common = [
        *("data", "prepare", "reasoning-gym:chain_sum,products", f"--task-settings={json.dumps(_TASKS)}"),
        *(f"--system-prompt={_PROMPT}", f"--tokenizer={base.model.hf_path}"),
        f"--max-prompt-tokens={base.data.max_prompt_tokens}",
    ]
    held_out = [*common, "--size=60", "--seed=1", f"--output={HELD_OUT.parent}"]
    train = [*common, "--size=200", "--against", str(HELD_OUT), f"--output={TRAIN.parent}"]
    wanted = ((HELD_OUT, held_out), (TRAIN, train))
    return [command for path, command in wanted if not path.exists()]


def _write(plan: StudyPlan, failures: Sequence[str]) -> int:
    """Store the results, and write the page of the arms that are done; 1 if an arm has failed, else 0."""
    records = store_results(plan)
    path = plan.options.document
    write_atomically(path, page(plan, records, failures))
    print(f"{len(records)} of {len(plan.arms)} arms: {path}", flush=True)
    for failure in failures:
        print(f"failed: {failure}; the same command tries it again")
    return 1 if failures else 0
