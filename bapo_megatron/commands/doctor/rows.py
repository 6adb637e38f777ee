"""Rows of the doctor's report: one check each, with its state and its fix; errors as one line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "optional", "problem"]


@dataclass(frozen=True)
class DoctorRow:
    """One row of the report: what was found about one thing, what is needed of it, and what to do."""

    section: str
    name: str
    state: State
    """`optional`: missing, low or untested, and a run can start all the same. `problem`: it cannot."""
    found: str
    needed: str = ""
    fix: str = ""
    """One line; empty where nothing is to be done, so in every row that is `ok`."""

    def __post_init__(self) -> None:
        if self.state == "ok":
            object.__setattr__(self, "fix", "")


def one_line(error: object, limit: int = 200) -> str:
    """An error as one short line, with its type where it says nothing itself."""
    named = " ".join(str(error).split()) or type(error).__name__
    return named if len(named) <= limit else f"{named[: limit - 1]}…"


def missing(required: bool) -> State:
    """The state of a thing that is not there."""
    return "problem" if required else "optional"
