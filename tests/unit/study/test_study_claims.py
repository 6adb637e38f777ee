"""Verdicts and the document of made-up studies whose outcome is known."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from bapo_megatron.cli import run as bapo
from bapo_megatron.commands.report.data import Series
from benchmarks.study.claims import (
    CLAIMS,
    SMALLEST,
    Side,
    best_preset,
    by_seed,
    findings,
    limited_to,
    side_differences,
)
from benchmarks.study.document import document
from benchmarks.study.figures import _draw_curves, draw_against_staleness, draw_study, spread
from benchmarks.study.measures import ArmRecord
from benchmarks.study.methods import BAPO, METHODS, SETTINGS, STALE
from benchmarks.study.options import StudyOptions
from benchmarks.study.plan import StudyPlan, make_study_plan
from benchmarks.study.runner import Failure

FLAT = dict.fromkeys((*SMALLEST, "final_reward", "mean_reward", "final_entropy", "first_entropy"), 0.5) | {
    "collapsed": 0.0,
    "entropy_collapsed": 0.0,
    "moved": 0.5,
    "clip_low": 0.7,
    "clip_high": 1.5,
    "staleness": 1.0,
}


def record(method: str, setting: str, seed: int, **figures: float) -> ArmRecord:
    values = {
        name: Series(np.arange(1, 5) / 4, np.linspace(0.2, 0.4, 4))
        for name in ("reward", "entropy", "grad_norm", "clipped", "contribution", "held_out")
    }
    return ArmRecord(method, setting, seed, FLAT | figures, values)


def made_up(**of_method: float) -> list[ArmRecord]:
    """Every arm of three seeds, alike but for their seed and the entropy that each method keeps."""
    plan = make_study_plan(StudyOptions(seeds=3))
    return [
        record(
            arm.method, arm.setting, arm.seed, entropy_kept=of_method.get(arm.method, 0.5) + 0.001 * arm.seed
        )
        for arm in plan.arms
    ]


def verdicts(
    records: Sequence[ArmRecord], settings: Sequence[str] = tuple(SETTINGS)
) -> dict[tuple[str, str, str], str]:
    return {
        (found.claim.text, found.claim.side.method, found.claim.figure): found.verdict
        for found in findings(records, settings)
    }


def test_nothing_happened_and_nothing_is_seen() -> None:
    found = verdicts(made_up())
    unfit = {key for key, verdict in found.items() if verdict == "does not apply"}
    assert {text for text, _, _ in unfit} == {
        "A lower c_low degrades performance",
        "A lower c_low speeds up the fall of entropy",
    }
    assert {found[key] for key in found.keys() - unfit} == {"not seen"}


def test_bounds_that_rest_say_nothing_of_the_search() -> None:
    """`balanced` moves in 4 % of its updates, `published_code` in 6 %: one is clipping at 0.6 and 1.2."""
    shares = {"balanced": 0.04, "published_code": 0.06}
    records = [
        replace(one, figures=one.figures | {"moved": shares.get(one.method, 0.5), "held_out": 0.3})
        if one.method in shares
        else one
        for one in made_up()
    ]
    found = verdicts(records)
    assert found["BAPO (`balanced`) outperforms GRPO", "balanced", "held_out"] == "does not apply"
    assert found["BAPO (`published_code`) outperforms GRPO", "published_code", "held_out"] == "opposite"
    assert found["A lower c_low degrades performance", "balanced", "held_out"] == "seen"
    plan = make_study_plan(StudyOptions())
    text = document(plan, records, findings(records, plan.options.settings), [], {})
    assert "| BAPO (`balanced`) outperforms GRPO |" not in text
    assert (
        "- balanced (partial): 2, which need bounds that move. Here 4.0 % of the updates moved theirs."
        in text
    )
    tested = [one for one in findings(records, plan.options.settings) if one.verdict != "does not apply"]
    assert f"{len(tested)} claims are tested" in text


def test_verdicts_follow_the_runs() -> None:
    found = verdicts(made_up(grpo=0.5, balanced=0.9, paper=0.2, clip_higher=0.52))
    assert found["BAPO (`balanced`) keeps the entropy", "balanced", "entropy_kept"] == "seen"
    assert found["BAPO (`paper`) keeps the entropy", "paper", "entropy_kept"] == "opposite"
    assert found["BAPO (`published_code`) keeps the entropy", "published_code", "entropy_kept"] == "not seen"
    assert (
        found["A higher c_high holds back the fall of entropy", "clip_higher", "entropy_kept"] == "not seen"
    )
    on_balanced = found["PAPO on `balanced` holds the entropy", "papo", "entropy_kept"]
    assert on_balanced == "opposite"  # 0.5 against 0.9
    assert found["PAPO on `grpo` holds the entropy", "papo_grpo", "entropy_kept"] == "not seen"


def test_noise_is_not_distinguishable() -> None:
    records = [
        replace(one, figures=one.figures | {"entropy_kept": (0.3, 0.9, 0.2)[one.seed]})
        if one.method == "balanced"
        else one
        for one in made_up()
    ]
    found = verdicts(records)
    assert found["BAPO (`balanced`) keeps the entropy", "balanced", "entropy_kept"] == "not distinguishable"


def test_nothing_was_run() -> None:
    assert set(verdicts([]).values()) == {"not tried"}


def test_pairs_are_of_one_seed_and_settings_are_averaged() -> None:
    """GRPO 0.1, 0.2, 0.3 and balanced 0.4, 0.5, 0.9 at three settings: 0.6 - 0.2; seed 1 is alone."""
    records = [
        *(
            record("grpo", name, 0, held_out=value)
            for name, value in zip(STALE, (0.1, 0.2, 0.3), strict=True)
        ),
        *(
            record("balanced", name, 0, held_out=value)
            for name, value in zip(STALE, (0.4, 0.5, 0.9), strict=True)
        ),
        *(record("balanced", name, 1, held_out=0.7) for name in STALE),
    ]
    [claim] = [one for one in CLAIMS if one.text == "BAPO (`balanced`) outperforms GRPO"]
    assert side_differences(records, claim) == pytest.approx([0.4])
    assert by_seed(records, claim.side, "held_out") == pytest.approx({0: 0.6, 1: 0.7})


def test_a_seed_without_all_settings_does_not_count() -> None:
    records = [record("grpo", "stale_3", 0), record("grpo", "stale_7", 0, held_out=float("nan"))]
    assert by_seed(records, Side("grpo", ("stale_3", "stale_7")), "held_out") == {}
    assert by_seed(records, Side("grpo", ("stale_3",)), "held_out") == {0: 0.5}
    assert by_seed(records, Side("grpo", ()), "held_out") == {}


def test_on_policy_the_baseline_stands_for_methods_that_only_clip() -> None:
    records = [record("grpo", "fresh", 0, held_out=0.3), record("papo", "fresh", 0, held_out=0.4)]
    assert by_seed(records, Side("balanced", ("fresh",)), "held_out") == {0: 0.3}
    assert by_seed(records, Side("papo", ("fresh",)), "held_out") == {0: 0.4}


def test_a_claim_keeps_the_settings_that_the_study_has() -> None:
    [claim] = [one for one in CLAIMS if one.text == "BAPO (`paper`) keeps the entropy"]
    cut = limited_to(claim, ("fresh", "stale_7"))
    assert cut.side.settings == ("stale_7",)
    assert cut.other is not None
    assert cut.other.settings == ("stale_7",)
    assert set(verdicts(made_up(), ("fresh",)).values()) == {"not tried"}


def test_negative_tokens_dominate_below_a_half() -> None:
    key = ("Under GRPO negative tokens dominate the gradient", "grpo", "contribution")
    for share, expected in ((0.3, "seen"), (0.7, "opposite"), (0.5, "not seen")):
        records = [replace(one, figures=one.figures | {"contribution": share}) for one in made_up()]
        assert verdicts(records)[key] == expected


def test_claims_name_what_exists() -> None:
    assert len({(claim.text, claim.side, claim.other, claim.figure) for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        sides = [side for side in (claim.side, claim.other) if side]
        assert all(side.method in METHODS and set(side.settings) <= set(SETTINGS) for side in sides)
        assert claim.figure in SMALLEST
        assert abs(claim.sign) == 1
        assert re.match(r"Sec\. \d|arXiv", claim.source)
    assert {claim.side.method for claim in CLAIMS} == set(METHODS)
    assert set(BAPO) < set(METHODS)


def test_the_best_preset_by_hand() -> None:
    """Held-out 0.8, 0.6 and 0.79 in every seed: `paper` is best, and no better than `published_code`."""
    shares = {"paper": 0.8, "balanced": 0.6, "balanced_half": 0.7, "published_code": 0.79}
    records = [
        replace(one, figures=one.figures | {"held_out": shares.get(one.method, 0.9)}) for one in made_up()
    ]
    found = best_preset(records, tuple(SETTINGS))
    assert [(best, one.claim.other and one.claim.other.method, one.verdict) for best, one in found] == [
        ("paper", "balanced", "seen"),
        ("paper", "balanced_half", "seen"),
        ("paper", "published_code", "not seen"),
    ]
    assert [one.effect and one.effect.mean for _, one in found] == pytest.approx([0.2, 0.1, 0.01])
    assert best_preset([one for one in records if one.method == "paper"], tuple(SETTINGS)) == []


def test_presets_are_compared_on_the_seeds_that_all_have() -> None:
    """`paper` has a seed more, in which all was easy; on the others it is as good as `balanced`."""
    records = [
        record(method, setting, seed, held_out=1.0 if seed == 2 else 0.5)
        for method, seeds in (("paper", 3), ("balanced", 2), ("balanced_half", 2))
        for setting in STALE
        for seed in range(seeds)
    ]
    best, finding = best_preset(records, tuple(SETTINGS))[0]
    assert (best, finding.effect and finding.effect.mean) == ("paper", 0.0)
    plan = make_study_plan(StudyOptions(methods=("paper", "balanced", "balanced_half")))
    text = document(plan, records, [], [], {})
    assert "most held-out problems: `paper` and `balanced` and `balanced_half`." in text


def test_entropy_is_held_against_learning() -> None:
    """Kept 0.1, 0.2, ... 0.9 and right 0.9, 0.8, ... 0.1: a correlation of -1."""
    records = [
        record("grpo", "stale_3", seed, entropy_kept=0.1 * seed, held_out=1 - 0.1 * seed)
        for seed in range(1, 10)
    ]
    plan = make_study_plan(StudyOptions(methods=("grpo",)))
    assert "Over the 9 stale arms" in (text := document(plan, records, [], [], {}))
    assert "correlate at -1.00." in text
    assert "correlate" not in document(plan, records[:7], [], [], {})


def test_differences_are_shown_for_each_setting() -> None:
    """`balanced` 0.1 better than GRPO at one level and 0.2 worse at another, in each of three seeds."""
    records = [
        record(method, setting, seed, held_out=0.5 + shift + 0.01 * seed)
        for method, shifts in (("grpo", (0.0, 0.0)), ("balanced", (0.1, -0.2)))
        for setting, shift in zip(("stale_3", "stale_7"), shifts, strict=True)
        for seed in range(3)
    ]
    plan = make_study_plan(
        StudyOptions(methods=("grpo", "balanced"), settings=("stale_3", "stale_7"), seeds=3)
    )
    text = document(plan, records, [], [], {})
    assert "| balanced | +0.100 (+0.100 to +0.100), 3 | -0.200 (-0.200 to -0.200), 3 |" in text


def test_the_spread_by_hand() -> None:
    mean, low, high = spread([np.array([1.0, np.nan, np.nan]), np.array([3.0, 5.0, np.nan])])
    assert mean[:2].tolist() == [2.0, 5.0]
    assert low[:2].tolist() == [1.0, 5.0]
    assert high[:2].tolist() == [3.0, 5.0]
    assert np.isnan([mean[2], low[2], high[2]]).all()


# --- the command on a study that is there ---------------------------------------------------------


def write_run(plan: StudyPlan, number: int, entropy: float) -> None:
    """A finished arm on disk whose entropy ends at so much of its start."""
    arm = plan.arms[number]
    arm.run_dir.mkdir(parents=True)
    rows = [
        {
            "step": step,
            "reward/mean": 0.1 * step,
            "policy/entropy": 1 - (1 - entropy) * (step - 1) / (arm.steps - 1),
        }
        for step in range(1, arm.steps + 1)
    ]
    (arm.run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    update = {"step": 1, "epoch": 0, "policy/entropy": 1.0}
    (arm.run_dir / "updates.jsonl").write_text(json.dumps(update) + "\n")
    (arm.run_dir / "evaluations.jsonl").write_text(json.dumps({"step": arm.steps, "eval/mean": 0.4}) + "\n")
    (arm.run_dir / "events.jsonl").write_text(json.dumps({"kind": "export", "step": arm.steps}) + "\n")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The document of a quick study one of whose six arms is missing."""
    folder = tmp_path_factory.mktemp("study")
    plan = make_study_plan(StudyOptions(folder=folder, quick=True).resolved())
    kept = {"grpo": 0.5, "balanced": 0.8}
    for number, arm in enumerate(plan.arms[:-1]):
        write_run(plan, number, kept[arm.method] + 0.01 * arm.seed)
    path = folder / "doc" / "stale.md"
    path.parent.mkdir()
    assert bapo(["study", "staleness", "--quick", "--analyse", f"--folder={folder}", f"--write={path}"]) == 0
    return path


