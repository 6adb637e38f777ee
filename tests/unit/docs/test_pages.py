"""The pages: links lead somewhere, and settings, metrics, losses and messages on them are the program's."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.algo.bapo import paper
from bapo_megatron.algo.bins import BUCKETS, RATIO_BINS
from bapo_megatron.algo.losses import LOSSES, load_loss
from bapo_megatron.algo.settings import settings_of
from bapo_megatron.config import RewardConfig, RunConfig, SftConfig
from bapo_megatron.environment.settings import AgentSettings
from bapo_megatron.rollout.sampler.sampling_metrics import rollout_metrics
from tests.support.bapo_objective import metric_names, objective
from tests.support.config_page import COMMAND, config_page, field_texts
from tests.support.config_page import PAGE as CONFIG_PAGE
from tests.support.event_kinds import written_kinds
from tests.support.pages import PAGES, ROOT, anchors, links

README_LINES = 100
PAGE_LINES = 250
"""A page that is longer is two pages; docs/config.md is generated, a field a line."""
PAGES_AT_MOST = 25

_NAMED = re.compile(r"docs/\w+\.md(?:#[\w-]+)?")
_PACKAGES = ("bapo_megatron", "bapo_rehearsal", "checkpoints_tools")
_CODE = (*_PACKAGES, "recipes", "slurm", "benchmarks", "studies", "cluster")


def broken(page: Path, targets: list[str]) -> Iterator[str]:
    for target in targets:
        if re.match(r"[a-z]+:", target):  # another site's
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists():
            yield f"{target}: {file} does not exist"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            yield f"{target}: no heading of {file.name} has this anchor"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert not list(broken(page, links(page)))


def test_pages_that_the_code_names_exist() -> None:
    files = [path for folder in _CODE for path in (ROOT / folder).rglob("*") if path.suffix != ".md"]
    for file in [ROOT / "Makefile", *files]:
        if file.suffix in ("", ".py", ".toml", ".sbatch", ".sh") and file.is_file():
            named = _NAMED.findall(file.read_text())
            assert not list(broken(ROOT / "README.md", named)), file


def test_pages_stay_short() -> None:
    lengths = {page: page.read_text().count("\n") for page in sorted((ROOT / "docs").glob("*.md"))}
    assert len(lengths) <= PAGES_AT_MOST
    assert {page.name for page, lines in lengths.items() if lines > PAGE_LINES} <= {"config.md"}
    assert (ROOT / "README.md").read_text().count("\n") <= README_LINES


def test_the_map_has_every_page() -> None:
    """And the README names it."""
    assert "docs/README.md" in links(ROOT / "README.md")
    pages = sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md")
    text = (ROOT / "docs/README.md").read_text()
    rows = re.findall(r"^\| \[(\w+\.md)\]\(\1\) \| .+ \|$", text, re.MULTILINE)
    assert sorted(rows) == pages


def test_the_page_is_what_its_generator_writes() -> None:
    """Without pytest's own comparison: a difference of two pages is long."""
    is_current = CONFIG_PAGE.read_text() == config_page()
    assert is_current, f"docs/config.md is not current: `{COMMAND}` writes it anew"


def test_every_field_says_what_it_is() -> None:
    def check(kind: type) -> None:
        texts = field_texts(kind)
        for field in dataclasses.fields(kind):
            default = field.default_factory
            if dataclasses.is_dataclass(default):
                check(default)
            else:
                known = field.name in texts or field.name in ("model", "data")  # sections without a default
                assert known, f"{kind.__name__}.{field.name} has no docstring"

    check(RunConfig)
    check(SftConfig)


_QUADRANTS = [f"{sign}_{half}" for sign in ("positive", "negative") for half in ("high", "low")]


def _named(metric: str) -> str:
    """The name under which the pages have a metric: one for all bins, buckets, and quadrants."""
    for family, members, name in (("staleness", BUCKETS, "BUCKET"), ("ratio", RATIO_BINS, "BIN")):
        for member in members:
            metric = metric.replace(f"{family}/{member}/", f"{family}/{name}/")
    for quadrant in _QUADRANTS:
        metric = metric.replace(f"quadrant/{quadrant}/", "quadrant/Q/")
        metric = metric.replace(f"/clipped_{quadrant}", "/clipped_Q")
    return metric


def _written() -> set[str]:
    lines = (ROOT / "tests/fixtures/bapo/metrics.jsonl").read_text().splitlines()
    stored = {name for line in lines for name in json.loads(line) if "/" in name}
    stored = {name for name in stored if not name.startswith("contribution/")}  # of earlier versions
    return {*metric_names(objective(paper())), *rollout_metrics([], RewardConfig()), *stored}


def test_every_metric_is_on_a_page() -> None:
    pages = "\n".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    names = sorted({_named(metric) for metric in _written()})
    assert len(names) > 60
    assert [name for name in names if f"`{name}`" not in pages] == []


ENVIRONMENTS_PAGE = ROOT / "docs/environments.md"


def test_every_setting_of_an_agent_program_has_its_row() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|([^|]*)\|", ENVIRONMENTS_PAGE.read_text(), re.MULTILINE))
    for setting in settings_of(AgentSettings, skip=0):
        default = "" if setting.name == "command" else json.dumps(setting.default).strip('"')
        assert rows[setting.name].strip("` ") == default.replace("null", "none")


def test_the_events_of_what_survives_what_exist() -> None:
    section = ENVIRONMENTS_PAGE.read_text().partition("## What survives what\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[3] for line in section.splitlines() if line.startswith("|")][2:]
    named = {name for cell in cells for name in re.findall(r"`([a-z_]+)`", cell)}
    assert {"start", "resume", "environment_failed", "reward_outage"} <= named
    assert named <= set(written_kinds())


LOSSES_PAGE = ROOT / "docs/losses.md"


def loss_rows() -> dict[str, str]:
    """The table's row of each loss that a first cell names."""
    text = LOSSES_PAGE.read_text().split("## Formulas, settings, sources\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return {name: line for line in lines for name in re.findall(r"`(\w+)`", line.split("|")[1])}


def shown(default: Any) -> str:
    return "none" if default is None else f"{default:g}"


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_has_its_row(name: str) -> None:
    described = loss_rows()[name]
    for setting in settings_of(load_loss(name)):
        assert re.search(rf"`{setting.name}` {re.escape(shown(setting.default))}[,\s]", described), setting
