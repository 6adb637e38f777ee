"""Plan of a study: one `bapo train` command for each method, passes and seed, stored in study.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from bapo_megatron.algo.losses import load_loss
from bapo_megatron.checkpoint.run_directory import plain_values, with_present_fields
from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import check_output_file, remove_folder, write_atomically
from bapo_megatron.runtime.jsonl_log import read_jsonl
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.trainer.records.metrics_log import evaluation_means
from benchmarks.study.methods import METHODS, is_run, passes_flags, work
from benchmarks.study.options import StudyOptions

PLAN = "study.json"
DESIGN = "passes-1"
"""Name of the design; folders of another one are refused."""
SAMPLES = 4
"""Least number of responses to each held-out problem: one each is too noisy to tell methods apart."""
_CHECKPOINTS = (2, 1)
"""Checkpoints of an arm, at equal distances: the first of these numbers that divides the steps."""


@dataclass(frozen=True)
class Arm:
    """One arm: a run of one method, passes and seed."""

    method: str
    passes: int
    seed: int
    steps: int
    run_dir: Path
    command: tuple[str, ...]
    """Arguments of ``bapo``."""
    work: float = 1.0
    """Rough duration, in a unit of all arms."""

    @property
    def name(self) -> str:
        """Name of the run directory."""
        return self.run_dir.name

    evaluates: bool = False
    """Whether the weights of its last step are evaluated on held-out problems."""
    memory: str = ""
    """What it needs, in words, if that is much: told where it was killed."""

    def is_done(self) -> bool:
        """Whether the weights of its last step are exported and, if they are to be, evaluated."""
        evaluated = not self.evaluates or self.steps in evaluation_means(self.run_dir)
        return evaluated and self._has("export")

    def delete_weights(self) -> None:
        """Delete its checkpoints and exports, of which no figure is read: gigabytes of a real model."""
        paths = RunPaths(self.run_dir)
        for folder in (paths.checkpoints, paths.export, paths.weights):
            remove_folder(folder)

    def _has(self, kind: str) -> bool:
        log = RunPaths(self.run_dir).events
        rows = read_jsonl(log) if log.exists() else []
        return any(row.get("kind") == kind and row.get("step") == self.steps for row in rows)


@dataclass(frozen=True)
class StudyPlan:
    """The plan of a study: all its arms, and what they have in common."""

    options: StudyOptions
    base: RunConfig
    arms: tuple[Arm, ...]
    design: str = DESIGN

    @property
    def steps(self) -> int:
        """Steps of an arm."""
        return self.options.steps or self.base.steps

    def describe(self) -> dict[str, Any]:
        """Identity of the study, which a continuation must share: base configuration, steps, commands."""
        return {
            "design": self.design,
            "steps": self.steps,
            "base": plain_values(self.base),
            "arms": {arm.name: list(arm.command) for arm in self.arms},
        }


def make_study_plan(options: StudyOptions) -> StudyPlan:
    """The plan of a study, seed by seed: if it is cut, all methods have the same seeds.

    Methods share seeds, and so prompts. ConfigError if the recipe does not serve.
    """
    options.check()
    base = load_recipe(options.recipe, RunConfig)
    base.check()
    for method in options.methods:
        load_loss(METHODS[method].loss)  # before the first arm, not in it
    arms = [
        _arm(options, base, method, passes, seed)
        for seed in options.seed_numbers
        for passes in options.passes
        for method in options.methods
        if is_run(method, passes)
    ]
    if not arms:
        raise ConfigError("--methods and --passes leave no arm: at 1 and 2 passes only grpo runs")
    return StudyPlan(options, base, tuple(arms))


def _arm(options: StudyOptions, base: RunConfig, method: str, passes: int, seed: int) -> Arm:
    steps = options.steps or base.steps
    run_dir = options.folder / "arms" / f"{method}-{passes}x-seed{seed}"
    flags = [
        f"--name={run_dir.name}",
        f"--run-dir={run_dir}",
        f"--seed={seed}",
        f"--steps={steps}",
        *METHODS[method].flags,
        *passes_flags(passes),
        *save_flags(base, steps),
    ]
    if options.lr is not None:
        flags.append(f"--optimizer.lr={options.lr}")
    command = ("train", str(options.recipe), *flags)
    evaluates = bool(base.evaluation.suites)
    return Arm(method, passes, seed, steps, run_dir, command, work(passes, steps), evaluates)


def save_flags(base: RunConfig, steps: int, samples: int = SAMPLES) -> list[str]:
    """Checkpoints, and evaluations of the first and the last weights with at least so many responses."""
    every = next(steps // count for count in _CHECKPOINTS if steps % count == 0)
    flags = [f"--checkpoint.every={every}"]
    if base.evaluation.suites:
        samples = max(base.evaluation.samples, samples)
        flags += [f"--evaluation.every={steps}", f"--evaluation.samples={samples}"]
    return flags


def store_plan(plan: StudyPlan) -> None:
    """Write study.json. ConfigError if it cannot be written, or if the folder has another study."""
    # The document's folder is checked, too: an error now is cheaper than one after hours of runs.
    described = check_same_study(plan)
    for flag, folder in (("--folder", plan.options.folder), ("--write", plan.options.document.parent)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ConfigError(f"{flag}: {folder} cannot be written: {error}; name another") from None
    check_output_file("--write", plan.options.document)
    write_atomically(plan.options.folder / PLAN, json.dumps(described, indent=2) + "\n")


def check_same_study(plan: StudyPlan) -> dict[str, Any]:
    """New content of study.json. ConfigError if the folder has a study with other settings.

    Methods, passes and seeds may be added or left out: arms that are there stay.
    """
    path, ours = plan.options.folder / PLAN, plan.describe()
    if path.exists():
        stored = json.loads(path.read_text())
        check_same_settings(stored, ours, f"in {path.parent}", any_place=plan.options.analyse)
        ours["arms"] = stored["arms"] | ours["arms"]
    return ours


def check_same_settings(stored: dict[str, Any], ours: dict[str, Any], where: str, any_place: bool) -> None:
    """ConfigError if arms of two descriptions (``StudyPlan.describe``) cannot be one study's.

    ``any_place``: they may come from another checkout, whose files lie elsewhere.
    """
    if stored.get("design") != ours["design"]:
        other = stored.get("design", "the first one")
        raise ConfigError(
            f"the study {where} is of another design ({other}; now {ours['design']}): its arms cannot be "
            "mixed with these. Move it away, or write and work elsewhere (--folder, --write)"
        )
    if different := list(_differences(stored, ours, any_place)):
        raise ConfigError(
            f"the study {where} was started with other settings:\n"
            + "\n".join(different)
            + "\ngive them as they were to continue it, or start anew elsewhere (--folder, --write)"
        )


def _differences(stored: dict[str, Any], ours: dict[str, Any], any_place: bool) -> list[str]:
    """One line for each."""
    look = place_in_checkout if any_place else lambda value: value
    found = [("--steps", stored["steps"], ours["steps"])]
    stored_base = with_present_fields(stored["base"])
    names = sorted(stored_base.keys() | ours["base"].keys())
    base, now = ({name: look(one.get(name)) for name in names} for one in (stored_base, ours["base"]))
    found += [(f"recipe: {name}", base[name], now[name]) for name in names]
    for name in sorted(stored["arms"].keys() & ours["arms"].keys()):
        then, now = (_flags(arms["arms"][name]) for arms in (stored, ours))
        found += [(flag, then.get(flag), now.get(flag)) for flag in sorted(then.keys() | now.keys())]
    lines = [f"{name}: {then} in the study, {now} now" for name, then, now in found if then != now]
    return list(dict.fromkeys(lines))  # each once, whatever the number of arms


def place_in_checkout(value: Any) -> Any:
    """Last two parts of an absolute path, e.g. demo/policy."""
    if isinstance(value, list):
        return [place_in_checkout(one) for one in value]
    is_absolute = isinstance(value, str) and value.startswith("/")
    return "/".join(Path(value).parts[-2:]) if is_absolute else value


def _flags(command: list[str]) -> dict[str, str]:
    """Values by flag, without places: a study may be moved. What its recipe says is compared by itself."""
    pairs = (part.partition("=")[::2] for part in command[2:])
    return {flag: value or "on" for flag, value in pairs if flag not in ("--run-dir", "--name", "--steps")}