def test_the_document_says_what_there_is(written: Path) -> None:
    text = written.read_text()
    assert "5 of 6 arms are done, 2 seeds of 6 steps each" in text
    assert "**Not run: 1.**" in text
    assert "`--quick`: it shows that the study works" in text
    assert "| stale_7 | grpo | 2 | 0.600 ± 0.000 | 0.400 ± 0.000 |" in text
    [kept] = re.findall(r"\| BAPO \(`balanced`\) keeps the entropy \|.*\| (.*) \| \*\*(.*)\*\* \|", text)
    assert kept == ("+0.300, 1", "not distinguishable")  # one seed has both arms
    assert "- papo_grpo (stale_7) - grpo (stale_7): 2\n" in text
    assert "**not tried** |" not in text


def test_the_pictures_show_something(written: Path) -> None:
    shown = re.findall(r"!\[.*\]\((.*)\)", written.read_text())
    assert len(shown) == 7
    assert {f"figures/{path.name}" for path in (written.parent / "figures").iterdir()} == set(shown)
    for name in shown:
        assert imread(written.parent / name)[..., :3].std() > 0.03


def test_failures_are_told_and_counted(tmp_path: Path) -> None:
    plan = make_study_plan(StudyOptions(folder=tmp_path, quick=True).resolved())
    records = [record(arm.method, arm.setting, arm.seed) for arm in plan.arms[:3]]
    failed = [Failure(arm, "exit code 1: not finite") for arm in plan.arms[3:5]]
    text = document(plan, records, findings(records, plan.options.settings), failed, {})
    assert "3 of 6 arms are done" in text
    assert "**Failed: 2**" in text
    assert "**Not run: 1.**" in text
    assert f"- `{plan.arms[4].name}`: exit code 1: not finite" in text
    assert "## Arms that failed" not in document(plan, records, [], [], {})


