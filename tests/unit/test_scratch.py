"""What judges write is gone when they are, and when their owner was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

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
    (place / "bapo_reward_file").touch()
    (place / "another").mkdir()
    (place / "elsewhere").mkdir()
    (place / "bapo_reward_link").symlink_to(place / "elsewhere")
    remove_abandoned()
    assert len(list(place.iterdir())) == 4


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
