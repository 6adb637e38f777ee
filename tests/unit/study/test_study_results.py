"""The results file of a study: what it holds, and which arms it spares."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import write_atomically
from benchmarks.study import command, results
from benchmarks.study.command import study_command
from benchmarks.study.options import StudyOptions
from benchmarks.study.pages import figures
from benchmarks.study.plan import Arm, StudyPlan, make_study_plan
from benchmarks.study.results import read_results, store_results, stored_arms

OPTIONS = StudyOptions(methods=("grpo",), passes=(1, 8), seeds=2, steps=2)


def finish(arm: Arm, reward: float) -> None:
    """Make the run directory of an arm that is done."""
    arm.run_dir.mkdir(parents=True, exist_ok=True)
    rows = [{"step": 1, "reward/mean": 0.0}, {"step": 2, "reward/mean": reward}]
    evaluation = {"step": 2, "eval/mean": 0.5}
    event = {"kind": "export", "step": 2}
    for name, lines in (("metrics", rows), ("evaluations", [evaluation]), ("events", [event])):
        (arm.run_dir / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def plan(tmp_path: Path) -> StudyPlan:
    """Three of its four arms are done."""
    plan = make_study_plan(replace(OPTIONS, folder=tmp_path / "study", write=tmp_path / "docs/study.md"))
    (tmp_path / "docs").mkdir()
    for arm in plan.arms[:3]:
        finish(arm, 2 / 3)
    return plan


def lines_of(plan: StudyPlan) -> list[str]:
    return plan.options.results.read_text().splitlines()


def test_what_is_read_back_is_what_was_stored(plan: StudyPlan) -> None:
    records = store_results(plan)
    assert [(one.method, one.passes, one.seed) for one in records] == [
        ("grpo", 1, 0),
        ("grpo", 8, 0),
        ("grpo", 1, 1),
    ]
    for one in records:
        assert one.figures["mean_reward"] == 0.33333
        assert one.figures["held_out"] == 0.5
        assert math.isnan(one.figures["clipped"])
        assert one.curves["reward"].tolist() == [0.0, 0.66667]
        assert math.isnan(one.curves["entropy"][0])
    assert len(lines_of(plan)) == 1 + 3


def test_two_that_store_at_once_lose_no_line(plan: StudyPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comes while the first is about to write what it has read, and waits for it."""
    finish(plan.arms[3], 0.5)
    one, other = (replace(plan, arms=arms) for arms in (plan.arms[:2], plan.arms[2:]))
    second = Thread(target=store_results, args=(other,))

    def write(path: Path, text: str) -> None:
        if second.ident is None:
            second.start()
            second.join(0.5)  # without a lock it has written by now, and its lines are lost
        write_atomically(path, text)

    monkeypatch.setattr(results, "write_atomically", write)
    store_results(one)
    second.join()
    assert len(read_results(plan)) == 4


def test_it_names_no_place(plan: StudyPlan, tmp_path: Path) -> None:
    store_results(plan)
    text = "\n".join(lines_of(plan))
    assert str(tmp_path) not in text
    assert str(plan.options.recipe.parent) not in text
    assert '"demo/policy_study"' in text


def test_arms_in_the_file_are_not_run_again(plan: StudyPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their run directories are gone, or on another machine."""
    store_results(plan)
    elsewhere = plan.options.folder.with_name("elsewhere")
    run: list[str] = []

    def finish_all(arms: list[Arm], *_: object) -> list[object]:
        run.extend(arm.name for arm in arms)
        for arm in arms:
            finish(arm, 0.5)
        return []

    monkeypatch.setattr(command, "run_missing", finish_all)
    flags = ["--methods", "grpo", "--passes", "1", "8", "--seeds=2", "--steps=2"]
    places = [f"--folder={elsewhere}", f"--write={plan.options.document}"]
    assert study_command(["staleness", *flags, *places], lambda _: 0) == 0
    assert run == ["grpo-8x-seed1"]
    assert len(lines_of(plan)) == 1 + 4
    assert "4 of 4 arms are done" in plan.options.document.read_text()


def test_other_arms_stay(plan: StudyPlan) -> None:
    """And the head of an older commit, which lacks a field of today."""
    store_results(plan)
    head, *lines = lines_of(plan)
    old = json.loads(head)
    del old["base"]["algorithm.reference_kl.place"]
    before = [json.dumps(old), *lines]
    plan.options.results.write_text("\n".join(before) + "\n")
    other = make_study_plan(replace(plan.options, methods=("paper",), passes=(8,), seeds=1))
    [arm] = other.arms
    finish(arm, 0.5)
    assert [one.method for one in store_results(other)] == ["paper"]
    after = lines_of(plan)
    assert set(before) < set(after)
    assert after[0] == before[0]
    order = [(line["seed"], line["passes"], line["method"]) for line in map(json.loads, after[1:])]
    assert order == sorted(order)


def test_an_arm_that_was_made_anew_counts(plan: StudyPlan) -> None:
    store_results(plan)
    finish(plan.arms[0], 1.0)
    assert store_results(plan)[0].figures["mean_reward"] == 0.5


def test_other_settings_are_refused(plan: StudyPlan) -> None:
    store_results(plan)
    for changed, named in (
        ({"steps": 3}, "--steps: 2 in the study, 3 now"),
        ({"lr": 3e-4}, "--optimizer.lr: None in the study, 0.0003 now"),
    ):
        with pytest.raises(ConfigError, match=named):
            stored_arms(make_study_plan(replace(plan.options, **changed)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "harm",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]\n" + text,
        lambda text: text.replace('"command"', '"order"'),
    ],
)
def test_a_broken_file_is_refused(plan: StudyPlan, harm) -> None:  # type: ignore[no-untyped-def]
    store_results(plan)
    path = plan.options.results
    path.write_text(harm(path.read_text()))
    broken = path.read_text()
    with pytest.raises(ConfigError, match=r"study\.jsonl is not a study's results"):
        store_results(plan)
    assert path.read_text() == broken


@pytest.mark.parametrize(
    ("study", "page"),
    [
        ("staleness", "docs/study.md"),
        ("controller", "benchmarks/results/controller_study.md"),
        ("real-model", "benchmarks/results/real_model_study.md"),
    ],
)
def test_what_is_published_is_what_its_results_say(
    study: str, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--analyse` makes the same page of the results, which it leaves as they are: nothing has run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(figures, "_save", lambda _figure, _folder, name: f"{name}.png")
    published = Path(__file__).parents[3] / page
    results, copy = published.with_suffix(".jsonl"), Path(published.name).with_suffix(".jsonl")
    copy.write_bytes(results.read_bytes())
    assert study_command([study, "--analyse", f"--write={published.name}"], lambda _: 1) == 0
    text = published.read_text()
    assert Path(published.name).read_text() == text
    assert copy.read_bytes() == results.read_bytes()
    assert all((published.parent / file).is_file() for file in re.findall(r"\]\((figures/.*)\)", text))
