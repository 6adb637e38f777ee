"""An event loop whose clock moves when nothing else can: waiting costs nothing, and hanging is noticed."""

from __future__ import annotations

import asyncio
import os
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np
import pytest

T = TypeVar("T")


class _Clock(selectors.SelectSelector):
    """A selector that advances the time instead of waiting."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("every task waits for another one")
        self.now_s += max(0.0, timeout)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose time is the clock's."""

    def __init__(self) -> None:
        self.clock = _Clock()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now_s


def run_virtually(
    coroutine: Coroutine[Any, Any, T], chance: np.random.Generator | None, patch: pytest.MonkeyPatch
) -> T:
    """The result of a coroutine. What it hands to threads runs in the loop, by ``chance`` later, and no disk
    is waited for."""

    async def later(function: Callable[..., Any], *arguments: Any) -> Any:
        await (turns(chance) if chance else asyncio.sleep(0))
        return function(*arguments)

    patch.setattr(asyncio, "to_thread", later)
    patch.setattr(os, "fsync", lambda _file: None)
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(coroutine)


async def turns(chance: np.random.Generator, most: int = 6) -> None:
    """Let other tasks run for a random number of turns of the loop, often none."""
    for _ in range(int(chance.integers(0, most + 1)) if chance.random() < 0.5 else 0):
        await asyncio.sleep(0)
