"""What workers write is gone when they are, and when their owner was killed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from bapo_megatron.workers import process
from bapo_megatron.workers.scratch import Scratch, remove_abandoned, remove_tree

OWNER = """
import os, signal, sys
from bapo_megatron.workers.scratch import Scratch
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


def test_a_scratch_directory_is_removed_with_its_owner(place: Path) -> None:
    scratch = Scratch()
    (Path(scratch.path) / "file").touch()
    remove_abandoned()
    assert (Path(scratch.path) / "file").exists()
    scratch.remove()
    assert list(place.iterdir()) == []


def test_a_killed_owners_scratch_directory_is_removed_at_the_next_start(place: Path) -> None:
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
    (place / "bapo_worker_01234567-89ab_12345678").mkdir()
    remove_abandoned()
    assert len(list(place.iterdir())) == 4
    Path(f"{prefix}12345678").unlink()
    Path(f"{prefix}12345678").mkdir()
    remove_abandoned()
    assert len(list(place.iterdir())) == 3


@pytest.mark.parametrize("owner_was", ["killed", "alive"])
def test_what_programs_leave_is_deleted(place: Path, owner_was: str) -> None:
    """3,000 directories in each other (no path reaches the last), none that may be read, links, a FIFO."""
    kept = place / "kept"
    (kept / "folder").mkdir(parents=True)
    (kept / "folder/file").write_text("kept")
    scratch = Scratch()
    here = os.open(scratch.path, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=here)
        deeper = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.close(os.open("file", os.O_CREAT, dir_fd=here))
    os.symlink(kept / "folder", "link", dir_fd=here)
    os.close(here)
    path = Path(scratch.path)
    (path / "link").symlink_to(kept / "folder")
    os.link(kept / "folder/file", path / "hard")
    os.mkfifo(path / "fifo")
    (path / "closed/inner").mkdir(parents=True)
    (path / "closed/inner").chmod(0)
    (path / "closed").chmod(0)
    if owner_was == "alive":
        scratch.remove()
    else:
        os.close(scratch._lock)
        remove_abandoned()
    assert [entry.name for entry in place.iterdir()] == ["kept"]
    assert (kept / "folder/file").read_text() == "kept"


def test_removing_has_a_limit_and_never_raises(place: Path) -> None:
    (place / "tree/inner").mkdir(parents=True)
    (place / "tree/file").touch()
    (place / "link").symlink_to(place / "tree")
    assert not remove_tree(str(place / "tree"), limit_s=-1.0)
    assert not remove_tree(str(place / "link"))
    assert (place / "tree/file").exists()
    assert remove_tree(str(place / "tree"))
    assert remove_tree(str(place / "tree"))  # it is gone


def test_leftovers_of_other_users_are_theirs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = Scratch()
    os.close(scratch._lock)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        remove_abandoned()
    assert os.path.isdir(scratch.path)
    remove_abandoned()
    assert not os.path.isdir(scratch.path)


def test_a_worker_that_cannot_be_started_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_arguments: object, **_named: object) -> None:
        raise OSError("no room for a process")

    monkeypatch.setattr(process, "ChildProcess", no_room)
    program = process.WorkerProgram((sys.executable,), None)
    open_before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OSError, match="no room"):
            asyncio.run(process.WorkerProcess.start(program, lambda _: None))
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
