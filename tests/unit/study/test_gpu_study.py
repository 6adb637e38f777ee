"""The GPU study: its arms in order, what a stop leaves to do, and its page, on runs made up by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import tyro

from bapo_megatron.algo.bounds import fixed, grpo, paper
from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import read_model_shape
from bapo_megatron.planning.job import Job, PlanOptions, shape_folder
from bapo_megatron.planning.plan import make_plan
from studies.gpu_study.__main__ import gpu_study
from studies.gpu_study.arms import ARMS, Arm, GpuStudyOptions, make_arms, prepare_commands
from studies.gpu_study.figures import COLUMNS, figures_of

ROOT = Path(__file__).parents[3]


@pytest.fixture
def options(tmp_path: Path) -> GpuStudyOptions:
    (tmp_path / "config.json").write_text("{}")
    return GpuStudyOptions(tmp_path, folder=tmp_path / "study", steps=2)


def configured(arm: Arm) -> RunConfig:
    command, recipe, *flags = arm.command
    assert command == "train"
    return tyro.cli(RunConfig, default=load_recipe(Path(recipe), RunConfig), args=flags)


def test_it_fits_on_one_h100() -> None:
    recipe = ROOT / "studies/gpu_study/recipe.py"
    run = load_recipe(recipe, RunConfig)
    job = Job(run, read_model_shape(shape_folder(recipe, run.model.hf_path)), PlanOptions())
    assert (job.gpus, make_plan(job).verdict.problems) == (1, [])


def test_the_arms_in_their_order(options: GpuStudyOptions) -> None:
    """Staleness is passes x mini-batches; the sequence mean is the only other loss mean."""
    found = [configured(arm) for arm in make_arms(replace(options, arms=tuple(reversed(ARMS))))]
    assert [run.name for run in found] == [
        "grpo-on-policy",
        "grpo",
        "grpo-sequence",
        "fixed-0.9-1.2",
        "paper",
    ]
    assert [run.algorithm.bounds for run in found] == [*[grpo()] * 3, fixed(0.9, 1.2), paper()]
    assert [run.algorithm.loss_mean for run in found] == ["token", "token", "sequence", "token", "token"]
    updates = [(run.algorithm.reuse_epochs, run.algorithm.updates_per_epoch) for run in found]
    assert updates == [(1, 1), *[(2, 4)] * 4]
    assert [run.optimizer.warmup_updates for run in found] == [2, *[16] * 4]
    for run in found:
        run.check()
        assert run.rollout.sglang.colocated
        assert run.evaluation.suites == (str(options.files[1]),)
        assert (run.evaluation.every, run.evaluation.samples) == (2, 1)


@pytest.mark.parametrize("small", [False, True])
def test_an_arm_takes_every_prompt_that_was_prepared(small: bool, options: GpuStudyOptions) -> None:
    chosen = replace(options, small=small)
    for arm in make_arms(chosen):
        limit = configured(arm).data.max_prompt_tokens
        assert all(f"--max-prompt-tokens={limit}" in command for command in prepare_commands(chosen))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"arms": ("ppo",)}, "--arms ppo: name some of grpo-on-policy grpo"),
        ({"train": Path("a")}, "belong together"),
        ({"data": "openai/gsm8k", "small": True}, "--data openai/gsm8k: --small has problems of its own"),
        ({"data": "mnist", "train": Path("a"), "held_out": Path("b")}, "--data mnist .*: give --reward"),
        ({"model": Path("nowhere")}, "--model nowhere: no config.json there"),
    ],
)
def test_wrong_flags_are_named(changed: dict[str, object], message: str, options: GpuStudyOptions) -> None:
    def run(_command: Sequence[str]) -> int:
        raise AssertionError("a command was run")

    with pytest.raises(ConfigError, match=message):
        gpu_study(replace(options, **changed), run)  # type: ignore[arg-type]


def finish(arm: Arm, right: Sequence[bool]) -> None:
    """What the page reads of a run: two steps of 30 s, and an answer to each held-out problem."""
    (arm.run_dir / "evaluation").mkdir(parents=True)
    steps = [{"step": step, "reward/mean": 0.25 * step, "time/step_s": 30.0} for step in (1, 2)]
    updates = [{"step": step, "epoch": 0, "policy/entropy": 1.0} for step in (1, 2)]
    answers = [{"suite": "s", "problem": place, "correct": one} for place, one in enumerate(right)]
    files = {
        "config.json": [{"format": 2, "config": {}}],
        "metrics.jsonl": steps,
        "updates.jsonl": updates,
        "evaluations.jsonl": [{"step": 2, "eval/mean": sum(right) / len(right)}],
        "events.jsonl": [{"kind": "export", "step": 2}],
        "evaluation/step_000002.jsonl": answers,
    }
    for name, rows in files.items():
        (arm.run_dir / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_stopped_study_goes_on_with_the_arm_that_is_not_done(
    options: GpuStudyOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is stopped ends with 85, and its arm is not done."""
    options = replace(options, train=Path("a"), held_out=Path("b"), arms=("grpo", "paper"), reward="math")
    by_name = {arm.name: arm for arm in make_arms(options)}
    asked: list[str] = []

    def run(command: Sequence[str]) -> int:
        [name] = [word.removeprefix("--name=") for word in command if word.startswith("--name=")]
        asked.append(name)
        if asked == ["grpo", "paper"]:
            return 85
        finish(by_name[name], [True, False, True] if name == "paper" else [False, False, True])
        return 0

    assert gpu_study(options, run) == 85
    assert "paper ended with exit code 85; the same command continues with it" in capsys.readouterr().out
    assert "1 of 2 arms" in (options.folder / "gpu_study.md").read_text()
    assert gpu_study(options, run) == 0
    assert asked == ["grpo", "paper", "paper"]
    text = (options.folder / "gpu_study.md").read_text()
    assert "2 of 2 arms" in text
    assert "| `paper` | +0.333 " in text  # one of three problems more
    assert "| BAPO (`paper`) | 8 | 1.0 | 0.375 |" in text  # a minute; rewards of 0.25 and 0.5
    assert gpu_study(options, run) == 0
    assert len(asked) == 3


