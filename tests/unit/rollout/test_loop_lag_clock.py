"""The lag-free clock: it does not count event loop lag."""

from __future__ import annotations

import asyncio
import time

import pytest

from bapo_megatron.rollout.engines.pool_state import LoopLagClock


async def test_the_clock_is_real_time_while_the_loop_runs() -> None:
    clock = LoopLagClock()
    start = clock.now()
    await asyncio.sleep(1.2)
    assert clock.now() - start == pytest.approx(1.2, abs=0.4)


async def test_the_clock_stands_still_during_loop_lag() -> None:
    clock = LoopLagClock()
    times = [clock.now()]
    await asyncio.sleep(0.1)
    time.sleep(3.0)
    times.append(clock.now())  # before its task could look
    await asyncio.sleep(0.1)
    times.append(clock.now())
    before, blocked, after = times
    assert blocked - before <= 0.61
    assert after - before <= 0.9
    assert before < blocked < after


async def test_the_clock_is_monotonic() -> None:
    clock, times = LoopLagClock(), []
    for pause in (0.0, 0.6, 0.01, 0.7, 0.0):
        time.sleep(pause)
        times.append(clock.now())
        await asyncio.sleep(0.02)
        times.append(clock.now())
    assert times == sorted(times)
