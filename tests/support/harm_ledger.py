"""The ledger of a campaign of kills: what was done, and in which session.

A campaign may take hours: it ends when it is told to, and continues with the same run in the same folder.
What counts is in ``harms.jsonl``, a line for each harm, and ``sessions.jsonl``, a line for each audit that
passed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.runtime.jsonl_log import read_jsonl


class Ledger:
    """What was done to the run in a folder, over all sessions."""

    def __init__(self, folder: Path, about: Sequence[str]) -> None:
        """``about``: the flags of the run, the same in all sessions.

        A campaign makes its folder, and deletes and writes within it: one with other things is refused.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not (folder / "campaign.json").is_file():
            raise SystemExit(f"{folder} has no campaign, and is not empty: name a new folder")
        self._harms, self._sessions = folder / "harms.jsonl", folder / "sessions.jsonl"
        kept = folder / "campaign.json"
        if not kept.exists():
            kept.write_text(json.dumps([*about]))
        if (before := json.loads(kept.read_text())) != [*about]:
            raise SystemExit(
                f"{folder} has a campaign with {before}: continue with it, or name another folder"
            )

    @property
    def harms(self) -> list[dict[str, Any]]:
        """Kind of each harm, after what it came, and how many steps the run had made."""
        return read_jsonl(self._harms) if self._harms.exists() else []

    @property
    def kills(self) -> int:
        """How many processes were killed with -9."""
        return sum(row["kind"].startswith("kill") for row in self.harms)

    def note(self, **harm: Any) -> None:
        """A harm was done."""
        _append(self._harms, harm)

    def close_session(self, **session: Any) -> None:
        """A session has ended, and its audit passed."""
        _append(self._sessions, session)


def _append(log: Path, row: Mapping[str, Any]) -> None:
    with log.open("a") as file:
        file.write(json.dumps(row) + "\n")
