"""The arms of a study: which there are, that their commands are what they say, and when they may go on."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import tyro

from bapo_megatron.algo.bounds import BoundsConfig, balanced, eq8_literal, fixed, paper
from bapo_megatron.algo.losses import build_loss
from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.errors import ConfigError
from benchmarks.study.methods import METHODS, Method
from benchmarks.study.options import RECIPE, StudyOptions
from benchmarks.study.plan import PLAN, Arm, check_same_study, make_study_plan, store_plan

SMALL = StudyOptions(methods=("grpo", "paper"), passes=(1, 8), seeds=2, steps=4)


def configured(arm: Arm) -> RunConfig:
    """What `bapo train` makes of the arm's command."""
    command, recipe, *flags = arm.command
    assert command == "train"
    return tyro.cli(RunConfig, default=load_recipe(Path(recipe), RunConfig), args=flags)


@pytest.fixture(scope="module")
def whole() -> dict[tuple[str, int, int], Arm]:
    return {(arm.method, arm.passes, arm.seed): arm for arm in make_study_plan(StudyOptions()).arms}


def test_the_whole_study(whole: dict[tuple[str, int, int], Arm]) -> None:
    """19 methods at 4x and 8x; GRPO alone at 1x and 2x; twelve seeds."""
    assert Counter(passes for _, passes, _ in whole) == {1: 12, 2: 12, 4: 12 * 19, 8: 12 * 19}
    assert {method for method, passes, _ in whole if passes < 4} == {"grpo"}
    assert {seed for _, _, seed in whole} == set(range(12))
    assert len({arm.run_dir for arm in whole.values()}) == len(whole)
    assert whole["grpo", 8, 3].name == "grpo-8x-seed3"


def test_seeds_are_the_outer_loop() -> None:
    assert [arm.seed for arm in make_study_plan(SMALL).arms] == [0, 0, 0, 1, 1, 1]