def test_equal_values_have_bars_of_no_length(tmp_path: Path) -> None:
    """The mean of equal numbers may differ from them by rounding; no bar has a length below 0."""
    records = [record("grpo", "fresh", seed, final_reward=0.1, drawdown=0.1 + 0.2) for seed in range(3)]
    assert "long_staleness.png" in draw_study(records, tmp_path, "long")


@pytest.mark.parametrize(
    ("count", "shape"), [(1, (1, 1)), (2, (1, 2)), (4, (2, 2)), (5, (2, 3)), (6, (2, 3))]
)
def test_there_is_a_panel_for_each_setting_and_no_other(count: int, shape: tuple[int, int]) -> None:
    figure = _draw_curves([record("grpo", setting, 0) for setting in list(SETTINGS)[:count]], "reward")
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [bool(axes.get_title(loc="left")) for axes in shown] == [True] * count
    grid = shown[0].get_subplotspec().get_gridspec()
    assert (grid.nrows, grid.ncols) == shape


def test_axes_without_runs_say_so() -> None:
    empty = draw_against_staleness([record("grpo", "partial", 0)])
    assert [axes.texts[0].get_text() for axes in empty.axes] == ["not measured"] * 4
    full = draw_against_staleness([record("grpo", "fresh", 0)])
    assert not any(axes.texts for axes in full.axes)


def test_a_study_without_runs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bapo(["study", "staleness", "--quick", "--analyse", f"--folder={tmp_path / 'none'}"]) == 2
    assert "no arm of the study" in capsys.readouterr().err
