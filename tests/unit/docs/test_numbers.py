"""Numbers and figures of the pages are those of `bapo plan` and of the study, and say what made them."""

from __future__ import annotations

import json
import re
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
ROWS = (
    "GPU memory",
    "host memory",
    "a checkpoint",
    "checkpoints,",
    "rollouts",
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


def test_sampling_with_dropped_groups(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    page = " ".join(LAYOUT_PAGE.read_text().split())
    found = re.search(r"With `([^`]+)` 40 % .* this recipe then samples for ([\d,]+) s\.", page)
    assert found
    assert run(["plan", "recipes/bp_math_32b_64k.py", *found[1].split()]) == 0
    assert f" sampling {found[2]} s," in capsys.readouterr().out


def test_experts_within_a_node(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    page = " ".join((ROOT / "docs/parallelism.md").read_text().split())
    sentence = (
        r"has ([\d.]+) s of communication an update, not ([\d.]+) s, beside ([\d.]+) s of computing, "
        r"at ([\d.]+) GB of a GPU instead of ([\d.]+)\."
    )
    found = re.search(sentence, page)
    assert found
    plans = []
    for expert in ("8", "16"):
        assert run(["plan", "recipes/qwen3_30b_a3b.py", "--parallel.expert", expert, "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    inside, across = ([one["speed"]["link_seconds"], one["stages"][0]["peak"] / 1e9] for one in plans)
    said = [inside[0], across[0], plans[0]["speed"]["update_seconds"], inside[1], across[1]]
    assert [f"{value:.1f}" for value in said] == list(found.groups())


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


def _sentences() -> list[str]:
    """The numbered sentences that docs/results.md begins with, each in one line."""
    first = (ROOT / "docs/results.md").read_text().split("The paper (arXiv 2510.18927)")[0]
    return [" ".join(one.split()) for one in re.split(r"^\d\. \*\*", first, flags=re.MULTILINE)[1:]]


def test_every_interval_of_the_results_stands_in_a_table_of_its_study() -> None:
    pages = "".join((ROOT / file).with_suffix(".md").read_text() for file in (FIRST, SECOND, REAL))
    intervals = re.findall(
        r"[+-]\d\.\d{3}\s\([+-]\d\.\d{3}\sto\s[+-]\d\.\d{3}\)", (ROOT / "docs/results.md").read_text()
    )
    assert len(intervals) > 40
    assert not [one for one in intervals if f"| {' '.join(one.split())}, " not in pages]


def test_results_open_with_four_sentences_of_the_studies() -> None:
    """What a user acts on stands before anything else, each number computed anew."""
    rate, staleness, search, act = _sentences()
    reward, kept = _figures(SECOND), _figures(SECOND, "entropy_kept")
    mean = {arm: f"{fmean(by_seed.values()):.3f}" for arm, by_seed in reward.items()}
    grpo, level = ("grpo", 8), [mean["grpo", updates] for updates in (1, 4, 8)]
    low, sequence, both = ("grpo@0.35", 8), ("grpo_sequence", 8), ("grpo_sequence@0.35", 8)
    bapo, bapo_sequence = ("paper", 8), ("paper_sequence", 8)
    assert f"GRPO had {mean[grpo]}, at 0.35 of the rate, the lowest tried, {mean[low]}, with the" in rate
    assert (
        f"sequence mean {mean[sequence]}, with both {mean[both]}: {_gain(reward, both, grpo)}. The mean "
        f"took entropy: {_gain(kept, sequence, grpo)}"
    ) in rate
    assert "GRPO has {} on-policy, {} at 4 updates and {} at 8".format(*level) in staleness
    low_rate = [_gain(reward, (f"{mine}@0.35", 8), (f"{other}@0.35", 8)) for mine, other in PAIRS]
    assert (
        f"`paper()` minus GRPO was {_gain(reward, bapo, grpo)}, with the sequence mean in both "
        f"{_gain(reward, bapo_sequence, sequence)}; at the lower rate, measured alone, "
        + " and ".join(low_rate)
    ) in search
    assert f"fixed (0.6, 1.2), was {_gain(reward, bapo, ('fixed_0.6_1.2', 8))}: open" in search
    assert "--rollout-only" in act
    arms = (grpo, low, sequence, both, bapo, bapo_sequence, ("grpo", 4))
    assert {len(reward[arm]) for arm in arms} == {12}


PAIRS = (("paper", "grpo"), ("paper_sequence", "grpo_sequence"))


def test_results_say_what_the_search_did_and_did_not() -> None:
    _, _, search, _ = _sentences()
    moved, collapsed, first = (
        _figures(SECOND, "moved"),
        _figures(SECOND, "collapsed"),
        _figures(FIRST, "collapsed"),
    )
    assert f"in {100 * fmean(moved['paper', 8].values()):.0f} % of the stale updates" in search
    said = ", share ".join(
        f"{fmean(_figures(study, 'positive_share')[arm].values()):.3f} in "
        f"{100 * fmean(_figures(study, 'moved')[arm].values()):.0f} %"
        for study, arm in ((FIRST, ("paper", 4)), (SECOND, ("paper_sequence", 8)))
    )
    page = " ".join((ROOT / "docs/algorithm.md").read_text().split())
    assert f"(four to six, measured: share {said} of stale updates)" in page
    bapo, grpo = (
        sum(sum(collapsed[name, 8].values()) for name in names) for names in zip(*PAIRS, strict=True)
    )
    said = f"{bapo:.0f} of BAPO's 24 runs collapsed and {grpo:.0f} of GRPO's"
    [p] = re.findall(f"{said}: Fisher's p (\\S+)\\.", (ROOT / SECOND).with_suffix(".md").read_text())
    assert f"{said} (Fisher's p {p})" in search
    before = [f"{sum(first[name, 8].values()):.0f} of {len(first[name, 8])}" for name in PAIRS[0]]
    assert "in the first study {} did and {}".format(*before) in search


def test_results_have_the_second_studys_verdicts() -> None:
    """Those of its page, all of them, and how far it is."""
    page = " ".join((ROOT / "docs/results.md").read_text().split())
    study = (ROOT / "studies/results/controller_study.md").read_text()
    answer = study.split("## The answer")[1].split("## The design")[0]
    judged = [line for line in answer.splitlines() if line.startswith("- `")]
    assert answer.strip().startswith("All gates hold.")
    assert len(judged) == 5
    assert all("no difference shown" in line for line in judged)
    assert "At the best rates nothing is judged" in answer
    done, known = re.findall(r"^(\d+) of the (\d+) arms that are known are done", study, re.MULTILINE)[0]
    assert f"{done} of its {known} arms have run" in page
    entropy, held_out = (
        _gain(_figures(SECOND, name), ("paper", 8), ("grpo", 8)) for name in ("entropy_kept", "held_out")
    )
    assert (
        f"`paper()` minus GRPO is {entropy} in the share of entropy kept, and {held_out} in held-out" in page
    )


def test_results_say_how_other_losses_compare_with_a_lower_rate() -> None:
    reward, collapsed = _figures(SECOND), _figures(SECOND, "collapsed")
    page = " ".join((ROOT / "docs/results.md").read_text().split())
    over = {name: _gain(reward, (name, 8), ("grpo", 8)).split()[0] for name in ("gspo", "vespo")}
    assert f"GSPO ({over['gspo']}), VESPO ({over['vespo']}) and the sequence means gained" in page
    lower = [
        _gain(reward, (f"{name}@0.35", 8), ("grpo@0.35", 8)).split()[0]
        for name in ("gspo", "vespo", "grpo_sequence")
    ]
    assert "GSPO {}, VESPO {} and GRPO's sequence mean {}".format(*lower) in page
    assert {sum(collapsed[name, 8].values()) for name in ("cispo", "m2po")} == {9}


def test_results_say_no_more_than_the_intervals() -> None:
    """What a verdict does not rule out, and what Holm's correction alone keeps from one."""
    reward = _figures(SECOND)
    page = " ".join((ROOT / "docs/results.md").read_text().split())
    study = (ROOT / "studies/results/controller_study.md").read_text()
    start, sequence = (_gain(reward, ("paper", 8), (name, 8)) for name in ("fixed_0.6_1.2", "grpo_sequence"))
    row = re.search(
        r"^\| `paper` - `grpo_sequence` \| ([^,]*), 12 seeds \| (\S+) \| (\S+) \|", study, re.MULTILINE
    )
    assert row
    assert row[1] == sequence
    assert study.count("or more is not ruled out") == 1
    assert re.search(r"^- `paper` against `fixed_0.6_1.2`: .* is not ruled out$", study, re.MULTILINE)
    assert f"ruled out, except over its own start, fixed (0.6, 1.2): {start}" in page
    assert f"{sequence}: p = {float(row[3]):.3f} alone, and {row[2]} by Holm's correction" in page
    readme = " ".join((ROOT / "README.md").read_text().split())
    bapo = _gain(reward, ("paper", 8), ("grpo", 8)).replace("(", "(95 % interval ")
    rewards = [f"{fmean(reward[name, 8].values()):.2f}" for name in ("grpo", "grpo_sequence@0.35")]
    assert f"Expect no more reward from BAPO than from GRPO: {bapo} where its search acts" in readme
    assert "took the reward from {} to {} (measured, not judged)".format(*rewards) in readme


def test_results_have_the_real_model_beside_the_toy() -> None:
    reward, held_out, toy = _figures(REAL), _figures(REAL, "held_out"), _figures(SECOND)
    kept, moved = _figures(REAL, "entropy_kept"), _figures(REAL, "moved")
    assert {seeds for by_seed in reward.values() for seeds in [tuple(by_seed)]} == {(0, 1, 2, 3)}
    text = (ROOT / "docs/results.md").read_text()
    table = text.split("## The real model")[1].split("## The first study")[0]
    rows = re.findall(
        r"^\| .*(paper|fixed|sequence|gspo)[^|]* \| (.*) \| (.*) \| (.*) \| (.*) \|$", table, re.MULTILINE
    )
    arms = ("paper", "fixed_0.6_1.2", "fixed_0.9_1.2", "grpo_sequence", "gspo")
    assert [row[1:] for row in rows] == [
        tuple(_gain(figures, (arm, 8), ("grpo", 8)) for figures in (reward, held_out, kept, toy))
        for arm in arms
    ]
    words = " ".join(text.split())
    assert f"what the search adds to its start: {_gain(reward, ('paper', 8), ('fixed_0.6_1.2', 8))}" in words
    assert f"in {100 * fmean(moved['paper', 8].values()):.0f} % of `paper()`'s stale updates" in words
    algorithm = " ".join((ROOT / "docs/algorithm.md").read_text().split())
    assert f"start did not hurt: {rows[1][1]} over GRPO, four seeds" in algorithm
    rate, staleness, _, _ = _sentences()
    assert f"8 updates gained {_gain(reward, ('grpo', 8), ('grpo', 1))} over one" in staleness
    assert f"four seeds, the mean gained {rows[3][1]}, and {rows[3][2]} in held-out problems" in rate
    below = fmean(_figures(REAL, "below_target")["paper", 8].values())
    assert f"held less than the target in {100 * below:.0f} %" in words


def test_results_say_what_the_first_study_found() -> None:
    reward = _figures(FIRST)
    mean = {arm: fmean(by_seed.values()) for arm, by_seed in reward.items()}
    methods = {method for method, _ in reward}
    assert (
        f"[the first study](#the-first-study), where each of the {len(methods)} methods has less reward at 8"
        in _sentences()[1]
    )
    assert all(mean[method, 8] < mean[method, 4] for method in methods)
    level = [f"{mean['grpo', passes]:.3f}" for passes in (1, 2, 4, 8)]
    assert "{}, {}, {} and {} at 1, 2, 4 and 8 passes".format(*level) in _sentences()[1]
    page = (ROOT / "docs/results.md").read_text()
    assert f"GRPO at 2 on the same prompts: {_gain(reward, ('gspo', 8), ('grpo', 2))}" in page
