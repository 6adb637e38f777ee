"""The second study: its arms, gates, margins, chance and verdicts, on runs made up by hand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tyro
from matplotlib.axes import Axes

from bapo_megatron.commands.report.data import MetricTable, RunRecord
from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.errors import ConfigError
from benchmarks.study.contrasts import Contrast
from benchmarks.study.controller import arms, gates, verdicts
from benchmarks.study.controller.command import _check_sound, controller_command
from benchmarks.study.controller.gates import CHANCE, GATES, calibrated, chance_of, margin_of, results_of
from benchmarks.study.controller.options import ControllerOptions
from benchmarks.study.controller.page import Progress, page, picture_of
from benchmarks.study.controller.picture import draw, panels
from benchmarks.study.gates import GateResult
from benchmarks.study.measures import ArmRecord, first_entropy, stale_updates
from benchmarks.study.pages.document import COLUMNS
from benchmarks.study.pages.figures import differences
from benchmarks.study.plan import Arm

OPTIONS = ControllerOptions()
BASE = arms.base_of(OPTIONS)
GOOD = {
    "entropy_kept": 0.9,
    "clipped": 0.03,
    "positive_share": 0.35,
    "raised_tokens": 0.02,
    "raised_probability": 0.3,
    "moved": 0.7,
}
CHOSEN = dict.fromkeys(arms.TUNED, 1.0)


def record(
    name: str, staleness: int, seed: int, reward: float, entropy: float, **figures: float
) -> ArmRecord:
    """A run whose reward rises to 0.5 in its third step, where it has ``entropy``."""
    blank = dict.fromkeys(COLUMNS, math.nan) | {"collapsed": 0.0, "mean_reward": reward} | figures
    curves = {"reward": np.array([0.1, 0.2, 0.5, 0.5]), "entropy": np.array([1.0, 0.9, entropy, entropy])}
    return ArmRecord(name, staleness, seed, blank, curves)


def study(seeds: range = range(6), spread: float = 0.001, **changed: float) -> list[ArmRecord]:
    """All arms of a study: GRPO and BAPO as the gates want them, BAPO 0.1 better than all others."""
    found = []
    for place, seed in enumerate(seeds):
        noise = spread * (-1) ** place * (1 + place % 3)
        own = {name: value + noise for name, value in (GOOD | changed).items()}
        for name, staleness in arms.main_cells(CHOSEN):
            reward = 0.4 + noise * len(name) + 0.1 * (name == "paper")
            entropy = {1: 0.5, 4: 0.45, 8: 0.4}[staleness] + noise
            found.append(record(name, staleness, seed, reward, entropy, **own))
    return found


def configured(arm: Arm) -> RunConfig:
    command, recipe, *flags = arm.command
    assert command == "train"
    return tyro.cli(RunConfig, default=load_recipe(Path(recipe), RunConfig), args=flags)


# --- the arms ------------------------------------------------------------------------------------


def test_the_arms_and_their_seeds() -> None:
    """19 methods and two sequence means at 8, GRPO at three more rates there, and at 1 and 4."""
    cells = arms.main_cells(CHOSEN)
    assert len(arms.VARIANTS) == 21
    assert Counter(staleness for _, staleness in cells) == {1: 1, 4: 1, 8: 24}
    assert {"grpo", "grpo@0.7", "grpo@0.5", "grpo_sequence", "paper"} <= {name for name, _ in cells}
    with_rates = arms.main_cells(CHOSEN | {"paper": 0.5, "grpo": 0.7})
    assert set(with_rates) - set(cells) == {("paper@0.5", 8)}  # GRPO has that rate as a control
    calibration, rates = arms.calibration_arms(OPTIONS, BASE), arms.rate_arms(OPTIONS, BASE)
    assert (len(calibration), len(rates)) == (12 * 4, 4 * 7 * 4)
    seeds = [
        {arm.seed for arm in found} for found in (calibration, rates, arms.main_arms(OPTIONS, BASE, CHOSEN))
    ]
    assert seeds == [set(range(100, 112)), set(range(200, 204)), set(range(12))]


@pytest.mark.parametrize(
    ("name", "staleness", "expected"),
    [
        ("grpo", 1, (1, 1, 4, 1.7e-4, "token")),
        ("grpo@0.7", 4, (2, 2, 16, 1.19e-4, "token")),
        ("grpo_sequence", 8, (2, 4, 32, 1.7e-4, "sequence")),
        ("paper@0.5", 8, (2, 4, 32, 0.85e-4, "token")),
    ],
)
def test_a_command_makes_its_arm(name: str, staleness: int, expected: tuple[Any, ...]) -> None:
    """Staleness is passes x mini-batches, and the warm-up four steps of them."""
    run = configured(arms.arm_of(OPTIONS, BASE, name, staleness, 3))
    run.check()
    algorithm, optimizer = run.algorithm, run.optimizer
    found = (algorithm.reuse_epochs, algorithm.updates_per_epoch, optimizer.warmup_updates)
    assert (*found, optimizer.lr, algorithm.loss_mean) == pytest.approx(expected)
    assert algorithm.reuse_epochs * algorithm.updates_per_epoch == staleness
    method = arms.VARIANTS[name.partition("@")[0]]
    assert (algorithm.bounds, run.seed, run.steps) == (method.bounds, 3, BASE.steps)


def test_stale_updates_are_those_after_the_first_of_a_step() -> None:
    """By mini-batches as by passes."""
    rows = [
        {"step": step, "epoch": update // 2, "policy/entropy": float(update)}
        for step in (1, 2)
        for update in range(4)
    ]
    run = RunRecord.__new__(RunRecord)
    object.__setattr__(run, "updates", MetricTable(rows))
    assert [row["policy/entropy"] for row in stale_updates(run)] == [1, 2, 3, 1, 2, 3]
    assert first_entropy(run) == 0


# --- gates ---------------------------------------------------------------------------------------


def test_all_gates_hold_by_hand() -> None:
    """The entropy: 0.45 - 0.5 in two of four steps of each seed, an interval without width."""
    found = results_of(study())
    assert all(one.passed for one in found)
    [entropy] = [one for one in found if one.gate is gates.ENTROPY]
    assert entropy.value == pytest.approx(-0.025)
    [acts] = [one for one in found if one.gate is gates.CONTROLLER]
    assert (acts.gate.method, acts.gate.passes, acts.seeds) == ("paper", 8, 6)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"entropy_kept": 0.6}, "Learning alone takes most"),
        ({"collapsed": 0.2}, "unstable without staleness"),
        ({"clipped": 0.07}, "All methods with bounds act on these tokens alone"),
        ({"positive_share": 0.45}, "Positive tokens hold BAPO's target anyway"),
        ({"raised_tokens": 0.001}, "had next to none"),
        ({"raised_probability": 0.5}, "these were likely"),
        ({"moved": 0.06}, "what these bounds do, not what a search does"),
    ],
)
def test_one_failed_gate_leaves_no_verdict(changed: dict[str, float], says: str) -> None:
    """BAPO is 0.1 ahead in every seed, and still no word says that it is better."""
    records = study(**changed)
    tuned = verdicts.tuned_gates(records, CHOSEN)
    lines = list(verdicts.verdicts(results_of(records), tuned, verdicts.claims(records, CHOSEN)))
    assert len(lines) == 1
    assert lines[0].startswith("Not judged: ")
    assert says in lines[0]
    text = page(OPTIONS_OF_SIX, BASE, progress(records))
    assert lines[0] in text
    assert not _verdict_words(text)


def test_no_entropy_lost_at_equal_reward_is_a_failed_gate() -> None:
    records = [
        replace(one, curves={**one.curves, "entropy": np.full(4, 0.5 + 0.01 * one.seed * (one.passes == 4))})
        for one in study()
    ]
    [failed] = [one for one in results_of(records) if not one.passed]
    assert failed.gate is gates.ENTROPY
    assert failed.value > 0


def test_what_was_not_measured_has_not_passed() -> None:
    assert not any(one.passed for one in results_of([]))
    assert chance_of([], 12) == 0


# --- margins and the chance ----------------------------------------------------------------------


def result(value: float, error: float, gate: str = "entropy kept on-policy", seeds: int = 12) -> GateResult:
    [found] = [one for one in GATES if one.text == gate]
    return GateResult(found, value, seeds, error)


def test_margins_by_hand() -> None:
    assert margin_of(result(0.75, 0.01)) == pytest.approx(5)
    assert margin_of(result(0.69, 0.01)) == pytest.approx(-1)
    assert margin_of(result(0.05, 0.01, "clipped tokens")) == pytest.approx(1)  # of 0.06, the nearer end
    assert margin_of(result(0.0, 0.0, "on-policy seeds that collapse")) == math.inf
    assert margin_of(result(0.1, 0.0, "on-policy seeds that collapse")) == -math.inf
    assert math.isnan(margin_of(result(0.85, math.nan, seeds=1)))


def test_the_chance_by_hand() -> None:
    """Ten seeds keep 0.8 of the entropy and two 0.3: of twelve drawn at most two may be of these, 0.677."""
    seeds = range(100, 112)
    records = [
        replace(one, figures={**one.figures, "entropy_kept": 0.3 if one.seed < 102 else 0.8})
        for one in study(seeds, spread=0.0)
    ]
    drawn = sum(math.comb(12, bad) * (1 / 6) ** bad * (5 / 6) ** (12 - bad) for bad in range(3))
    assert chance_of(records, 12, draws=20_000) == pytest.approx(drawn, abs=0.015)
    assert chance_of(study(seeds, spread=0.0), 12) == 1


def test_the_study_begins_only_with_its_chance() -> None:
    """Also where every gate holds, narrowly."""
    sound = calibrated(study(range(100, 112)), 12)
    assert sound.is_sound
    _check_sound(sound, OPTIONS)
    narrow = calibrated(study(range(100, 112), spread=0.02, clipped=0.045), 12)
    assert [one.gate.text for one in narrow.narrow if one.passed]
    with pytest.raises(
        ConfigError, match=f"the study does not begin: .* and {CHANCE:g} is asked for.*clipped"
    ):
        _check_sound(narrow, OPTIONS)


# --- rates and verdicts --------------------------------------------------------------------------


def rate_records(best: dict[str, float], missing: str = "") -> Iterator[ArmRecord]:
    for seed in arms.RATE_SEEDS:
        for method in arms.TUNED:
            for rate in arms.RATES:
                name = arms.Variant(method, rate).name
                if name != missing:
                    reward = 0.5 - abs(rate - best[method]) + 0.01 * seed
                    yield record(name, 8, seed, reward, 0.4)


def test_rates_are_chosen_on_seeds_of_their_own() -> None:
    best = CHOSEN | {"paper": 0.7, "gspo": 0.5}
    assert verdicts.chosen_rates(list(rate_records(best))) == best
    assert verdicts.chosen_rates(list(rate_records(best, missing="vespo@0.5"))) is None
    own = [record("grpo@0.5", 8, seed, 9.0, 0.4) for seed in range(12)]  # the study's do not choose
    assert verdicts.chosen_rates([*rate_records(best), *own]) == best


def test_claims_compare_at_the_recipes_rate_and_tuned() -> None:
    """BAPO with three rivals and with its start, and the two sequence means; tuned without the start."""
    chosen = CHOSEN | {"paper": 0.7, "grpo": 0.5}
    found = verdicts.claims(tuned_study(), chosen)
    assert [(one.method, one.other) for one in found.at_recipe_rate] == [
        ("paper", "grpo"),
        ("paper", "grpo_sequence"),
        ("paper", "fixed_0.9_1.2"),
        ("paper", "fixed_0.6_1.2"),
        ("paper_sequence", "grpo_sequence"),
    ]
    assert [(one.method, one.other) for one in found.tuned] == [
        ("paper@0.7", "grpo@0.5"),
        ("paper@0.7", "grpo_sequence"),
        ("paper@0.7", "fixed_0.9_1.2"),
    ]


def tuned_study(**changed: float) -> list[ArmRecord]:
    """The study with BAPO and GRPO at their best rates, whose figures are ``changed``."""
    best = [("paper@0.7", 0.6), ("grpo@0.5", 0.45)]
    figures = GOOD | changed
    return [
        *(one for one in study() if one.method != "grpo@0.5"),
        *(
            record(name, 8, seed, reward + 0.001 * seed, 0.4, **figures)
            for name, reward in best
            for seed in range(6)
        ),
    ]


def test_tuned_claims_need_gates_that_hold_at_their_rates() -> None:
    """At the recipe's rate, where they hold, all is judged the same."""
    chosen = CHOSEN | {"paper": 0.7, "grpo": 0.5}

    def lines(records: list[ArmRecord]) -> list[str]:
        tuned = verdicts.tuned_gates(records, chosen)
        return list(verdicts.verdicts(results_of(records), tuned, verdicts.claims(records, chosen)))

    whole, narrow = lines(tuned_study()), lines(tuned_study(clipped=0.012))
    assert len(whole) == 8
    assert [line for line in whole if line.startswith("`paper@0.7`")] == whole[5:]
    assert all(line.endswith(": better") for line in whole if line.startswith("`paper`") or "@" in line)
    assert narrow[:5] == whole[:5]
    assert len(narrow) == 6
    assert (
        "At the best rates nothing is judged: gates fail there (clipped tokens of `grpo@0.5`: 0.012"
        in narrow[5]
    )


