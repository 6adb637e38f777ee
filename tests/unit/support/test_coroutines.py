"""Tests that are coroutines fail like others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest


@pytest.mark.parametrize("wait_s", [0.0, pytest.param(900.0, marks=pytest.mark.virtual_time)])
@pytest.mark.xfail(strict=True, raises=KeyError)
async def test_a_coroutine_is_run_to_its_end(wait_s: float, tmp_path: Path) -> None:
    await asyncio.sleep(wait_s)
    assert tmp_path.is_dir()
    raise KeyError("the end")
