"""The arms of a study: which there are, that their commands are what they say, and when they may go on."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import tyro

from bapo_megatron.algo.bounds import balanced, clip_higher, grpo, paper, published_code
from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.errors import ConfigError
from benchmarks.study.methods import METHODS, SETTINGS
from benchmarks.study.options import RECIPE, StudyOptions
from benchmarks.study.plan import PLAN, Arm, check_same_study, make_study_plan, store_plan

SMALL = StudyOptions(methods=("grpo", "balanced"), settings=("fresh", "stale_7"), seeds=2, steps=4)


def configured(arm: Arm) -> RunConfig:
    """What `bapo train` makes of the arm's command."""
    command, recipe, *flags = arm.command
    assert command == "train"
    return tyro.cli(RunConfig, default=load_recipe(Path(recipe), RunConfig), args=flags)


@pytest.fixture(scope="module")
def whole() -> dict[tuple[str, str, int], Arm]:
    return {(arm.method, arm.setting, arm.seed): arm for arm in make_study_plan(StudyOptions()).arms}


def test_the_whole_study(whole: dict[tuple[str, str, int], Arm]) -> None:
    """Eight methods in four stale settings; on-policy only those three that differ; one control."""
    assert len(whole) == 5 * (8 * 4 + 3 + 1)
    counts = Counter(setting for _, setting, _ in whole)
    assert counts == {
        **dict.fromkeys(("stale_3", "stale_7", "stale_15", "partial"), 40),
        "fresh": 15,
        "fresh_matched": 5,
    }
    assert {method for method, setting, _ in whole if setting == "fresh"} == {"grpo", "papo_grpo", "papo"}
    assert len({arm.run_dir for arm in whole.values()}) == len(whole)


def test_seeds_are_the_outer_loop() -> None:
    assert [arm.seed for arm in make_study_plan(SMALL).arms] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("method", METHODS)
def test_a_command_makes_the_method(method: str, whole: dict[tuple[str, str, int], Arm]) -> None:
    config = configured(whole[method, "stale_7", 1])
    config.check()
    presets = {"grpo": grpo(), "clip_higher": clip_higher(), "papo": balanced()}
    presets |= {"paper": paper(), "balanced": balanced(), "published_code": published_code()}
    presets |= {"balanced_half": replace(balanced(), target=0.5), "papo_grpo": grpo()}
    assert config.algorithm.bounds == presets[method]
    assert config.algorithm.polarity.enabled == method.startswith("papo")
    assert (config.seed, config.algorithm.reuse_epochs, config.algorithm.updates_per_epoch) == (1, 2, 4)
    assert config.directory == whole[method, "stale_7", 1].run_dir


def test_only_the_method_differs(whole: dict[tuple[str, str, int], Arm]) -> None:
    first, second = (configured(whole[method, "stale_15", 0]) for method in ("grpo", "balanced"))
    assert second.algorithm.bounds == balanced()
    changed = replace(
        second, name=first.name, run_dir=first.run_dir, algorithm=replace(second.algorithm, bounds=grpo())
    )
    assert changed == first


def test_settings_by_hand(whole: dict[tuple[str, str, int], Arm]) -> None:
    """Batches of 8 prompts, 30 steps: `stale_7` makes 8 updates a step, each of 2 prompts."""
    assert [SETTINGS[name].oldest for name in ("fresh", "stale_3", "stale_7", "stale_15")] == [0, 3, 7, 15]
    matched = configured(whole["grpo", "fresh_matched", 0])
    stale = configured(whole["grpo", "stale_7", 0])
    assert (matched.steps, matched.rollout.prompts_per_step) == (240, 2)
    assert matched.planned_updates == stale.planned_updates == 240
    assert stale.rollout.prompts_per_step // stale.algorithm.updates_per_epoch == 2
    partial = configured(whole["balanced", "partial", 0])
    partial.check()
    assert (partial.rollout.max_staleness, partial.rollout.budget_tokens) == (3, 16)  # of 64 tokens
    assert not partial.rollout.overlap


@pytest.mark.parametrize(("steps", "every"), [(30, 10), (40, 10), (8, 2), (7, 7), (1, 1)])
def test_the_last_weights_are_evaluated(steps: int, every: int) -> None:
    for arm in make_study_plan(replace(SMALL, steps=steps)).arms:
        config = configured(arm)
        assert (config.evaluation.every, config.checkpoint.every) == (every, every)
        assert config.evaluates(config.steps)


