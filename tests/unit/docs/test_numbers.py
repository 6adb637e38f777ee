"""Numbers and figures of the pages are those of `bapo plan` and of the study, and say what made them."""

from __future__ import annotations

import json
import re
from contextlib import redirect_stdout
from io import StringIO
from statistics import fmean

import pytest

from bapo_megatron.cli import run
from tests.support.pages import PAGES, ROOT
from tests.support.tiers import slow_but

COLUMNS = (
    ["r1_distill_qwen_7b_8k.py"],
    ["bp_math_7b_64k.py"],
    ["bp_math_32b_64k.py", "--parallel.context", "4", "--batch.recompute", "selective"],
    ["qwen3_32b.py"],
)
"""The recipes and flags of docs/slurm.md's table of budgets."""
ROWS = ("GPU memory", "host memory", "a checkpoint", "checkpoints,", "rollouts")
ROWS += ("a step", "first checkpoint", "500 steps")


def plan(recipe: str, *flags: str) -> str:
    with redirect_stdout(StringIO()) as page:
        run(["plan", str(ROOT / f"recipes/{recipe}"), *flags])
    return page.getvalue()


@pytest.mark.parametrize("column", range(len(COLUMNS)))
def test_budgets(column: int) -> None:
    planned = plan(*COLUMNS[column])
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
def test_layouts_of_the_32b_recipe(layout: str, recompute: str, figures: str) -> None:
    sizes = {name: int(size) for name, size in map(str.split, layout.split(", "))}
    fields = {"TP": "tensor", "PP": "pipeline", "CP": "context", "DP": "data"}
    flags = [f"--parallel.{field}={sizes.get(name, 1)}" for name, field in fields.items()]
    planned = plan("bp_math_32b_64k.py", *flags, f"--batch.recompute={recompute}")
    _, update, save, idle, speed, *_ = (figure.strip() for figure in figures.split("|"))
    stages = re.findall(r"([\d.]+) +([\d.]+) +[\d.]+ +(?:fits|OVER)$", planned, re.MULTILINE)
    assert f"{speed} tokens/s/GPU" in planned
    assert f"{idle.replace(' ', '')} idle" in planned
    assert (update, save) in stages


COLOCATED_PAGE = (ROOT / "docs/one_node.md").read_text()
COLOCATED = re.findall(r"^\| \[(\w+)\]\(\.\./recipes[^|]*\|(.*)\|$", COLOCATED_PAGE, re.MULTILINE)


@pytest.mark.parametrize(("recipe", "figures"), COLOCATED, ids=[row[0] for row in COLOCATED])
def test_turns_of_recipes(recipe: str, figures: str) -> None:
    planned = plan(f"{recipe}.py")
    *_, train, sample, host, step = (figure.strip() for figure in figures.split("|"))
    for figure in filter(None, (train, sample, host, step)):
        assert re.search(rf"\b{figure}\b", planned), figure


def test_every_figure_names_its_command() -> None:
    for page in PAGES:
        text = page.read_text()
        written = re.search(r"by\s+`bapo |Command: `python ", text)
        for found in re.finditer(r"!\[[^\]]*\]\([^)]+\.png\)", text):
            after = text[found.end() : found.end() + 400]
            assert written or re.search(r"`(python|make|bapo) ", after), f"{page.name}: {found[0]}"


FIRST = "studies/results/staleness_study.jsonl"
SECOND = "studies/results/controller_study.jsonl"
REAL = "studies/results/real_model_study.jsonl"
P3O = "studies/results/p3o_study.jsonl"
Figures = dict[tuple[str, int], dict[int, float]]
"""One figure of a study's own arms: by method and passes, then by seed."""


def _figures(results: str, name: str = "mean_reward") -> Figures:
    found: Figures = {}
    for line in (ROOT / results).read_text().splitlines()[1:]:
        arm = json.loads(line)
        if arm["seed"] < 100:  # from there on seeds only calibrate
            found.setdefault((arm["method"], arm["passes"]), {})[arm["seed"]] = arm["figures"][name]
    return found


def test_every_interval_of_the_results_stands_in_a_table_of_its_study() -> None:
    pages = "".join((ROOT / file).with_suffix(".md").read_text() for file in (FIRST, SECOND, REAL, P3O))
    texts = [(ROOT / name).read_text() for name in ("docs/results.md", "README.md")]
    written = " ".join(texts).replace("95 % interval ", "")
    intervals = re.findall(r"[+-]\d\.\d{3}\s\([+-]\d\.\d{3}\sto\s[+-]\d\.\d{3}\)", written)
    assert re.search(r"[+-]\d\.\d{3} \(95 % interval", texts[1])
    assert len(intervals) > 40
    assert not [one for one in intervals if f"| {' '.join(one.split())}, " not in pages]


def test_results_have_the_figures_of_the_studies() -> None:
    """Means, shares and counts, computed anew; intervals stand in the tables of the studies."""
    second, first = _figures(SECOND), _figures(FIRST)
    page, algorithm = (
        " ".join((ROOT / name).read_text().split()) for name in ("docs/results.md", "docs/algorithm.md")
    )
    at_full, at_low = ((f"grpo{low}", f"grpo_sequence{low}") for low in ("", "@0.35"))
    for name, pair in (("token mean", (at_full[0], at_low[0])), ("sequence mean", (at_full[1], at_low[1]))):
        assert f"| {name} | {' | '.join(f'{fmean(second[arm, 8].values()):.3f}' for arm in pair)} |" in page
    by_passes = [f"{fmean(second['grpo', passes].values()):.3f}" for passes in (1, 4, 8)]
    assert "GRPO has {} on-policy, {} at 4 updates and {} at 8".format(*by_passes) in page
    assert ", ".join(f"{fmean(first['grpo', passes].values()):.3f}" for passes in (1, 2, 4)) in page
    collapsed = _figures(SECOND, "collapsed")
    counts = [
        sum(sum(collapsed[method, 8].values()) for method in (name, f"{name}_sequence"))
        for name in ("paper", "grpo")
    ]
    assert "{:.0f} of BAPO's collapsed, and {:.0f} of GRPO's".format(*counts) in page
    for study, arm in ((FIRST, ("paper", 4)), (SECOND, ("paper_sequence", 8))):
        share, moved = (fmean(_figures(study, name)[arm].values()) for name in ("positive_share", "moved"))
        assert f"{share:.3f} in {100 * moved:.0f} %" in algorithm


def test_every_mean_of_the_first_page_is_an_arms() -> None:
    """The sentences that results open with, without their intervals."""
    opening = (ROOT / "docs/results.md").read_text().split("The paper (arXiv 2510.18927)")[0]
    plain = re.sub(r"[+-]\d\.\d{3}\s\([^)]*\)", "", opening)
    means = {f"{fmean(one.values()):.3f}" for study in (FIRST, SECOND) for one in _figures(study).values()}
    said = re.findall(r"(?<![\d.+-])\d\.\d{3}\b", plain)
    assert len(said) > 10
    assert set(said) <= means
