"""Rows of the doctor's report, ``DoctorRow``, which all checks return, and their text and JSON forms.

``lines`` yields the text row by row while later checks run, so columns have fixed widths; ``as_json`` returns
all rows at the end. Words are never broken: users copy addresses and commands from the report.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from bapo_megatron.errors import printable
from bapo_megatron.runtime.child_process import NO_END
from bapo_megatron.runtime.text_table import text_table

State = Literal["ok", "optional", "problem"]
_STATE, _NAME, _FOUND, _NEEDED = 8, 20, 44, 34
"""Column widths in characters; two spaces separate columns."""
_REST = _NAME + _FOUND + _NEEDED + 4
"""Width of all columns after the first."""


@dataclass(frozen=True)
class DoctorRow:
    """Outcome of one check: its section and name, ``ok``, ``optional`` or ``problem``, what was found, what
    is needed, and the fix, which an ``ok`` row drops."""

    section: str
    name: str
    state: State
    """`optional`: missing, low or untested, but a run can start. `problem`: a run cannot start."""
    found: str
    needed: str = ""
    fix: str = ""
    """One line; empty if nothing needs fixing, so always empty for `ok`."""

    def __post_init__(self) -> None:
        if self.state == "ok":
            object.__setattr__(self, "fix", "")


def one_line(error: object, limit: int = 200) -> str:
    """Return an error as one short line; its type if the message is empty."""
    named = " ".join(str(error).split()) or type(error).__name__
    return named if len(named) <= limit else f"{named[: limit - 1]}…"


def missing(required: bool) -> State:
    """Return the state of something missing: "problem" if ``required``, else "optional"."""
    return "problem" if required else "optional"


_LATE = re.compile(rf"{NO_END} ([\d.e+]+) s\b")


def excused(row: DoctorRow) -> DoctorRow:
    """Return the row, as `optional` if it is a package whose import only lacked time on a busy machine. Other
    rows stay: a server or GPU driver that does not answer is a real problem."""
    late, load, cores = _LATE.search(row.found), os.getloadavg()[0], len(os.sched_getaffinity(0))
    is_package = row.section in ("training", "SGLang") and "GPU" not in row.name
    if row.state != "problem" or not is_package or late is None or load <= cores:
        return row
    found = f"no answer within {late[1]} s: the machine is busy (load {load:.0f} on {cores} cores)"
    return replace(row, state="optional", found=found, fix="run bapo doctor again when the load is lower")


def lines(rows: Iterable[DoctorRow]) -> Iterator[str]:
    """Yield the report's lines as rows arrive: section titles, rows and their fixes."""
    section = None
    for row in rows:
        if row.section != section:
            yield from ([""] if section else [])
            yield row.section
            section = row.section
        yield from _row(row)


def summary_line(rows: Sequence[DoctorRow], subject: str) -> str:
    """Return the report's last line. ``subject``: what could start, `a run` or the recipe's name."""
    problems = sum(row.state == "problem" for row in rows)
    optional = sum(row.state == "optional" for row in rows)
    aside = f" ({optional} optional: missing, low or untested)" if optional else ""
    if problems:
        return f"{problems} problem{'s' if problems > 1 else ''}: {subject} could not start{aside}"
    return f"no problem: {subject} could start{aside}"


def as_json(rows: Sequence[DoctorRow]) -> str:
    """Return the report as one JSON object: `ok`, and `rows` with the fields of ``DoctorRow``."""
    ok = all(row.state != "problem" for row in rows)
    return json.dumps({"ok": ok, "rows": [asdict(row) for row in rows]}, indent=2)


def _row(row: DoctorRow) -> Iterator[str]:
    # Paths and answers may hold lone surrogates, which cannot be printed, or terminal control codes.
    name, fix = printable(row.name), printable(row.fix)
    cells = [str(row.state), name, printable(row.found), printable(row.needed)]
    if len(name) > _NAME:  # an address or a path takes a line of its own
        yield from _table(cells[:2], (_STATE, _REST))
        cells[:2] = ["", ""]
    yield from _table(cells, (_STATE, _NAME, _FOUND, _NEEDED))
    if fix:
        yield from _table(["", f"fix: {fix}"], (_STATE, _REST))


def _table(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    try:
        return text_table([cells], widths=widths, indent=2)
    except (ImportError, AttributeError):  # rich may be the broken package
        return [f"  {'  '.join(cells)}"]
