"""The plan against runs that others have published, and against layouts that our pages give to recipes."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import tyro

from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.planning.advice import problems
from bapo_megatron.planning.job import Job, PlanOptions, find_shape
from bapo_megatron.planning.plan import duration, make_plan
from tests.support.pages import ROOT
from tests.support.published_runs import (
    FACTOR,
    Figure,
    figures,
)

FIGURES = figures()


@pytest.mark.parametrize("figure", FIGURES, ids=[f"{one.source[1:5]}: {one.what}" for one in FIGURES])
def test_within_the_factor_or_a_reason(figure: Figure) -> None:
    assert 1 / figure.within < figure.ratio < figure.within
    if figure.within > FACTOR:
        assert figure.why
        assert not 1 / FACTOR < figure.ratio < FACTOR, "the reason is out of date"


def test_the_table_of_the_page_is_this_one() -> None:
    """When they change: `python -m tests.support.published_runs`."""
    page = (ROOT / "benchmarks/results/published_runs.md").read_text()
    assert "\n".join(one.row for one in FIGURES) in page


_PREFIXES = ("--parallel.", "--batch.")


def documented() -> Iterator[tuple[str, Path, tuple[str, ...]]]:
    """Page, recipe, and flags of layout and recomputation, of every such command in a block of code."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), flags=re.S | re.M):
            for line in block.replace("\\\n", " ").splitlines():
                if recipe := re.search(r"recipes/[\w/]*\d+b\w*\.py", line):
                    words = shlex.split(line[recipe.end() :], comments=True)
                    pairs = itertools.pairwise(words)
                    flags = [word for pair in pairs if pair[0].startswith(_PREFIXES) for word in pair]
                    if flags:
                        yield page.name, ROOT / recipe.group(), tuple(flags)


COMMANDS = list(documented())


def test_the_documentation_has_such_commands() -> None:
    assert {"doctor.md", "slurm.md"} <= {page for page, _, _ in COMMANDS}
    assert len(list(figures_of_the_paper())) == 9


@pytest.mark.parametrize(("page", "recipe", "flags"), COMMANDS)
def test_documented_layouts_fit_on_their_gpus(page: str, recipe: Path, flags: tuple[str, ...]) -> None:
    run = tyro.cli(RunConfig, default=load_recipe(recipe, RunConfig), args=list(flags))
    job = Job(run, find_shape(recipe, run.model.hf_path), PlanOptions())
    assert not problems(job)
    assert not make_plan(job).verdict.memory


def figures_of_the_paper() -> Iterator[tuple[str, str]]:
    """Commands on GPUs in the table of docs/results.md, and the time of each row."""
    table = (ROOT / "docs/results.md").read_text().split("### The paper's figures")[1].split("\n### ")[0]
    for row in re.findall(r"^\|.*\|$", table, flags=re.M):
        for command in re.findall(r"`bapo (?:train|submit) (recipes/[^`]*)`", row):
            yield command, row.split(" | ")[-1].rstrip(" |")


@pytest.mark.parametrize(("command", "time"), figures_of_the_paper())
def test_times_of_the_papers_figures_are_the_plans(command: str, time: str) -> None:
    recipe, *flags = command.replace(" --cluster FILE", "").split()
    run = tyro.cli(RunConfig, default=load_recipe(ROOT / recipe, RunConfig), args=flags)
    plan = make_plan(Job(run, find_shape(ROOT / recipe, run.model.hf_path), PlanOptions()))
    assert duration(plan.run_seconds) in time
