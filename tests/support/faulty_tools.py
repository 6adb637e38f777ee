"""Calculators that fail as tools do, for runs that are killed: they hang, die, raise, print megabytes.

What a step does follows from the names of its episode and turn, so a repetition does the same. Each notes
what it was asked, and what it answered, in the file ``settings["log"]``: the tools' side of the story,
against which ``tool_accounts.py`` holds the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.environment import Reply, Task, Turn
from bapo_megatron.environment.tools.calculator import Calculator

SHARES = {
    "slow": 0.2,
    "print": 0.03,
    "outlive": 0.03,
    "raise": 0.02,
    "die once": 0.008,
    "die": 0.004,
    "hang": 0.008,
    "late": 0.006,
    "long": 0.01,
    "block": 0.001,
}
"""Share of steps with each fault."""

FAILURES = {"raise": "raised", "die": "died", "hang": "time", "late": "time", "block": "time"}
"""How the journal calls the failure of a step with such a fault; all others have none."""

SLOWEST_S, OUTLIVING_S = 2.0, 3.0
MEGABYTE = 1 << 20
NOTED = 200
"""Characters of an observation that are noted."""


def fault_of(episode: str, replies: int) -> str:
    """The fault of a step, by name; ``none`` for most."""
    drawn = _drawn(f"{episode} {replies}")
    for fault, share in SHARES.items():
        if drawn < share:
            return fault
        drawn -= share
    return "none"


def _drawn(name: str) -> float:
    """A number below 1; a checksum would give a step and the next related ones."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6]) / 2**48


class PlainFaulty(Calculator):
    """With a plain step, that comes back by ``restore``. Settings: ``log``, and ``limit_s`` of a step."""

    def __init__(self, task: Task, settings: Mapping[str, Any]) -> None:
        super().__init__(task, {"format": "plain"})
        self._log, self._limit_s = Path(settings["log"]), float(settings["limit_s"])
        self._replies = 0

    def restore(self, turns: Sequence[Turn], note: Any) -> None:
        self._replies = len(turns) // 2

    def step(self, turn: str) -> Reply:
        """Compute, or fail."""
        fault = self._begin(turn)
        if fault in ("hang", "block"):
            time.sleep(1000)
        if fault == "late":
            time.sleep(self._limit_s + 1)
        if fault == "slow":
            time.sleep(self._slow_s())
        return self._end(turn, fault)

    def _slow_s(self) -> float:
        return SLOWEST_S * _drawn(f"slow {self.task.episode} {self._replies}")

    def _begin(self, turn: str) -> str:
        """Note the question; do what may be done at once. The fault."""
        fault = fault_of(self.task.episode, self._replies)
        self._note("asked", turn=turn, fault=fault)
        if fault == "raise":
            raise ValueError("the tool is broken")
        if fault == "die" or (fault == "die once" and self._is_first()):
            os._exit(9)
        if fault == "print":
            print("x" * MEGABYTE)
            print("x" * MEGABYTE, file=sys.stderr)
        if fault == "outlive":
            late = ["sh", "-c", 'sleep "$1"; echo "$2" >>"$3"; echo late', "sh", str(OUTLIVING_S)]
            line = json.dumps({"what": "outlived", **self._place()})
            subprocess.Popen([*late, line, str(self._log)], start_new_session=True)
        return fault

    def _end(self, turn: str, fault: str) -> Reply:
        """Note the answer, and give it."""
        reply = Calculator.step(self, turn)
        if fault == "long" and reply.observation is not None:
            reply = Reply("7" * MEGABYTE, metrics=reply.metrics)
        said = reply.observation
        self._note("answered", said=said if said is None else said[:NOTED])
        self._replies += 1
        return reply

    def _is_first(self) -> bool:
        mark = self._log.with_name(f"died-{self.task.episode}-{self._replies}")
        is_first = not mark.exists()
        mark.touch()
        return is_first

    def _place(self) -> dict[str, Any]:
        return {"episode": self.task.episode, "replies": self._replies}

    def _note(self, what: str, **more: Any) -> None:
        line = json.dumps({"what": what, **self._place(), **more}) + "\n"
        with self._log.open("ab", buffering=0) as log:  # one write, which a kill does not divide
            log.write(line.encode())


class AsyncFaulty(PlainFaulty):
    """The same with an async step, that is played again."""

    resume = "replay"

    async def step(self, turn: str) -> Reply:  # type: ignore[override]
        """Compute, or fail; waiting lets others step."""
        fault = self._begin(turn)
        if fault == "hang":
            await asyncio.sleep(1000)
        if fault == "block":
            time.sleep(1000)
        if fault == "late":  # it heeds no cancel, and answers when nobody waits
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1000)
            await asyncio.sleep(1)
        if fault == "slow":
            await asyncio.sleep(self._slow_s())
        return self._end(turn, fault)
