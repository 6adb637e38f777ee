"""Rows of the doctor's report, the common result of all its checks.

The checks make them, ``table.py`` prints them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "optional", "problem"]


@dataclass(frozen=True)
class DoctorRow:
    """Row of the doctor's report, the outcome of one check: what was found, what is needed, and the fix.

    Made by each check, printed by ``table.py``.
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
