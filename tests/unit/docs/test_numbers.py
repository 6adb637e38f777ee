"""Numbers and figures of the pages are those of `bapo plan` and of the study, and say what made them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from statistics import fmean

import pytest

from bapo_megatron.cli import run
from studies.paired import paired_effect
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


def test_the_steps_that_bring_a_cluster_up_take_what_the_budgets_say() -> None:
    """Five steps of the first column, and the whole run of the third."""
    page = (ROOT / "docs/slurm.md").read_text()
    cells = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in page.splitlines()
        if line.startswith("| ")
    }
    assert cells["9"][1] == cells["500 steps"][2]
    step = int(cells["a step"][0].removesuffix(" s"))
    assert cells["5"][1] == f"{5 * step / 60:.0f} minutes after start-up"


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


def test_half_of_the_nodes() -> None:
    sentence = r"\*\*Half of them\*\*: `([^`]+)` fits 32 GPUs at (\d+)\s+tokens/s/GPU, `([^`]+)` at (\d+)\."
    found = re.search(sentence, LAYOUT_PAGE.read_text())
    assert found
    for flags, speed in (found.groups()[:2], found.groups()[2:]):
        planned = plan("bp_math_32b_64k.py", *flags.split())
        assert "FITS" in planned
        assert "32 x h100-80gb" in planned
        assert f"{speed} tokens/s/GPU" in planned


def test_sampling_with_dropped_groups() -> None:
    page = " ".join(LAYOUT_PAGE.read_text().split())
    found = re.search(r"With `([^`]+)` 40 % .* this recipe then samples for ([\d,]+) s\.", page)
    assert found
    assert f" sampling {found[2]} s," in plan("bp_math_32b_64k.py", *found[1].split())


def test_experts_within_a_node() -> None:
    page = " ".join((ROOT / "docs/parallelism.md").read_text().split())
    sentence = (
        r"has ([\d.]+) s of communication an update, not ([\d.]+) s, beside ([\d.]+) s of computing, "
        r"at ([\d.]+) GB of a GPU instead of ([\d.]+)\."
    )
    found = re.search(sentence, page)
    assert found
    flags = [["--parallel.expert", expert, "--json"] for expert in ("8", "16")]
    plans = [json.loads(plan("qwen3_30b_a3b.py", *own)) for own in flags]
    inside, across = ([one["speed"]["link_seconds"], one["stages"][0]["peak"] / 1e9] for one in plans)
    said = [inside[0], across[0], plans[0]["speed"]["update_seconds"], inside[1], across[1]]
    assert [f"{value:.1f}" for value in said] == list(found.groups())


COLOCATED_PAGE = (ROOT / "docs/one_node.md").read_text()
COLOCATED = re.findall(r"^\| \[(\w+)\]\(\.\./recipes[^|]*\|(.*)\|$", COLOCATED_PAGE, re.MULTILINE)


@pytest.mark.parametrize(("recipe", "figures"), COLOCATED, ids=[row[0] for row in COLOCATED])
def test_turns_of_recipes(recipe: str, figures: str) -> None:
    planned = plan(f"{recipe}.py")
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
    table = (ROOT / "docs/results.md").read_text().split("## The first study")[1]
    study = (ROOT / "studies/results/staleness_study.md").read_text().split("At 8 passes:")[1]
    row = re.search(rf"^\|[^|]*{re.escape(name)}[^|]*\| ([^|]+) \| (\d+) \|$", table, re.MULTILINE)
    measured = re.search(rf"^\| `{METHODS[name]}` \| ([^,]+), (\d+) seeds", study, re.MULTILINE)
    assert row
    assert measured
    assert row.groups() == measured.groups()


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


def _gain(figures: Figures, mine: tuple[str, int], other: tuple[str, int]) -> str:
    """A difference, paired by seed, as the page writes it."""
    effect = paired_effect([value - figures[other][seed] for seed, value in figures[mine].items()])
    assert effect is not None
    return f"{effect.mean:+.3f} ({effect.low:+.3f} to {effect.high:+.3f})"


def test_every_interval_of_the_results_stands_in_a_table_of_its_study() -> None:
    pages = "".join((ROOT / file).with_suffix(".md").read_text() for file in (FIRST, SECOND, REAL, P3O))
    intervals = re.findall(
        r"[+-]\d\.\d{3}\s\([+-]\d\.\d{3}\sto\s[+-]\d\.\d{3}\)", (ROOT / "docs/results.md").read_text()
    )
    assert len(intervals) > 40
    assert not [one for one in intervals if f"| {' '.join(one.split())}, " not in pages]


PAIRS = (("paper", "grpo"), ("paper_sequence", "grpo_sequence"))


def test_results_have_the_figures_of_the_studies() -> None:
    """Means, shares and counts, computed anew; intervals stand in the tables of the studies."""
    text = (ROOT / "docs/results.md").read_text()
    page = " ".join(text.split())
    second, first = _figures(SECOND), _figures(FIRST)
    mean = {arm: f"{fmean(by_seed.values()):.3f}" for arm, by_seed in second.items()}
    arms = [("grpo", passes) for passes in (1, 4, 8)]
    arms += [(name, 8) for name in ("grpo@0.35", "grpo_sequence", "grpo_sequence@0.35")]
    figures = [mean[arm] for arm in arms]
    figures += [f"{fmean(first['grpo', passes].values()):.3f}" for passes in (1, 2, 4, 8)]
    figures += [_gain(second, *pair) for pair in compared()]
    kept, held_out = _figures(SECOND, "entropy_kept"), _figures(SECOND, "held_out")
    figures += [_gain(kept, ("grpo_sequence", 8), ("grpo", 8))]
    figures += [_gain(one, ("paper", 8), ("grpo", 8)) for one in (kept, held_out)]
    for names in zip(*PAIRS, strict=True):
        collapsed = sum(sum(_figures(SECOND, "collapsed")[name, 8].values()) for name in names)
        figures.append(f"{collapsed:.0f} of")
    figures.append(f"{100 * fmean(_figures(SECOND, 'moved')['paper', 8].values()):.0f} %")
    assert not [one for one in figures if one not in page]
    assert {len(second[arm]) for arm in arms} == {12}
    mean_of = {arm: fmean(by_seed.values()) for arm, by_seed in first.items()}
    assert all(mean_of[method, 8] < mean_of[method, 4] for method, _ in first)
    readme, algorithm = (
        " ".join((ROOT / name).read_text().split()) for name in ("README.md", "docs/algorithm.md")
    )
    assert _gain(second, ("paper", 8), ("grpo", 8)).replace("(", "(95 % interval ") in readme
    ends = [f"{fmean(second[name, 8].values()):.2f}" for name in ("grpo", "grpo_sequence@0.35")]
    assert "{} to {}".format(*ends) in readme
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


def compared() -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
    """The second study's comparisons of which the page speaks, at 8 passes."""
    for mine, other in PAIRS:
        yield (mine, 8), (other, 8)
        yield (f"{mine}@0.35", 8), (f"{other}@0.35", 8)
    yield ("grpo_sequence@0.35", 8), ("grpo", 8)
    yield ("paper", 8), ("fixed_0.6_1.2", 8)
    yield ("paper", 8), ("grpo_sequence", 8)