BOUNDS = {
    "grpo": fixed(0.8, 1.2),
    "clip_higher": fixed(0.8, 1.28),
    "fixed_0.8_1.5": fixed(0.8, 1.5),
    "fixed_0.5_1.2": fixed(0.5, 1.2),
    "fixed_0.9_1.2": fixed(0.9, 1.2),
    "fixed_0.9_3.0": fixed(0.9, 3.0),
    "fixed_0.6_1.2": fixed(0.6, 1.2),
    "paper": replace(paper(), bounds_tokens=256),
    "balanced": balanced(),
    "eq8_literal": eq8_literal(),
    "floored": replace(balanced(), low_start=0.8),
    "first_pass": replace(balanced(), negative_weight="first_pass"),
    "hold_low": replace(balanced(), low_within_batch="held"),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_command_makes_the_method(method: str, whole: dict[tuple[str, int, int], Arm]) -> None:
    """The loss takes its settings, and reads the bounds or none; the whole batch is one update."""
    config = configured(whole[method, 8, 1])
    config.check()
    build_loss(config.algorithm)
    assert config.algorithm.bounds == BOUNDS.get(method, BoundsConfig())
    assert config.algorithm.loss == ("clip" if method in BOUNDS else method)
    assert (config.algorithm.loss_mean == "sequence") == (method in ("gspo", "sapo"))
    assert (config.seed, config.algorithm.reuse_epochs, config.algorithm.updates_per_epoch) == (1, 8, 1)
    assert config.directory == whole[method, 8, 1].run_dir


def test_only_the_method_differs(whole: dict[tuple[str, int, int], Arm]) -> None:
    first, second = (configured(whole[method, 4, 0]) for method in ("grpo", "cispo"))
    algorithm = replace(second.algorithm, bounds=first.algorithm.bounds, loss="clip")
    assert replace(second, name=first.name, run_dir=first.run_dir, algorithm=algorithm) == first


def test_a_loss_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any arm runs."""
    monkeypatch.setitem(METHODS, "novel", Method("novel", loss="novel"))
    with pytest.raises(ConfigError, match="algorithm.loss='novel' is unknown"):
        make_study_plan(replace(SMALL, methods=("grpo", "novel")))


def test_a_calibration_uses_no_seed_of_the_study() -> None:
    options = StudyOptions(calibrate=True, lr=2e-3).resolved()
    arms = make_study_plan(options).arms
    assert {arm.method for arm in arms} == {"grpo"}
    assert {arm.passes for arm in arms} == {1, 2, 4, 8}
    assert not {arm.seed for arm in arms} & set(StudyOptions().seed_numbers)
    assert options.folder == Path("runs/study/calibrate/lr0.002")
    assert configured(arms[0]).optimizer.lr == 2e-3


@pytest.mark.parametrize(("steps", "every"), [(30, 15), (8, 4), (7, 7), (1, 1)])
def test_the_last_weights_are_evaluated(steps: int, every: int) -> None:
    for arm in make_study_plan(replace(SMALL, steps=steps)).arms:
        config = configured(arm)
        assert (config.evaluation.every, config.checkpoint.every) == (steps, every)
        assert config.evaluation.samples == 4
        assert config.evaluates(config.steps)


def test_a_quick_study_is_small() -> None:
    options = StudyOptions(quick=True).resolved()
    assert len(make_study_plan(options).arms) == 2 * (1 + 3)
    assert replace(options, seeds=1).resolved().seeds == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (StudyOptions(seeds=0), "seeds=0 must be at least 1"),
        (StudyOptions(parallel=0), "parallel=0"),
        (StudyOptions(steps=0), "steps=0"),
        (StudyOptions(lr=0.0), "lr=0.0 must be above 0"),
        (StudyOptions(methods=("ppo",)), "--methods ppo: choose from grpo clip_higher"),
        (StudyOptions(passes=(3,)), "--passes 3: choose from 1 2 4 8"),
        (StudyOptions(passes=(8, 8)), "each once"),
        (StudyOptions(passes=()), "name at least one"),
        (StudyOptions(quick=True, calibrate=True), "give one of them"),
        (StudyOptions(write=Path("study.html")), "ends in .md"),
        (StudyOptions(recipe=Path("nowhere.py")), "nowhere.py does not exist"),
        (StudyOptions(methods=("paper",), passes=(1, 2)), "only grpo runs"),
    ],
)
def test_wrong_flags_are_named(options: StudyOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_study_plan(options)


def test_a_study_may_grow(tmp_path: Path) -> None:
    store_plan(make_study_plan(replace(SMALL, folder=tmp_path)))
    store_plan(make_study_plan(replace(SMALL, folder=tmp_path, seeds=3, methods=("grpo", "balanced"))))
    stored = json.loads((tmp_path / PLAN).read_text())
    assert len(stored["arms"]) == 6 + 2 + 3  # the first; a third seed of grpo, three of balanced


def test_a_folder_of_another_design_is_refused(tmp_path: Path) -> None:
    """A study.json of the first design has no name of it; its arms are named otherwise."""
    older = json.dumps({"steps": 30, "base": {}, "arms": {"grpo-stale_7-seed0": ["train"]}})
    (tmp_path / PLAN).write_text(older)
    plan = make_study_plan(replace(SMALL, folder=tmp_path))
    for use in (store_plan, check_same_study):
        with pytest.raises(ConfigError, match="is of another design .the first one; now passes-1"):
            use(plan)
    assert (tmp_path / PLAN).read_text() == older


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"steps": 5}, "--steps: 4 in the study, 5 now"),
        ({"lr": 3e-4}, "--optimizer.lr: None in the study, 0.0003 now"),
    ],
)
def test_a_study_does_not_mix(changed: dict[str, float], named: str, tmp_path: Path) -> None:
    store_plan(make_study_plan(replace(SMALL, folder=tmp_path)))
    before = (tmp_path / PLAN).read_bytes()
    with pytest.raises(ConfigError, match="start anew elsewhere") as refused:
        store_plan(make_study_plan(replace(SMALL, folder=tmp_path, **changed)))  # type: ignore[arg-type]
    assert str(refused.value).count(named) == 1
    assert (tmp_path / PLAN).read_bytes() == before


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    """Before the runs, not after them."""
    (tmp_path / "file").touch()
    wrong = tmp_path / "file" / "below"
    for options, flag in (
        (replace(SMALL, folder=wrong), "--folder"),
        (replace(SMALL, folder=tmp_path / "study", write=wrong / "study.md"), "--write"),
    ):
        with pytest.raises(ConfigError, match=f"{flag}: .*below cannot be written"):
            store_plan(make_study_plan(options))
    assert not (tmp_path / "study" / PLAN).exists()
    (tmp_path / "page.md").mkdir()
    with pytest.raises(ConfigError, match="--write .*page.md is a folder; name a file"):
        store_plan(make_study_plan(replace(SMALL, folder=tmp_path / "study", write=tmp_path / "page.md")))


def test_a_study_may_be_moved(tmp_path: Path) -> None:
    store_plan(make_study_plan(replace(SMALL, folder=tmp_path / "here")))
    (tmp_path / "here").rename(tmp_path / "there")
    store_plan(make_study_plan(replace(SMALL, folder=tmp_path / "there")))
    assert str(tmp_path / "there") in (tmp_path / "there" / PLAN).read_text()


def test_another_checkout_may_analyse_a_study(tmp_path: Path) -> None:
    """But not continue it there: its runs would not."""
    store_plan(make_study_plan(replace(SMALL, folder=tmp_path)))
    (tmp_path / "other").symlink_to(RECIPE.parent)
    elsewhere = replace(SMALL, folder=tmp_path, recipe=tmp_path / "other" / RECIPE.name)
    check_same_study(make_study_plan(replace(elsewhere, analyse=True)))
    with pytest.raises(ConfigError, match="recipe: model.hf_path: .*/recipes/demo/.* in the study"):
        store_plan(make_study_plan(elsewhere))
    another_task = replace(elsewhere, recipe=RECIPE.with_name("demo_cpu.py"), analyse=True)
    with pytest.raises(ConfigError, match="hf_path: .* in the study, demo/policy_rambles now"):
        check_same_study(make_study_plan(another_task))


def test_the_task_of_the_study() -> None:
    base = load_recipe(RECIPE, RunConfig)
    base.check()
    assert (base.model.hf_path / "model.safetensors").is_file()
    assert Path(base.evaluation.suites[0]).is_file()


def test_done_needs_the_last_evaluation(tmp_path: Path) -> None:
    arm = Arm("grpo", 1, 0, 4, tmp_path, (), evaluates=True)
    evaluations = tmp_path / "evaluations.jsonl"
    evaluations.write_text('{"step": 2, "eval/mean": 0.5}\n')
    (tmp_path / "events.jsonl").write_text('{"kind": "export", "step": 4}\n')
    assert not arm.is_done()
    evaluations.write_text('{"step": 4, "eval/mean": 0.5}\n')
    assert arm.is_done()
    assert all(one.evaluates for one in make_study_plan(SMALL).arms)


def test_done_is_an_export_of_the_last_step(tmp_path: Path) -> None:
    arm = Arm("grpo", 1, 0, 4, tmp_path / "run", ())
    assert not arm.is_done()
    arm.run_dir.mkdir()
    log = arm.run_dir / "events.jsonl"
    log.write_text('{"kind": "checkpoint", "step": 4}\n{"kind": "export", "step": 3}\n')
    assert not arm.is_done()
    log.write_text(log.read_text() + '{"kind": "export", "step": 4}\n')
    assert arm.is_done()
