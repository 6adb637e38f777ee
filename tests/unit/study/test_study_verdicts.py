"""Gates, contrasts, the repair out of sample, and the document that tells them, on runs made up by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.study.contrasts import Contrast, contrast, entropy_at_equal_reward, out_of_sample, primary
from benchmarks.study.gates import GATES, gate_results
from benchmarks.study.measures import ArmRecord
from benchmarks.study.methods import FIXED_PAIRS, REPAIRS
from benchmarks.study.options import StudyOptions
from benchmarks.study.pages.document import COLUMNS, document
from benchmarks.study.pages.figures import draw_study, spread
from benchmarks.study.pages.paper_figures import curves, fig_8, fig_10
from benchmarks.study.paired import Effect, p_value
from benchmarks.study.plan import StudyPlan, make_study_plan
from benchmarks.study.runner import Failure

GOOD = {
    "entropy_kept": 0.9,
    "collapsed": 1.0,
    "clipped": 0.03,
    "positive_share": 0.4,
    "raised_tokens": 0.02,
    "raised_probability": 0.3,
}
SEEDS = range(6)


def record(method: str, passes: int, seed: int, reward: float, **figures: float) -> ArmRecord:
    blank = dict.fromkeys(COLUMNS, math.nan) | {"collapsed": 0.0, "first_entropy": 1.0}
    curves = {name: np.full(4, 0.5) for name in ("reward", "entropy", "grad_norm", "clipped")}
    curves |= {name: np.full(4, 0.7) for name in ("positive_share", "clip_low", "clip_high")}
    own = blank | {"mean_reward": reward} | figures
    return ArmRecord(method, passes, seed, own, curves | {"profile": np.full(13, 0.3)})


def grpo_runs(**changed: float) -> list[ArmRecord]:
    """GRPO as the gates want it: it keeps entropy on-policy, loses it at 4x, collapses at 8x."""
    kept = {1: 0.9, 2: 0.8, 4: 0.6, 8: 0.5}
    return [
        record("grpo", passes, seed, 0.1 + 0.01 * seed, **(GOOD | {"entropy_kept": kept[passes]} | changed))
        for passes in kept
        for seed in SEEDS
    ]


def runs_of(method: str, rewards: Sequence[float], passes: int = 8) -> list[ArmRecord]:
    return [record(method, passes, seed, reward) for seed, reward in enumerate(rewards)]


def test_all_gates_hold_by_hand() -> None:
    results = gate_results(grpo_runs())
    assert [one.value for one in results] == pytest.approx([0.9, 0.6, 1.0, 0.03, 0.4, 0.02, 0.3])
    assert all(one.passed for one in results)
    assert {one.seeds for one in results} == {6}


@pytest.mark.parametrize(
    ("figure", "value", "message"),
    [
        (
            "entropy_kept",
            0.79,
            r"gate entropy kept on-policy \(1x\) failed: 0.79 ± [^,]+, must be at least 0.8",
        ),
        ("entropy_kept", 0.81, r"entropy lost with reuse \(4x\) failed: 0.81 ± [^,]+, must be at most 0.7"),
        ("collapsed", 0.0, r"collapse \(8x\) failed: 0 ± [^,]+, must be at least 0.5"),
        ("clipped", 0.019, r"clipped tokens \(8x\) failed: 0.019 ± [^,]+, must be 0.02 to 0.06"),
        ("clipped", 0.061, "0.061"),
        ("positive_share", 0.46, "must be 0.38 to 0.45"),
        ("raised_tokens", 0.0099, "must be at least 0.01"),
        ("raised_probability", 0.41, "must be at most 0.4"),
        ("raised_probability", math.nan, "failed: not measured"),
    ],
)
def test_a_gate_fails(figure: str, value: float, message: str) -> None:
    failed = [one.failure for one in gate_results(grpo_runs(**{figure: value})) if not one.passed]
    assert any(re.search(message, one) for one in failed)


def test_the_standard_error_of_a_gate_by_hand() -> None:
    """Shares 0.38, 0.40 and 0.45: mean 0.41, squared distances 9, 1 and 16 e-4; sqrt(13e-4 / 3) = 0.0208."""
    shares = enumerate((0.38, 0.40, 0.45))
    runs = [record("grpo", 2, seed, 0.1, positive_share=share) for seed, share in shares]
    [found] = [one for one in gate_results(runs) if one.gate.figure == "positive_share"]
    assert found.error == pytest.approx(math.sqrt(13e-4 / 3))
    assert found.shown == "0.41 ± 0.021"
    [alone] = [one for one in gate_results(runs[:1]) if one.gate.figure == "positive_share"]
    assert alone.shown == "0.38"


def test_the_ends_of_a_range_pass_and_other_methods_do_not_count() -> None:
    runs = grpo_runs(clipped=0.02) + [replace(one, method="paper") for one in grpo_runs(clipped=0.5)]
    [clipped] = [one for one in gate_results(runs) if one.gate.figure == "clipped"]
    assert clipped.passed
    assert not any(one.passed for one in gate_results([]))


def test_a_contrast_is_paired_by_seed() -> None:
    """Seeds 0 to 2 are in both: differences 0.1, 0.2, 0.3."""
    runs = runs_of("paper", [0.2, 0.4, 0.6]) + runs_of("grpo", [0.1, 0.2, 0.3, 0.9])
    found = contrast(runs, "paper", "grpo", 8)
    assert found.effect is not None
    assert found.effect.pairs == 3
    assert found.effect.mean == pytest.approx(0.2)
    assert found.p == p_value([0.1, 0.2, 0.3])
    assert contrast(runs, "paper", "grpo", 4).words == "not run"


def effect(mean: float, half: float) -> Effect:
    return Effect(mean, mean - half, mean + half, 12)


@pytest.mark.parametrize(
    ("found", "p", "words"),
    [
        (effect(0.1, 0.05), 0.01, "better"),
        (effect(-0.1, 0.05), 0.01, "worse"),
        (effect(0.03, 0.01), 0.01, "better, by less than the 0.05 that matters"),
        (effect(0.1, 0.05), 0.05, "no difference shown; an advantage of 0.05 or more is not ruled out"),
        (effect(-0.01, 0.02), 0.4, "no difference shown; an advantage of 0.05 or more is ruled out"),
        (effect(0.1, 0.05), None, "too few seeds to say"),
        (None, None, "not run"),
    ],
)
def test_words_by_hand(found: Effect | None, p: float | None, words: str) -> None:
    assert Contrast("paper", "grpo", 8, "mean_reward", found, p).words == words


def test_primary_contrasts_are_corrected_together() -> None:
    """p-values of three contrasts: the smallest times 3, the next times 2, the last as it is."""
    paper = [0.5, 0.5, 0.5, 0.5]
    others = {
        "grpo": [0.3, 0.31, 0.29, 0.3],
        "fixed_0.9_3.0": [0.4, 0.45, 0.42, 0.47],
        "fixed_0.9_1.2": [0.5, 0.4, 0.6, 0.52],
    }
    runs = runs_of("paper", paper) + [one for name, values in others.items() for one in runs_of(name, values)]
    alone = [contrast(runs, "paper", name, 8).p for name in others]
    expected = [3 * (alone[0] or 0), 2 * (alone[1] or 0), alone[2]]
    found = primary(runs)
    assert [one.other for one in found] == list(others)
    assert [one.p for one in found] == pytest.approx(expected)
    assert primary(runs_of("paper", paper) + runs_of("grpo", others["grpo"]))[0].p == alone[0]


def test_entropy_at_equal_reward_is_paired() -> None:
    ours, theirs = (
        replace(one, curves={**one.curves, "entropy": np.full(4, value)})
        for one, value in ((record("paper", 8, 0, 0.5), 0.7), (record("grpo", 8, 0, 0.5), 0.4))
    )
    found = entropy_at_equal_reward([ours, theirs], "paper", "grpo", 8)
    assert found.effect is not None
    assert found.effect.mean == pytest.approx(0.3)


def test_a_repair_is_judged_on_other_seeds_than_it_was_chosen_on() -> None:
    """On seeds 0 to 2 `hold_low` and [0.9, 1.2] are the best; what seeds 3 to 5 say of others is unknown."""
    runs = [
        *runs_of("floored", [0.2, 0.2, 0.2, 0.9, 0.9, 0.9]),
        *runs_of("hold_low", [0.5, 0.5, 0.5, 0.2, 0.3, 0.4]),
        *runs_of("grpo", [0.1, 0.1, 0.1, 0.8, 0.8, 0.8]),
        *runs_of("fixed_0.9_1.2", [0.4, 0.4, 0.4, 0.1, 0.1, 0.1]),
    ]
    found = out_of_sample(runs)
    assert found is not None
    assert (found.repair.method, found.fixed.method) == ("hold_low", "fixed_0.9_1.2")
    assert (found.repair.seeds, found.repair.mean) == ((0, 1, 2), 0.5)
    assert found.contrast.effect is not None
    assert found.contrast.effect.mean == pytest.approx(0.2)  # of 0.1, 0.2, 0.3
    assert found.contrast.p == pytest.approx(p_value([0.1, 0.2, 0.3]))
    assert out_of_sample(runs_of("floored", [0.2] * 6)) is None
    assert out_of_sample([]) is None
    assert not set(REPAIRS) & set(FIXED_PAIRS)


@pytest.fixture(scope="module")
def plan() -> StudyPlan:
    return make_study_plan(StudyOptions(seeds=6))


def told(plan: StudyPlan, records: Sequence[ArmRecord], **more: Mapping[str, str]) -> str:
    return document(plan, records, [], dict(more.get("pictures", {})))


def better_paper() -> list[ArmRecord]:
    runs = grpo_runs()
    for name, gain in (("paper", 0.2), ("fixed_0.9_3.0", 0.27), ("fixed_0.9_1.2", 0.2001)):
        runs += runs_of(name, [0.1 + 0.01 * seed + gain + 0.001 * (seed % 2) for seed in SEEDS])
    return runs


def test_the_document_tells_the_verdicts_first(plan: StudyPlan) -> None:
    answer = told(plan, better_paper()).split("## What was run")[0]
    assert "All gates hold" in answer
    assert "`paper` against `grpo`: **better**" in answer
    assert "`paper` against `fixed_0.9_3.0`: **worse**" in answer
    assert "`paper` against `fixed_0.9_1.2`: **worse, by less than" in answer
    assert "Not judged: no half of the seeds" in answer


def test_a_failed_gate_judges_nothing(plan: StudyPlan) -> None:
    runs = [one for one in better_paper() if one.method != "grpo"] + grpo_runs(clipped=0.001)
    text = told(plan, runs)
    assert re.search(r"- Not judged: gate clipped tokens \(8x\) failed: 0.001 ± [^,]+, must be 0.02 to", text)
    assert "All differences below are measured, with their intervals" in text
    assert "better**" not in text
    assert "worse" not in text.split("## All methods")[0].split("## The gates")[0]
    assert text.count("| not judged |") == 3


@pytest.mark.parametrize("flag", ["quick", "calibrate"])
def test_a_small_study_judges_nothing(plan: StudyPlan, flag: str) -> None:
    small = replace(plan, options=replace(plan.options, **{flag: True}))  # type: ignore[arg-type]
    text = told(small, better_paper())
    assert "Not judged: see above." in text
    assert "better**" not in text
    assert text.count("| not judged |") == 3
    assert ("does not show which method is better" in text.replace("\n> ", " ")) == (flag == "quick")


def test_the_document_counts_what_is_missing(plan: StudyPlan) -> None:
    runs = better_paper()
    text = document(plan, runs, [Failure(plan.arms[0], "exit code 4")], {"figures/a.png": "A picture"})
    assert f"{len(runs)} of {len(plan.arms)} arms are done, 6 seeds of" in text
    assert f"**Not run: {len(plan.arms) - len(runs) - 1}.**" in text
    assert f"- `{plan.arms[0].name}`: exit code 4" in text
    assert "![A picture](figures/a.png)" in text
    assert all(gate.text in text for gate in GATES)
    assert "| 8x | `grpo` | 6 of 6 | 0.125 ± 0.019 |" in text  # 0.10 to 0.15 by 0.01: sd 0.0187


def test_pictures_of_all_figures(tmp_path: Path) -> None:
    """Also where most was not run: such a panel says so."""
    titles = draw_study(better_paper(), tmp_path, "study")
    assert [name.removeprefix("study_").removesuffix(".png") for name in titles] == [
        *("fig2", "fig4", "fig7", "fig8", "fig9", "fig10"),
        "methods",
    ]
    assert all((tmp_path / name).stat().st_size > 5000 for name in titles)


def test_spread_by_hand() -> None:
    mean, low, high = spread([np.array([1.0, np.nan, np.nan]), np.array([3.0, 2.0, np.nan])])
    assert mean.tolist()[:2] == [2.0, 2.0]
    assert (low.tolist()[:2], high.tolist()[:2]) == ([1.0, 2.0], [3.0, 2.0])
    assert math.isnan(mean[2])


def test_the_paper_s_curves() -> None:
    """What other readers of its graphics found: means 2.06 and 0.69; at 8x 0.449 at step 63, 0.229 at 118."""
    assert fig_8("c_high").value.mean() == pytest.approx(2.06, abs=0.01)
    assert fig_8("c_low").value.mean() == pytest.approx(0.69, abs=0.01)
    reward = curves("fig2_reward")["8x"]
    assert (reward.step[np.nanargmax(reward.value)], np.nanmax(reward.value)) == (63, 0.449)
    assert reward.value[117] == pytest.approx(0.229, abs=1e-3)
    assert np.isnan(reward.value[118:]).all()
    shares = curves("fig4_positive_share")
    assert shares["positive"].value + shares["negative"].value == pytest.approx(1, abs=1e-3)
    clipped = {name: round(float(np.nanmean(one.value)), 3) for name, one in curves("fig2_clipped").items()}
    assert clipped == {"2x": 0.006, "4x": 0.008, "8x": 0.022}
    ratios, chances = fig_10()
    assert chances[ratios > 1.2].max() < 0.3
    assert curves("fig3_reward") == {}
