"""A clock that does not count the time in which its process did not look."""

from __future__ import annotations

import asyncio
import time

import pytest

from bapo_megatron.rollout.engines.clock import LoopLagClock


def test_it_goes_like_any_clock_while_the_loop_runs() -> None:
    async def measure() -> float:
        clock = LoopLagClock()
        start = clock.now()
        await asyncio.sleep(1.2)
        return clock.now() - start

    assert asyncio.run(measure()) == pytest.approx(1.2, abs=0.4)


def test_it_stands_still_while_the_loop_does_not_run() -> None:
    async def measure() -> list[float]:
        clock = LoopLagClock()
        times = [clock.now()]
        await asyncio.sleep(0.1)
        time.sleep(3.0)
        times.append(clock.now())  # before its task could look
        await asyncio.sleep(0.1)
        times.append(clock.now())
        return times

    before, blocked, after = asyncio.run(measure())
    assert blocked - before <= 0.61
    assert after - before <= 0.9
    assert before < blocked < after


def test_it_never_goes_back() -> None:
    async def measure() -> list[float]:
        clock, times = LoopLagClock(), []
        for pause in (0.0, 0.6, 0.01, 0.7, 0.0):
            time.sleep(pause)
            times.append(clock.now())
            await asyncio.sleep(0.02)
            times.append(clock.now())
        return times

    times = asyncio.run(measure())
    assert times == sorted(times)
