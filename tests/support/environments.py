"""Environments with faults and memories, for tests; a turn says what its step does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.environment import Environment, Reply, Task, Turn


def acted(self: Environment, turn: str, turns: int) -> Reply:
    """The answer to a turn, which may be a fault."""
    if turn == "raise":
        raise ValueError("the door is shut")
    if turn == "stop iteration":
        raise StopIteration
    if turn == "die":
        os._exit(9)
    if turn == "surrogate":
        return Reply("\ud800")
    if turn == "long":
        return Reply("x" * (5 << 20))
    if turn == "no reply":
        return "text"  # type: ignore[return-value]
    if turn == "nested note":  # as the arguments of a call may be, which a policy writes
        return Reply("kept", note=json.loads(970 * "[" + 970 * "]"))
    if turn.endswith("two"):
        return Reply(["a", "b"])
    if turn == "note":
        return Reply("noted", note="x" * (70 << 10))
    if turn == "digits":
        return Reply("paid", reward="1.0")  # type: ignore[arg-type]
    if turn == "end":
        return Reply(None, reward=1.0, metrics={"turns": turns})
    return Reply(f"{turns}:{turn}", reward=0.5, metrics={"steps": 1}, note={"turns": turns})


def _is_first(turn: str) -> bool:
    """Whether a turn that ends with the name of a file comes for the first time: it makes the file."""
    file = Path(turn.split()[-1])
    is_first = not file.exists()
    file.touch()
    return is_first


class Plain(Environment):
    """Counts its turns, and notes its life in the file ``settings["log"]``, if there is one."""

    def __init__(self, task: Task, settings: Mapping[str, Any]) -> None:
        super().__init__(task, settings)
        self.turns = 0
        self.note("made")

    def note(self, what: str) -> None:
        """A line: process, episode, event."""
        if file := self.settings.get("log"):
            with open(file, "a") as lines:
                lines.write(f"{os.getpid()} {self.task.episode} {what}\n")

    def step(self, turn: str) -> Reply:
        """Count and act."""
        self.turns += 1
        self.note(f"step {turn}")
        if turn == "hang":
            time.sleep(1000)
        if turn.startswith("hang once ") and _is_first(turn):
            time.sleep(1000)
        if turn == "spin":
            while True:
                pass
        if turn.startswith("wait for "):
            while not Path(turn.removeprefix("wait for ")).exists():
                time.sleep(0.005)
        return acted(self, turn, self.turns)

    def close(self) -> None:
        """Note it."""
        self.note("closed")


async def caught_in_a_group() -> str:
    """A word, after a task group of which one task has failed."""

    async def fails() -> None:
        raise ValueError("one of two tools")

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())
            group.create_task(asyncio.sleep(1000))
    except* ValueError:
        pass
    return "caught"


class Async(Plain):
    """The same with an async step."""

    stops = ("</call>",)

    async def step(self, turn: str) -> Reply:  # type: ignore[override]
        """Count and act; waiting lets others step."""
        self.turns += 1
        self.note(f"step {turn}")
        if turn == "hang":
            await asyncio.sleep(1000)
        if turn.startswith("hang once ") and _is_first(turn):
            await asyncio.sleep(1000)
        if turn == "late":  # it heeds no cancel, and answers when nobody waits
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1000)
        if turn == "group":
            return Reply(await caught_in_a_group())
        if turn == "cancel":
            raise asyncio.CancelledError
        if turn == "block":
            time.sleep(1000)
        if turn.startswith("wait for "):
            while not Path(turn.removeprefix("wait for ")).exists():
                await asyncio.sleep(0.005)
        return acted(self, turn, self.turns)


class Restored(Plain):
    """Comes back by ``restore``."""

    resume = "restore"

    def restore(self, turns: Sequence[Turn], note: Any) -> None:
        self.turns = note["turns"]
        self.note(f"restored {[turn.text for turn in turns]}")


class Described(Plain):
    """Describes its tool to the model."""

    tools = (
        {
            "type": "function",
            "function": {
                "name": "lookup_7f3a",
                "description": "Looks a word up.",
                "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
            },
        },
    )


class Unnamed(Plain):
    """Describes a tool without a name."""

    tools = ({"type": "function", "function": {}},)


class Never(Plain):
    """Cannot come back."""

    resume = "never"


class Clock(Plain):
    """Answers with its process, so a replay in another one differs."""

    def step(self, turn: str) -> Reply:
        """The number of the process."""
        self.turns += 1
        return Reply(str(os.getpid())) if turn != "end" else Reply(None)


class Dice(Plain):
    """Draws from the global generators, of which its step imports one."""

    own_random = True

    def step(self, turn: str) -> Reply:
        import numpy

        if turn == "end":
            return Reply(None)
        if turn == "fail":
            raise ValueError("a broken die")
        return Reply(f"{random.randint(1, 10**6)} {numpy.random.randint(1, 10**6)}")


class SharedDice(Dice):
    """The mistake that `own_random` mends."""

    own_random = False


class NoStep(Environment):
    """Lacks everything, and contradicts itself."""

    role = "ipython"  # type: ignore[assignment]
    stops = "</call>"  # type: ignore[assignment]
    resume = "restore"

    def __init__(self, task: Task) -> None:
        super().__init__(task, {})


class Twice(Plain):
    """Asks for the answer once more, with the sum of the digits that it saw; rewards an odd length.

    As long as the file ``settings["hold"]`` is there, odd samples of groups from 6 on wait.
    """

    def step(self, turn: str) -> Reply:
        """One observation, then the end."""
        self.turns += 1
        self.note(f"step {turn!r}")
        hold = Path(self.settings.get("hold", "/nowhere"))
        while hold.exists() and self.is_held():
            time.sleep(0.01)
        if self.turns == 2:
            return Reply(None, reward=float(len(turn) % 2), metrics={"letters": len(turn)})
        return Reply(f"Sure? {sum(map(int, filter(str.isdigit, turn)))}")

    def is_held(self) -> bool:
        """By its episode's name in a run: group, sample, attempt."""
        group, sample, _ = map(int, self.task.episode.split("-"))
        return group >= 6 and sample % 2 == 1