def test_figures_by_hand(tmp_path: Path) -> None:
    """Ten steps of two updates: the second is stale. A run that says nothing more has no more figures."""
    rewards = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 0.8, 0.6, 0.4, 0.2]
    steps = [
        {"step": step, "sampled/reward/mean": reward, "policy/entropy": 2.0 - step / 10}
        for step, reward in enumerate(rewards, 1)
    ]
    fresh = {"policy/entropy": 2.0, "bapo/bounds_moved": 0.0}
    stale = {
        "policy/entropy": 1.0,
        "ratio/1.1-1.2/tokens": 0.5,
        "ratio/1.2-1.5/tokens": 0.125,
        "ratio/1.5-2.0/tokens": 0.0,
        "ratio/2.0-3.0/tokens": 0.0625,
        "ratio/from_3.0/tokens": 0.0625,
        "bapo/bounds_moved": 1.0,
        "bapo/clip_fraction_low": 0.125,
        "bapo/clip_fraction_high": 0.0625,
        "quadrant/positive_low/contribution": 0.25,
        "quadrant/positive_high/contribution": 0.125,
    }
    updates = [{"step": row["step"], **kind} for row in steps for kind in (fresh, stale)]
    for name, rows in (("metrics", steps), ("updates", updates)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = figures_of(tmp_path, 10)
    assert list(found) == list(COLUMNS)
    known = {name: value for name, value in found.items() if not math.isnan(value)}
    expected = {
        "mean_reward": 0.5,
        "best_reward": 1.0,
        "final_reward": 0.2,
        "entropy_kept": 0.5,
        "moved": 1.0,
    }
    expected |= {"clipped": 0.1875, "positive_share": 0.375, "raised_tokens": 0.25}
    assert known == pytest.approx(expected)
