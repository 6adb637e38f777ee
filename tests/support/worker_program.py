"""A worker program whose calls do what their question says: faults for the tests of the worker pool.

``python -m tests.support.worker_program LIFELINE``; settings: those that `prepare` reads.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bapo_megatron.workers.serving import Prepared, serve

RUNNING: list[str] = []
"""Names of the calls that this process has at the moment."""
OBJECTS: Counter[str] = Counter()


def prepare(settings: dict[str, Any]) -> Prepared:
    """``start_s``: seconds of the start, from the second one on, which ``starts`` (a file) counts."""
    if starts := settings.get("starts"):
        with open(starts, "a") as file:
            file.write(f"{os.getpid()}\n")
        if len(Path(starts).read_text().splitlines()) > 1:
            time.sleep(settings.get("start_s", 0))
            if Path(f"{starts}.broken").exists():
                os._exit(9)
    functions = {"plain": plain} if settings.get("plain") else FUNCTIONS
    return Prepared(functions, settings.get("memory_mb", 4096), ["a note"])


def plain(seconds: float) -> int:
    """Hold the process so long."""
    time.sleep(seconds)
    return os.getpid()


async def meet(count: int) -> int:
    """Wait until ``count`` calls wait at the same time."""
    RUNNING.append("")
    while len(RUNNING) < count:
        await asyncio.sleep(0.01)
    return os.getpid()


async def act(question: dict[str, Any]) -> Any:
    """Note the call, with the number of those beside it; wait the first time; else do as its name says."""
    name, file = question["name"], Path(question["file"])
    RUNNING.append(name)
    try:
        with open(file, "a") as notes:
            notes.write(f"{name} {len(RUNNING)}\n")
        lines = file.read_text().splitlines()
        while len(lines) < question.get("begins_at", 0):
            await asyncio.sleep(0.01)
            lines = file.read_text().splitlines()
        if name == "killer":
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "blocker":
            time.sleep(1000)
        if name == "hog":
            bytearray(10 << 30)
        is_first = sum(line.split()[0] == name for line in lines) == 1
        await asyncio.sleep(question.get("first_s", 0) if is_first else 0)
        if (lot := question.get("lot")) and not is_first:  # until as many have come as come together
            place = max(n for n, line in enumerate(lines, 1) if line.split()[0] == name)
            while len(file.read_text().splitlines()) < -(-place // lot) * lot:
                await asyncio.sleep(0.01)
    finally:
        RUNNING.remove(name)
    return name


async def count(name: str) -> list[int]:
    """How often the object ``name`` of this process was asked."""
    OBJECTS[name] += 1
    return [os.getpid(), OBJECTS[name]]


async def wait(seconds: float) -> int:
    """Wait, and let itself be cancelled."""
    await asyncio.sleep(seconds)
    return os.getpid()


async def heed_no_cancel(_: Any) -> str:
    """Answer although it was cancelled."""
    try:
        await asyncio.sleep(1000)
    except asyncio.CancelledError:
        return "late"
    return "never"


async def fail(how: str) -> Any:
    """Raise, or answer what cannot be written."""
    await asyncio.sleep(0)
    if how == "cancel":
        raise asyncio.CancelledError
    if how == "exit":
        raise SystemExit(3)
    if how == "value":
        raise ValueError("no such door")
    return object()


async def answer_and_die(answer: str) -> str:
    """End the process right after the answer."""
    asyncio.get_running_loop().call_later(0.02, os._exit, 0)
    return answer


FUNCTIONS = {
    function.__name__: function for function in (meet, act, count, wait, heed_no_cancel, fail, answer_and_die)
}

if __name__ == "__main__":
    serve(prepare)
