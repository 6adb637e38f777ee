"""What workers write is gone when they are, and when their owner was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bapo_megatron.runtime.child_process import within
from bapo_megatron.workers import scratch
from bapo_megatron.workers.scratch import Scratch, remove_abandoned

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
    monkeypatch.setattr(scratch, "FRESH_S", 0.0)
    return tmp_path


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
    (place / f"{scratch._PREFIX}a_file").touch()
    (place / "another").mkdir()
    (place / f"{scratch._PREFIX}a_link").symlink_to(place / "another")
    (place / "bapo_worker_01234567-89ab_12345678").mkdir()
    remove_abandoned()
    assert len(list(place.iterdir())) == 4


def test_a_link_is_deleted_and_what_it_names_is_left_as_it_is(place: Path) -> None:
    """Also its modes: where Python cannot delete a tree, its folders are opened first."""
    target, link = place / "another", place / "link"
    target.mkdir(0o500)
    link.symlink_to(target)
    scratch.remove_tree(str(link))
    assert [*place.iterdir()] == [target]
    assert target.stat().st_mode & 0o777 == 0o500


def test_a_start_begins_with_no_folder_after_its_time(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        (place / f"{scratch._PREFIX}{name}").mkdir()
    monkeypatch.setattr(scratch, "SWEEP_S", -1.0)
    remove_abandoned()
    assert len([*place.iterdir()]) == 2


@pytest.mark.parametrize("owner_was", ["killed", "alive"])
def test_what_programs_leave_is_deleted(place: Path, owner_was: str) -> None:
    """1,100 directories in each other (no path reaches the last), none that may be read, links, a FIFO."""
    kept = place / "kept"
    (kept / "folder").mkdir(parents=True)
    (kept / "folder/file").write_text("kept")
    made = Scratch()
    here = os.open(made.path, os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("deep", dir_fd=here)
        deeper = os.open("deep", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.close(os.open("file", os.O_CREAT, dir_fd=here))
    os.symlink(kept / "folder", "link", dir_fd=here)
    os.close(here)
    path = Path(made.path)
    (path / "link").symlink_to(kept / "folder")
    os.link(kept / "folder/file", path / "hard")
    os.mkfifo(path / "fifo")
    (path / "closed/inner").mkdir(parents=True)
    (path / "closed/inner").chmod(0)
    (path / "closed").chmod(0)
    if owner_was == "alive":
        made.remove()
    else:
        os.close(made._lock)
        remove_abandoned()
    assert [entry.name for entry in place.iterdir()] == ["kept"]
    assert (kept / "folder/file").read_text() == "kept"


def test_folders_that_their_owner_may_not_read_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modes mean nothing to root."""
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")

    def is_left() -> bool:
        if os.geteuid() == 0:
            os.setuid(65534)
        made = Scratch()
        inner = Path(made.path, "closed/inner")
        inner.mkdir(parents=True)
        inner.joinpath("file").touch()
        for folder in (inner, inner.parent):
            folder.chmod(0)
        made.remove()
        return os.path.lexists(made.path)

    assert not within(60.0, is_left)


def test_leftovers_of_others_are_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's, and one just made, which its owner may not have locked yet."""
    made = Scratch()
    os.close(made._lock)
    for other in ((os, "geteuid", lambda: 12345), (scratch, "FRESH_S", 60.0)):
        with monkeypatch.context() as patch:
            patch.setattr(*other)
            remove_abandoned()
        assert os.path.isdir(made.path)
    remove_abandoned()
    assert not os.path.isdir(made.path)
