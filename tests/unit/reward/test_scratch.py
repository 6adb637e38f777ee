"""What judges write is gone when they are, and when their owner was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from bapo_megatron.config import RewardConfig
from bapo_megatron.reward import pool
from bapo_megatron.reward.scratch import Scratch, remove_abandoned

OWNER = """
import os, signal, sys
from bapo_megatron.reward.scratch import Scratch
path = Scratch().path
open(os.path.join(path, "left"), "w").close()
print(path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_it_goes_with_its_owner(place: Path) -> None:
    scratch = Scratch()
    (Path(scratch.path) / "file").touch()
    remove_abandoned()
    assert (Path(scratch.path) / "file").exists()
    scratch.remove()
    assert list(place.iterdir()) == []


def test_that_of_a_killed_owner_goes_at_the_next_start(place: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdin is not None
    path = Path(owner.stdout.readline().decode().strip())
    remove_abandoned()
    assert (path / "left").exists()
    owner.kill()
    owner.wait()
    remove_abandoned()
    assert list(place.iterdir()) == []
    owner.stdin.close()
    owner.stdout.close()


def test_nothing_else_is_touched(place: Path) -> None:
    """Nor what another machine has in a place that they share."""
    scratch = Scratch()
    prefix = scratch.path[:-8]  # mkdtemp adds eight characters
    scratch.remove()
    Path(f"{prefix}12345678").touch()
    (place / "another").mkdir()
    Path(f"{prefix}87654321").symlink_to(place / "another")
    (place / "bapo_reward_01234567-89ab_12345678").mkdir()
    remove_abandoned()
    assert len(list(place.iterdir())) == 4
    Path(f"{prefix}12345678").unlink()
    Path(f"{prefix}12345678").mkdir()
    remove_abandoned()
    assert len(list(place.iterdir())) == 3


def test_a_worker_that_cannot_be_started_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_arguments: object) -> None:
        raise OSError("no room for a process")

    monkeypatch.setattr(pool, "AnsweringChild", no_room)
    worker = pool._Worker(RewardConfig())
    open_before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OSError, match="no room"):
            worker.start()
    assert list(place.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_those_that_sweep_do_not_take_what_others_have_just_made() -> None:
    done = threading.Event()

    def sweep() -> None:
        while not done.is_set():
            remove_abandoned()

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        for _ in range(500):
            scratch = Scratch()
            assert os.path.isdir(scratch.path)
            scratch.remove()
    finally:
        done.set()
        sweeper.join()
