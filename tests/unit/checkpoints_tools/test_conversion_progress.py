"""Progress lines of a conversion."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from checkpoints_tools import Settings, to_megatron
from checkpoints_tools.core import progress
from checkpoints_tools.core.progress import byte_progress
from tests.support.checkpoint_models import save_random_model


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_line_comes_every_ten_seconds(
    is_shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(progress, "time", clock)
    with byte_progress(4_000_000_000, is_shown) as done:
        for _ in range(4):
            clock.now += 5
            done(1_000_000_000)
        clock.now += 20  # the files are forced to the disk
    lines = ["50% of 4 GB in 0:00:10, 200 MB/s", "100% of 4 GB in 0:00:20, 200 MB/s"]
    assert capsys.readouterr().err.splitlines() == is_shown * [*lines, "4 GB in 0:00:40, 100 MB/s"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_last_line_comes_when_the_output_is_there(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stderr that fails costs no copy: any error within it would remove its output."""
    output, is_there = tmp_path / "out", []

    def write(text: str) -> None:
        if " in 0:00:" in text and "%" not in text:
            is_there.append(output.exists())
        if fails:
            raise BrokenPipeError("gone")

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write, flush=lambda: None))
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.0)
    to_megatron(save_random_model(tmp_path / "hf"), output, settings=Settings(progress=True))
    assert is_there == [True]
    assert (output / "release/.metadata").is_file()
