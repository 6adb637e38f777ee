"""The changes of docs/extending.md, each made in a copy of the repository and tried as its page says."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.page_workspace import copy_repository, environment_of, run_commands
from tests.support.pages import ROOT
from tests.support.tiers import slow_but

pytestmark = pytest.mark.e2e

PAGE = ROOT / "docs/extending.md"
CHANGES = 6

_BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SUMMARY = re.compile(r"^\| \[([^\]]+)\]\([^)]*#[^)]+\) \| [^|]+ \| (\d+) \| (\d+) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Change:
    """One section of a page: what is written, and the commands that try it."""

    title: str
    files: dict[str, str]
    """New files by their paths."""
    patches: list[str]
    commands: list[tuple[str, str]]
    """Each with what its output must contain, line by line."""

    @property
    def size(self) -> tuple[int, int]:
        """Files that are touched, and lines that are written."""
        patched = {line for patch in self.patches for line in patch.splitlines() if line.startswith("+++ ")}
        added = [
            line
            for patch in self.patches
            for line in patch.splitlines()
            if line.startswith("+") and not line.startswith("+++")
        ]
        lines = sum(text.count("\n") for text in self.files.values()) + len(added)
        return len(self.files) + len(patched), lines


def change_of(section: str) -> Change:
    title, _, body = section.partition("\n")
    change = Change(title.split(". ", 1)[1], {}, [], [])
    for kind, file, text in _BLOCK.findall(body):
        if file:
            change.files[file] = text
        elif kind == "diff":
            change.patches.append(text)
        elif kind == "sh":
            change.commands.append((text, ""))
        elif kind == "text":
            command, _ = change.commands.pop()
            change.commands.append((command, text))
    return change


def changes() -> list[Change]:
    """All of the page, in its order."""
    split = re.compile(r"^## (?=\d+\. )", re.MULTILINE)
    return [change_of(section) for section in split.split(PAGE.read_text())[1:]]


def copied(change: Change, workspace: Path) -> None:
    """The repository as the change leaves it."""
    touched: set[str] = set()
    for patch in change.patches:
        touched |= {line[6:].split("/")[0] for line in patch.splitlines() if line.startswith("+++ b/")}
    copy_repository(workspace, touched, change.files)
    for patch in change.patches:
        subprocess.run(
            ["patch", "-p1", "--no-backup-if-mismatch"], cwd=workspace, input=patch, text=True, check=True
        )


@pytest.mark.parametrize("change", [one for one in changes() if one.patches], ids=lambda one: one.title)
def test_the_patches_of_the_page_fit(change: Change, tmp_path: Path) -> None:
    """In the fast tier: most changes are tried in the slow one."""
    copied(change, tmp_path)
    paths = re.findall(r"^\+\+\+ b/(\S+)$", "\n".join(change.patches), re.MULTILINE)
    assert paths
    for path in paths:
        assert (tmp_path / path).read_text() != (ROOT / path).read_text(), path


QUICK = ("A loss",)


@pytest.mark.parametrize(
    "change",
    slow_but(changes(), *(one for one in changes() if one.title in QUICK)),
    ids=lambda one: one.title,
)
def test_a_change_works_as_its_page_says(change: Change, tmp_path: Path) -> None:
    copied(change, tmp_path)
    environment = environment_of(tmp_path)
    assert change.commands, "a change that nobody tries"
    for command, expected in change.commands:
        run_commands(command, expected, tmp_path, environment)


def test_the_summary_counts_right() -> None:
    found = {title: (int(files), int(lines)) for title, files, lines in _SUMMARY.findall(PAGE.read_text())}
    assert found == {change.title: change.size for change in changes()}
    assert len(found) == CHANGES
