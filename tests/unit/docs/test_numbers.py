"""Numbers and figures of the pages are those of `bapo plan` and of the study, and say what made them."""

from __future__ import annotations

import json
import re
from statistics import fmean

import pytest

from bapo_megatron.cli import run
from benchmarks.study.controller.arms import RATE_SEEDS
from benchmarks.study.paired import paired_effect
from tests.support.pages import PAGES, ROOT
from tests.support.tiers import slow_but

COLUMNS = (
    ["r1_distill_qwen_7b_8k.py"],
    ["bp_math_7b_64k.py"],
    ["bp_math_32b_64k.py", "--parallel.context", "4", "--batch.recompute", "selective"],
    ["qwen3_32b.py"],
)
"""The recipes and flags of docs/slurm.md's table of budgets."""
ROWS = (
    "GPU memory",
    "host memory",
    "a checkpoint",
    "checkpoints,",
    "a step",
    "first checkpoint",
    "500 steps",
)


@pytest.mark.parametrize("column", range(len(COLUMNS)))
def test_budgets(column: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    recipe, *flags = COLUMNS[column]
    assert run(["plan", f"recipes/{recipe}", *flags]) == 0
    planned = capsys.readouterr().out
    table = (ROOT / "docs/slurm.md").read_text().split("## Budgets\n")[1]
    for name in ROWS:
        row = re.search(rf"^\| {re.escape(name)}.*$", table, re.MULTILINE)
        assert row, name
        figure = row[0].split("|")[column + 2].strip()
        assert re.search(rf"\b{re.escape(figure)}", planned), f"{name}: {figure} is not in\n{planned}"


LAYOUT_PAGE = ROOT / "docs/planning.md"
LAYOUTS = re.findall(
    r"^\| \**(TP \d[^|*]*)\** \| \**(\w+)\** \|(.*)\|$", LAYOUT_PAGE.read_text(), re.MULTILINE
)


@pytest.mark.parametrize(
    ("layout", "recompute", "figures"),
    slow_but(LAYOUTS, LAYOUTS[1], LAYOUTS[-1]),
    ids=[row[0] for row in LAYOUTS],
)
def test_layouts_of_the_32b_recipe(
    layout: str,
    recompute: str,
    figures: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    sizes = {name: int(size) for name, size in map(str.split, layout.split(", "))}
    fields = {"TP": "tensor", "PP": "pipeline", "CP": "context", "DP": "data"}
    flags = [f"--parallel.{field}={sizes.get(name, 1)}" for name, field in fields.items()]
    run(["plan", "recipes/bp_math_32b_64k.py", *flags, f"--batch.recompute={recompute}"])
    planned = capsys.readouterr().out
    _, update, save, idle, speed, *_ = (figure.strip() for figure in figures.split("|"))
    stages = re.findall(r"([\d.]+) +([\d.]+) +[\d.]+ +(?:fits|OVER)$", planned, re.MULTILINE)
    assert f"{speed} tokens/s/GPU" in planned
    assert f"{idle.replace(' ', '')} idle" in planned
    assert (update, save) in stages


def test_half_of_the_nodes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    sentence = r"\*\*Half of them\*\*: `([^`]+)` fits 32 GPUs at (\d+)\s+tokens/s/GPU, `([^`]+)` at (\d+)\."
    found = re.search(sentence, LAYOUT_PAGE.read_text())
    assert found
    for flags, speed in (found.groups()[:2], found.groups()[2:]):
        assert run(["plan", "recipes/bp_math_32b_64k.py", *flags.split()]) == 0
        planned = capsys.readouterr().out
        assert "32 x h100-80gb" in planned
        assert f"{speed} tokens/s/GPU" in planned


COLOCATED_PAGE = (ROOT / "docs/one_node.md").read_text()
COLOCATED = re.findall(r"^\| \[(\w+)\]\(\.\./recipes[^|]*\|(.*)\|$", COLOCATED_PAGE, re.MULTILINE)


@pytest.mark.parametrize(("recipe", "figures"), COLOCATED, ids=[row[0] for row in COLOCATED])
def test_turns_of_recipes(
    recipe: str, figures: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert run(["plan", f"recipes/{recipe}.py"]) == 0
    planned = capsys.readouterr().out
    *_, train, sample, host, step = (figure.strip() for figure in figures.split("|"))
    for figure in filter(None, (train, sample, host, step)):
        assert re.search(rf"\b{figure}\b", planned), figure


METHODS = {
    "`gspo`": "gspo",
    "`fixed(0.9, 1.2)`": "fixed_0.9_1.2",
    "`vespo`": "vespo",
    "`fixed(0.9, 3.0)`": "fixed_0.9_3.0",
    "`clip_higher()`": "clip_higher",
    "`paper()`": "paper",
    "`eq8_literal()`": "eq8_literal",
    "`balanced()`": "balanced",
}
"""What docs/results.md calls the methods of the study."""


@pytest.mark.parametrize("name", METHODS)
def test_results_are_those_of_the_study(name: str) -> None:
    table = (ROOT / "docs/results.md").read_text().split("| method |")[1]
    study = (ROOT / "docs/study.md").read_text().split("At 8 passes:")[1]
    row = re.search(rf"^\|[^|]*{re.escape(name)}[^|]*\| ([^|]+) \| (\d+) \|$", table, re.MULTILINE)
    measured = re.search(rf"^\| `{METHODS[name]}` \| ([^,]+), (\d+) seeds", study, re.MULTILINE)
    assert row
    assert measured
    assert row.groups() == measured.groups()


def test_every_figure_names_its_command() -> None:
    for page in PAGES:
        text = page.read_text()
        written = re.search(r"Written by `bapo|Command: `python", text)
        for found in re.finditer(r"!\[[^\]]*\]\([^)]+\.png\)", text):
            after = text[found.end() : found.end() + 400]
            assert written or re.search(r"`(python|make|bapo) ", after), f"{page.name}: {found[0]}"


def _study_rewards(results: str = "docs/study.jsonl") -> dict[tuple[str, int], dict[int, float]]:
    """Mean reward of each arm of a study's results: by method and passes, then by seed."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    for line in (ROOT / results).read_text().splitlines()[1:]:
        arm = json.loads(line)
        found.setdefault((arm["method"], arm["passes"]), {})[arm["seed"]] = arm["figures"]["mean_reward"]
    return found


def test_what_results_open_with_is_in_the_results_file() -> None:
    """Four sentences that a user acts on, before anything else, each number computed anew."""
    page = (ROOT / "docs/results.md").read_text()
    first = " ".join(page.split("The paper (arXiv 2510.18927)")[0].split())
    assert re.findall(r"(?<= )(\d)\. \*\*", first) == ["1", "2", "3", "4"]
    rewards = _study_rewards()
    mean = {arm: fmean(by_seed.values()) for arm, by_seed in rewards.items()}
    methods = {method for method, _ in rewards}
    assert f"each of the {len(methods)} methods has less reward at 8 passes" in first
    assert all(mean[method, 8] < mean[method, 4] for method in methods)
    one, two, four, eight = (f"{mean['grpo', passes]:.3f}" for passes in (1, 2, 4, 8))
    assert f"GRPO has {one} on-policy, {two} at 2 passes, {four} at 4 and {eight} at 8" in first
    assert f"{_gain(rewards, ('fixed_0.9_1.2', 8), ('grpo', 8))} over GRPO at 8 passes" in first
    assert f"{_gain(rewards, ('fixed_0.9_1.2', 4), ('grpo', 4))} at 4" in first
    assert f"GRPO at 2 on the same prompts: {_gain(rewards, ('gspo', 8), ('grpo', 2))}" in page


def test_what_results_say_of_rate_and_mean_is_in_the_next_studys_results() -> None:
    """Means over the seeds that choose its rates, and the difference of both from GRPO, paired by seed."""
    found = _study_rewards("benchmarks/results/controller_study.jsonl")
    rewards = {
        (name, level): {seed: value for seed, value in by_seed.items() if seed in RATE_SEEDS}
        for (name, level), by_seed in found.items()
    }
    names = ("grpo", "grpo@0.5", "grpo_sequence", "grpo_sequence@0.5", "fixed_0.9_1.2", "paper")
    plain, half, sequence, both, fixed, bapo = (f"{fmean(rewards[name, 8].values()):.3f}" for name in names)
    second = " ".join((ROOT / "docs/results.md").read_text().split("2. **")[1].split("3. **")[0].split())
    assert f"GRPO had {plain}, with half of the rate {half}, with the sequence mean {sequence}" in second
    assert f"with both {both}: {_gain(rewards, ('grpo_sequence@0.5', 8), ('grpo', 8))}." in second
    assert f"`fixed(0.9, 1.2)` had {fixed} there, and BAPO {bapo}" in second


def _gain(
    rewards: dict[tuple[str, int], dict[int, float]], mine: tuple[str, int], other: tuple[str, int]
) -> str:
    """A difference, paired by seed, as the page writes it."""
    effect = paired_effect([value - rewards[other][seed] for seed, value in rewards[mine].items()])
    assert effect is not None
    return f"{effect.mean:+.3f} ({effect.low:+.3f} to {effect.high:+.3f})"
