"""Rows of the doctor's report, ``DoctorRow``, which all checks return, and their text and JSON forms.

``lines`` yields the text row by row while later checks run; ``as_json`` returns all rows at the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from bapo_megatron.errors import printable

State = Literal["ok", "optional", "problem"]
_INDENT = 12
"""Columns before a row's name and before the lines below it."""


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
    """Empty if nothing needs fixing, so always empty for `ok`."""

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


def lines(rows: Iterable[DoctorRow]) -> Iterator[str]:
    """Yield the report's lines as rows arrive: section titles, rows, and below a row that is not ok what it
    needs and the fix."""
    section = None
    for row in rows:
        if row.section != section:
            yield from ([""] if section else [])
            yield row.section
            section = row.section
        texts = [f"{row.name}: {row.found}"]
        texts += [f"needed: {row.needed}"] if row.needed and row.state != "ok" else []
        texts += [f"fix: {row.fix}"] if row.fix else []
        # Paths and answers may hold lone surrogates, which cannot be printed, or terminal control codes.
        first, *others = (line for text in texts for line in printable(text).split("\n"))
        yield f"  {row.state:<{_INDENT - 2}}{first}"
        yield from (f"{'':{_INDENT}}{line}" for line in others)


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