def test_the_page_shows_each_rate_and_where_the_best_is_at_the_edge() -> None:
    best = CHOSEN | {"paper": 0.35, "gspo": 0.5}
    text = page(OPTIONS_OF_SIX, BASE, progress([*study(), *rate_records(best)], best))
    rates = text.partition("## The rates")[2].partition("## The gates")[0]
    assert f"| `gspo` | {' | '.join(f'{2.515 - abs(rate - 0.5):.3f}' for rate in arms.RATES)} |" in rates
    assert "Of `paper` the lowest is the best: a lower one may be better." in rates
    some = [one for one in rate_records(best) if not one.method.endswith("@0.35")]
    assert "Not chosen yet." in page(OPTIONS_OF_SIX, BASE, progress(some, None))


def test_the_picture_has_each_arm_beside_grpo_at_the_same_rate(tmp_path: Path) -> None:
    """Made-up rewards: BAPO 0.1 above GRPO at the recipe's rate, and 0.15 where both have their best."""
    chosen = CHOSEN | {"paper": 0.7, "grpo": 0.5}
    runs = tuned_study()
    at_rate, best = differences(runs, panels(chosen)).axes
    points = _points(at_rate)
    assert len(points) == len(arms.VARIANTS) - 1 + len(arms.RATES[1:])  # all but GRPO, and its lower rates
    assert points["BAPO, micro-batches"] == pytest.approx(0.1, abs=0.01)
    assert len(_points(best)) == len(arms.TUNED) - 1
    few = [one for one in runs if one.method != "vespo" or one.seed < 2]
    assert "VESPO" not in _points(differences(few, panels(chosen)).axes[0])  # two seeds may be alike by luck
    assert _points(best)["BAPO, micro-batches, 0.7 of the rate"] == pytest.approx(0.15)
    options = replace(OPTIONS_OF_SIX, write=tmp_path / "found.md")
    draw(runs, chosen, picture_of(options))
    assert (tmp_path / "figures/found.png").is_file()
    shown = "![Each arm at staleness 8 minus GRPO](figures/found.png)"
    assert shown in page(options, BASE, progress(runs, chosen))
    assert ".png" not in page(options, BASE, progress(runs, None))


