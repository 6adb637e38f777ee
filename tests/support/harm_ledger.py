"""The ledger of a campaign of kills: what was done, in which session, and the page of its results.

A campaign may take hours: it ends when it is told to, and continues with the same run in the same folder.
What
counts is in ``harms.jsonl``, a line for each harm, and ``sessions.jsonl``, a line for each audit that passed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.runtime.jsonl_log import read_jsonl
from tests.support.faulty_tools import FAILURES, SHARES

FAULTS = {
    "slow": "works for up to 2 s",
    "print": "prints a megabyte to each of its outputs",
    "outlive": "leaves a program that speaks after 3 s, whatever was killed",
    "raise": "raises",
    "die once": "ends its process, not when it is asked again",
    "die": "ends its process",
    "hang": "hangs",
    "late": "heeds no cancel, answers after its limit",
    "long": "answers with a megabyte",
    "block": "hangs, and its whole process with it",
}


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
    def sessions(self) -> list[dict[str, Any]]:
        """Seed, minutes and kills of each session whose audit passed, and what the last audit found."""
        return read_jsonl(self._sessions) if self._sessions.exists() else []

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

    def page(self, command: str, wanted: int, machine: str) -> str:
        """The results, for people."""
        sessions, harms = self.sessions, self.harms
        found, kinds = sessions[-1]["found"], Counter(row["kind"] for row in harms)
        times = Counter(row["after"] for row in harms)
        lines = [
            "# Kills of a run with tools, and with real SGLang servers",
            "",
            f"Command: `{command}`; the same command continues where it stopped.",
            "",
            f"{machine}, with other loads. The demo with a tool, sampled by two SGLang servers on the CPU;",
            "its calculator fails as tools do. Processes get SIGKILL up to half a second after what the",
            "second table names. The run must then make another step. At the end of each session its journal",
            "is held to its rules, to the tools' own log of what they were asked and said, and to a replay.",
            "",
            f"**{found['kills']} of {wanted} kills, {found['steps']} steps; all audits passed.**",
            "",
            *_table(("killed", "times"), kinds),
            "",
            *_table(("after", "times"), times),
            "",
            *_faults(found),
            "",
            *_episodes(found),
            "",
            *_table_of_sessions(sessions),
        ]
        return "\n".join(lines) + "\n"


def _append(log: Path, row: Mapping[str, Any]) -> None:
    with log.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _table(names: tuple[str, str], counts: Mapping[str, int]) -> list[str]:
    rows = sorted(counts.items(), key=lambda one: -one[1])
    return [f"| {names[0]} | {names[1]} |", "|---|---:|", *(f"| {name} | {count} |" for name, count in rows)]


def _faults(found: Mapping[str, int]) -> list[str]:
    lines = ["| fault of a tool | steps with it | the journal says |", "|---|---:|---|"]
    for fault in SHARES:
        said = f"failed, `{FAILURES[fault]}`" if fault in FAILURES else "its answer"
        lines.append(f"| {FAULTS[fault]} | {found.get(f'fault {fault}', 0)} | {said} |")
    return [*lines, f"| none | {found.get('fault none', 0)} | its answer |"]


def _episodes(found: Mapping[str, int]) -> list[str]:
    failed = sum(count for name, count in found.items() if name.startswith("failed "))
    late = found.get("outlived their step", 0)
    return [
        f"Tools were asked for {found['asked']} turns, all of them on disk before; {found['asked again']}",
        "more than once, after a kill or the end of a worker. The journal has",
        f"{found['answers in the journal']} answers: {failed} are failures, all of tools with such a",
        f"fault; the others are what the tool said. {late} programs spoke after their step, and counted",
        "nowhere. No response began again.",
        "",
        f"Tokens sampled: {found['sampled']:,} = {found['trained']:,} trained on + {found['dropped']:,}",
        f"dropped by rule + {found['kept']:,} kept; lost: 0.",
        "A replay of the steps has the same losses, gradient norms and bounds, bit for bit.",
    ]


def _table_of_sessions(sessions: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| session | seed | minutes | kills so far | steps so far |", "|---:|---|---:|---:|---:|"]
    for number, one in enumerate(sessions, 1):
        found = one["found"]
        lines.append(
            f"| {number} | {one['seed']} | {one['minutes']:.0f} | {found['kills']} | {found['steps']} |"
        )
    return lines
