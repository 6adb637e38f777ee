"""Links of the pages, and paths of pages that the code names, lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import PAGES, ROOT, anchors, links

LONGEST = {
    "README.md": 110,
    "docs/quickstart_gpu.md": 80,
    "docs/customize.md": 120,
    "docs/slurm.md": 150,
    "docs/troubleshooting.md": 120,
    "docs/results.md": 60,
    "docs/reproduce.md": 60,
    "docs/tuning.md": 80,
    "docs/rollouts.md": 150,
    "docs/sglang.md": 100,
    "docs/network.md": 80,
    "docs/operations.md": 200,
    "docs/cluster_file.md": 100,
    "docs/kill_tests.md": 60,
    "docs/gpu.md": 130,
    "docs/gpu_path.md": 60,
    "docs/doctor.md": 100,
    "docs/verify.md": 100,
    "docs/rehearsal.md": 125,
    "docs/security.md": 140,
    "docs/router.md": 80,
    "docs/data.md": 80,
    "docs/rewards.md": 80,
    "docs/evaluation.md": 120,
    "docs/checkpoints.md": 120,
    "docs/parallelism.md": 120,
    "docs/planning.md": 120,
    "docs/extending.md": 200,
    "docs/extending_internals.md": 240,
    "docs/algorithm.md": 250,
    "docs/architecture.md": 205,
    "docs/losses.md": 120,
    "docs/off_policy.md": 85,
    "docs/diagnostics.md": 65,
    "docs/papo.md": 70,
    "docs/study_plan.md": 140,
}
"""Lines of the pages, those first that a newcomer reads first: what does not fit belongs on another page."""

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


@pytest.mark.parametrize("page", LONGEST)
def test_pages_stay_short(page: str) -> None:
    assert (ROOT / page).read_text().count("\n") <= LONGEST[page]
