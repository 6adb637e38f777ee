"""An event loop whose clock moves when nothing else can: waiting costs nothing, and hanging is noticed."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest


class _Clock(selectors.SelectSelector):
    """Instead of waiting it moves the time on."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("everybody waits for somebody else")
        self.now_s += max(0.0, timeout)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = _Clock()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now_s


def run_virtually(
    coroutine: Coroutine[Any, Any, None], chance: np.random.Generator, patch: pytest.MonkeyPatch
) -> None:
    """Run it. What it hands to threads happens in the loop, some turns later: a disk may be slow."""

    async def later(function: Callable[..., Any], *arguments: Any) -> Any:
        await turns(chance)
        return function(*arguments)

    patch.setattr(asyncio, "to_thread", later)
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(coroutine)


async def turns(chance: np.random.Generator, most: int = 6) -> None:
    """Let the others do something: now and then much, often nothing."""
    for _ in range(int(chance.integers(0, most + 1)) if chance.random() < 0.5 else 0):
        await asyncio.sleep(0)
