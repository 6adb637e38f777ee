"""Links of the pages, and paths of pages that the code names, lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import PAGES, ROOT, anchors, links

README_LINES = 100
PAGE_LINES = 250
"""A page that is longer is two pages; docs/config.md is generated, a field a line."""
PAGES_AT_MOST = 26

_NAMED = re.compile(r"docs/\w+\.md(?:#[\w-]+)?")
_CODE = ("bapo_megatron", "checkpoints_tools", "recipes", "slurm", "benchmarks", "cluster")


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


def test_every_page_is_reached() -> None:
    """From the README, in as many steps as it takes."""
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        names = [target.partition("#")[0] for target in links(page)]
        found = {(page.parent / name).resolve() for name in names if name.endswith(".md")}
        waiting += [path for path in found - reached if path in PAGES and path not in waiting]
    assert not [page.name for page in PAGES if page not in reached]


def test_anchors_are_githubs(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# c_low: `bapo` moves [it](x.md)!\n## What it does\n```\n# none\n```\n## What it does\n")
    assert anchors(page) == {"c_low-bapo-moves-it", "what-it-does", "what-it-does-1"}


def test_pages_stay_short() -> None:
    lengths = {page: page.read_text().count("\n") for page in sorted((ROOT / "docs").glob("*.md"))}
    assert len(lengths) <= PAGES_AT_MOST
    assert {page.name for page, lines in lengths.items() if lines > PAGE_LINES} <= {"config.md"}
    assert (ROOT / "README.md").read_text().count("\n") <= README_LINES


def test_the_map_has_every_page() -> None:
    pages = sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md")
    text = (ROOT / "docs/README.md").read_text()
    rows = re.findall(r"^\| \[(\w+\.md)\]\(\1\) \| .+ \|$", text, re.MULTILINE)
    assert sorted(rows) == pages
