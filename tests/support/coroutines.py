"""Tests that are coroutines (``async def test_...``): each runs in an event loop of its own.

Under the mark ``virtual_time`` in one whose waiting costs nothing (virtual_time.py).
"""

from __future__ import annotations

import asyncio
import inspect

import pytest

from tests.support.virtual_time import run_virtually

LIMIT_S, VIRTUAL_LIMIT_S = 300, 1000
"""Seconds, and seconds of virtual time, after which such a test has failed."""


def run_coroutine(test: pytest.Function) -> bool:
    """Run the test, if it is a coroutine; whether it is."""
    if not inspect.iscoroutinefunction(test.obj):
        return False
    found = test.obj(**{name: test.funcargs[name] for name in test._fixtureinfo.argnames})
    if test.get_closest_marker("virtual_time"):
        with pytest.MonkeyPatch.context() as patch:
            run_virtually(asyncio.wait_for(found, VIRTUAL_LIMIT_S), None, patch)
    else:
        asyncio.run(asyncio.wait_for(found, LIMIT_S))
    return True