def test_a_quick_study_is_small() -> None:
    options = StudyOptions(quick=True).resolved()
    assert len(make_study_plan(options).arms) == 6
    assert (options.steps, options.seeds) == (6, 2)
    assert replace(options, steps=3).resolved().steps == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (StudyOptions(seeds=0), "seeds=0 must be at least 1"),
        (StudyOptions(parallel=0), "parallel=0"),
        (StudyOptions(steps=0), "steps=0"),
        (StudyOptions(lr=0.0), "lr=0.0 must be above 0"),
        (StudyOptions(methods=("ppo",)), "--methods ppo: choose from grpo clip_higher"),
        (StudyOptions(settings=("stale_7", "stale_7")), "each once"),
        (StudyOptions(settings=()), "name at least one"),
        (StudyOptions(write=Path("study.html")), "ends in .md"),
        (StudyOptions(recipe=Path("nowhere.py")), "nowhere.py does not exist"),
        (StudyOptions(methods=("papo",), settings=("fresh_matched",)), "needs the method grpo"),
    ],
)
def test_wrong_flags_are_named(options: StudyOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_study_plan(options)


def test_a_batch_that_cannot_be_split(tmp_path: Path) -> None:
    recipe = tmp_path / "odd.py"
    recipe.write_text(
        "from dataclasses import replace\nfrom pathlib import Path\n"
        "from bapo_megatron.config import RunConfig\nfrom bapo_megatron.config.recipe import load_recipe\n"
        "def recipe():\n"
        f"    run = load_recipe(Path({str(RECIPE)!r}), RunConfig)\n"
        "    return replace(run, rollout=replace(run.rollout, prompts_per_step=6))\n"
    )
    with pytest.raises(ConfigError, match="prompts_per_step=6 cannot be split into 4"):
        make_study_plan(StudyOptions(recipe=recipe))
    make_study_plan(StudyOptions(recipe=recipe, settings=("fresh", "stale_3")))


def test_a_study_may_grow(tmp_path: Path) -> None:
    store_plan(make_study_plan(replace(SMALL, folder=tmp_path)))
    store_plan(make_study_plan(replace(SMALL, folder=tmp_path, seeds=3, methods=("grpo", "paper"))))
    stored = json.loads((tmp_path / PLAN).read_text())
    assert len(stored["arms"]) == 6 + 3 + 2  # the first; a third seed of grpo, three of paper
    assert stored["base"]["optimizer.lr"] == 1e-4


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
    with pytest.raises(ConfigError, match="another --folder") as refused:
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
    with pytest.raises(ConfigError, match="recipe: model.hf_path: .*/recipes/demo/policy in the study"):
        store_plan(make_study_plan(elsewhere))
    another_task = replace(elsewhere, recipe=RECIPE.with_name("demo_study_long.py"), analyse=True)
    with pytest.raises(ConfigError, match="hf_path: demo/policy in the study, demo/policy_long now"):
        check_same_study(make_study_plan(another_task))


@pytest.mark.parametrize("recipe", ["demo_study.py", "demo_study_long.py"])
def test_tasks_of_the_study(recipe: str) -> None:
    base = load_recipe(RECIPE.with_name(recipe), RunConfig)
    base.check()
    assert (base.model.hf_path / "model.safetensors").is_file()
    assert Path(base.evaluation.suites[0]).is_file()


def test_done_needs_the_last_evaluation(tmp_path: Path) -> None:
    arm = Arm("grpo", "fresh", 0, 4, tmp_path, (), evaluates=True)
    evaluations = tmp_path / "evaluations.jsonl"
    evaluations.write_text('{"step": 2, "eval/mean": 0.5}\n')
    (tmp_path / "events.jsonl").write_text('{"kind": "export", "step": 4}\n')
    assert not arm.is_done()
    evaluations.write_text('{"step": 4, "eval/mean": 0.5}\n')
    assert arm.is_done()
    assert all(one.evaluates for one in make_study_plan(SMALL).arms)


def test_done_is_an_export_of_the_last_step(tmp_path: Path) -> None:
    arm = Arm("grpo", "fresh", 0, 4, tmp_path / "run", ())
    assert not arm.is_done()
    arm.run_dir.mkdir()
    log = arm.run_dir / "events.jsonl"
    log.write_text('{"kind": "checkpoint", "step": 4}\n{"kind": "export", "step": 3}\n')
    assert not arm.is_done()
    log.write_text(log.read_text() + '{"kind": "export", "step": 4}\n')
    assert arm.is_done()