def _points(axes: Axes) -> dict[str, float]:
    """Where the points of a panel are, by the labels of their rows."""
    at = {line.get_ydata()[0]: line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"}
    return {label.get_text(): at[place] for place, label in enumerate(axes.get_yticklabels())}


OPTIONS_OF_SIX = replace(OPTIONS, seeds=6)


def progress(records: list[ArmRecord], chosen: dict[str, float] | None = CHOSEN) -> Progress:
    return Progress(records, (), len(records), calibrated([], 6), chosen)


def _verdict_words(text: str) -> list[str]:
    """Words of a verdict that stand outside of the design, which says what would be said."""
    before, _, rest = text.partition("## The design")
    found = before + rest.partition("## The calibration")[2]
    return [word for word in ("better", "worse", "beat", "no difference shown") if word in found]


def test_the_page_judges_only_a_whole_study() -> None:
    whole = page(OPTIONS_OF_SIX, BASE, progress(study()))
    assert "All gates hold." in whole
    assert "`paper` against `grpo`: better" in whole
    for records, chosen in ((study()[1:], CHOSEN), (study(range(5)), CHOSEN), (study(), None)):
        text = page(OPTIONS_OF_SIX, BASE, progress(records, chosen))
        assert "Not judged: not all arms that this needs have run" in text
        assert not _verdict_words(text)
    quick = page(replace(OPTIONS, quick=True), BASE, progress(study()))
    assert "Not judged: this is `--quick`" in quick
    assert not _verdict_words(quick)


def test_what_is_judged_runs_first_and_needs_no_other_arm() -> None:
    """The arms of gates and claims with all seeds, then the others; without these the page judges as well."""
    chosen = CHOSEN | {"paper": 0.5}
    judged = arms.judged_cells(chosen)
    assert judged[:3] == [("grpo", 1), ("grpo", 4), ("paper", 8)]
    assert {("paper@0.5", 8), ("fixed_0.6_1.2", 8), ("fixed_0.9_1.2", 8)} < set(judged)
    assert not {"gspo", "vespo"} & {name for name, _ in judged}  # tuned, and shown
    found = [(arm.method, arm.passes, arm.seed) for arm in arms.main_arms(OPTIONS, BASE, chosen)]
    assert found[: 12 * len(judged)] == [(*cell, seed) for seed in range(12) for cell in judged]
    assert len(found) == len(set(found)) == 12 * len(arms.main_cells(chosen))
    few = [one for one in study() if (one.method, one.passes) in arms.judged_cells(CHOSEN)]
    assert len(few) < len(study())
    answers = [_answer(page(OPTIONS_OF_SIX, BASE, progress(records))) for records in (few, study())]
    assert answers[0] == answers[1]
    assert "All gates hold." in answers[0]


def _answer(text: str) -> str:
    return text.partition("## The answer")[2].partition("## The design")[0]


def test_the_design_is_written_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "page.md"
    flags = ["--analyse", f"--write={where}", f"--folder={tmp_path / 'runs'}"]
    assert controller_command(flags, _not_run) == 0
    text = where.read_text()
    assert "0 of the 160 arms that are known are done. None has run." in text
    assert "Not run: `bapo study controller --calibrate`" in text
    assert all(gate.text in text and gate.says in text for gate in GATES)
    assert not (tmp_path / "runs").exists()


def _not_run(_arguments: object) -> int:
    raise AssertionError("an arm was run")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--quick", "--calibrate"], "a calibration has all its arms"),
        (["--write=page.html"], "ends in .md"),
        (["--analyse", "--write=missing/page.md"], "--write missing/page.md: the folder .* does not exist"),
        (["--seeds=0"], "seeds=0 must be at least 1"),
    ],
)
def test_wrong_flags_are_named(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        controller_command(flags, _not_run)


def test_contrasts_of_few_seeds_say_so() -> None:
    [first, *_] = verdicts.claims(study(range(2)), CHOSEN).at_recipe_rate
    assert isinstance(first, Contrast)
    assert first.words == "too few seeds to say"
