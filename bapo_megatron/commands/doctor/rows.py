"""Rows of the doctor's report, the common result of all its checks, and their text and JSON.

The text comes line by line, while later checks still run, and words stay whole: addresses and commands are
copied from it. rich is not used, as it is among what is checked, and folds long words. Used in this folder.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

State = Literal["ok", "optional", "problem"]
_STATE, _NAME, _FOUND, _NEEDED = 10, 20, 44, 34
"""Widths of the columns, in characters."""


@dataclass(frozen=True)
class DoctorRow:
    """Row of the doctor's report, the outcome of one check: what was found, what is needed, and the fix.

    Made by each check, printed by ``doctor.py``.
    """

    section: str
    name: str
    state: State
    """`optional`: missing, low or untested, but a run can start. `problem`: it cannot."""
    found: str
    needed: str = ""
    fix: str = ""
    """One line; empty where nothing is to be done, so in every row that is `ok`."""

    def __post_init__(self) -> None:
        if self.state == "ok":
            object.__setattr__(self, "fix", "")


def one_line(error: object, limit: int = 200) -> str:
    """An error as one short line; its type if its message is empty."""
    named = " ".join(str(error).split()) or type(error).__name__
    return named if len(named) <= limit else f"{named[: limit - 1]}…"


def missing(required: bool) -> State:
    """State of a missing package or setting: a problem if it is ``required``."""
    return "problem" if required else "optional"


# --- the report ----------------------------------------------------------------------------------


def lines(rows: Iterable[DoctorRow]) -> Iterator[str]:
    """The report, line by line as rows come in: a section's title, then its rows and their fixes."""
    section = None
    for row in rows:
        if row.section != section:
            yield from ([""] if section else [])
            yield row.section
            section = row.section
        yield from _row(row)


def summary_line(rows: Sequence[DoctorRow], subject: str) -> str:
    """The last line of the report. ``subject`` is what could start, `a run` or the recipe's."""
    problems = sum(row.state == "problem" for row in rows)
    optional = sum(row.state == "optional" for row in rows)
    aside = f" ({optional} optional: missing, low or untested)" if optional else ""
    if problems:
        return f"{problems} problem{'s' if problems > 1 else ''}: {subject} could not start{aside}"
    return f"no problem: {subject} could start{aside}"


def as_json(rows: Sequence[DoctorRow]) -> str:
    """The report as one JSON object: `ok`, and `rows` with the fields of ``DoctorRow``."""
    ok = all(row.state != "problem" for row in rows)
    return json.dumps({"ok": ok, "rows": [asdict(row) for row in rows]}, indent=2)


def _row(row: DoctorRow) -> Iterator[str]:
    found, needed = _wrap(row.found, _FOUND), _wrap(row.needed, _NEEDED)
    names = [row.name]
    if len(row.name) > _NAME:  # an address or a path: the rest goes below it
        found, needed = ["", *found], ["", *needed]
    for cells in _side_by_side([str(row.state)], names, found, needed):
        padded = zip(cells, (_STATE, _NAME + 2, _FOUND + 2, _NEEDED + 2), strict=True)
        yield ("  " + "".join(cell.ljust(width - 2) + "  " for cell, width in padded)).rstrip()
    if row.fix:
        yield from _wrap(f"fix: {row.fix}", _NAME + _FOUND + _NEEDED + 4, " " * (2 + _STATE))


def _side_by_side(*columns: list[str]) -> Iterator[list[str]]:
    for number in range(max(map(len, columns))):
        yield [column[number] if number < len(column) else "" for column in columns]


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Lines of at most ``width`` characters after the indent; words, and so addresses, stay whole."""
    parts = []
    for line in text.splitlines():
        parts += textwrap.wrap(
            line,
            width + len(indent),
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return parts or [""]
