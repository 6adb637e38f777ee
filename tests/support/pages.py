"""The pages of the documentation: their headings, links, blocks of code and commands."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks/results").glob("*.md")),
    *sorted((ROOT / "studies/results").glob("*.md")),
)

_FENCE = re.compile(
    r"^(?:<!-- *(?P<marker>[^>]*?) *-->\n)?```(?P<kind>\w*)(?: file=(?P<file>\S+))?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_INLINE = re.compile(r"(`+)(.+?)\1")
_LINK = re.compile(r"\]\((?P<target>[^()\s]+)(?: \"[^\"]*\")?\)")
_OPTION = re.compile(r"--|[A-Z]+( |$)")
_PROGRAMS = ("bapo", "bapo-ckpt", "make", "sbatch", "srun", "torchrun", "hf")
"""Programs that the pages call; Python is one with -m, or with a script of the repository."""


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    page: Path
    line: int
    marker: str
    """The comment on the line before the fence, which readers do not see."""
    kind: str
    """What stands behind the fence: `sh`, `python`, ..."""
    file: str
    """The file that the block is, as in ```python file=my_rewards.py."""
    text: str

    @property
    def commands(self) -> list[list[str]]:
        """The words of every command of the project, of make or of Slurm in the block."""
        if self.kind not in ("", "sh"):
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines for words in commands_of(line)]


def commands_of(line: str) -> list[list[str]]:
    """The words of each command of the project, of make or of Slurm on a line, without variables before it.

    Of what stands in brackets flags and names in capitals are kept: `[--watch]`, but not `[flags]`.
    A list of JSON is a word.
    """
    line = re.sub(r"\[([^\[\]{\"]*)\]", lambda found: found[1] if _OPTION.match(found[1]) else "", line)
    try:
        words = shlex.split(line.removeprefix("$ "), comments=True)
    except ValueError:  # a quotation that is not closed: no command that stands on one line
        return []
    found: list[list[str]] = [[]]
    for word in words:
        found[-1] += [word.removesuffix(";")] if word.removesuffix(";") not in ("", "&&") else []
        if word.endswith(";") or word == "&&":
            found.append([])
    return [command for words in found if (command := _named(words))]


def _named(words: list[str]) -> list[str]:
    """The command's words with the plain name of its program; none if it is not a program of `_PROGRAMS`."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]
    if not words:
        return []
    program = words[0].rpartition("/")[2]
    is_ours = program in _PROGRAMS
    if program == "python" and len(words) > 1:
        is_ours = words[1] == "-m" or words[1].endswith(".py")
    return [program, *words[1:]] if is_ours else []


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    """All fenced blocks of a page, in its order."""
    text = page.read_text()
    return tuple(
        Block(
            page,
            text.count("\n", 0, found.start()) + 1,
            found["marker"] or "",
            found["kind"],
            found["file"] or "",
            found["text"],
        )
        for found in _FENCE.finditer(text)
    )


@cache
def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def inline_commands(page: Path) -> list[list[str]]:
    """The words of every command in the running text and the tables of a page."""
    return [words for found in _INLINE.finditer(prose(page)) for words in commands_of(found[2])]


def links(page: Path) -> list[str]:
    """The targets of all links and pictures of a page."""
    return [found["target"] for found in _LINK.finditer(_INLINE.sub("code", prose(page)))]


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    counts: dict[str, int] = {}
    found = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", prose(page), re.MULTILINE):
        text = _LINK.sub("]", heading).replace("[", "").replace("]", "")
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = counts.get(slug, 0)
        counts[slug] = count + 1
        found.add(f"{slug}-{count}" if count else slug)
    return frozenset(found)
