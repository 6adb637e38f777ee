"""Rows of the doctor's report, the common result of all its checks, and their text and JSON.

The text comes row by row, while later checks still run, so columns have fixed widths. Words stay whole:
addresses and commands are copied from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from bapo_megatron.errors import printable
from bapo_megatron.runtime.text_table import text_table

State = Literal["ok", "optional", "problem"]
_STATE, _NAME, _FOUND, _NEEDED = 8, 20, 44, 34
"""Widths of the columns, in characters; two more are between them."""
_REST = _NAME + _FOUND + _NEEDED + 4
"""Width of the columns after the first."""


@dataclass(frozen=True)
class DoctorRow:
    """Row of the doctor's report, the outcome of one check: what was found, what is needed, and the fix."""

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
    # A path or an answer may hold a lone surrogate, which cannot be printed, or codes of the terminal.
    name, fix = printable(row.name), printable(row.fix)
    cells = [str(row.state), name, printable(row.found), printable(row.needed)]
    if len(name) > _NAME:  # an address or a path: the rest goes below it
        yield from _table(cells[:2], (_STATE, _REST))
        cells[:2] = ["", ""]
    yield from _table(cells, (_STATE, _NAME, _FOUND, _NEEDED))
    if fix:
        yield from _table(["", f"fix: {fix}"], (_STATE, _REST))


def _table(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    try:
        return text_table([cells], widths=widths, indent=2)
    except (ImportError, AttributeError):  # rich is checked, too: a broken one must not cost other rows
        return [f"  {'  '.join(cells)}"]
