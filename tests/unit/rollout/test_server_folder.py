"""The temporary folder of a server: private, short enough for socket paths, swept when stale."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bapo_megatron.rollout.engines.sglang import server_process
from bapo_megatron.rollout.engines.sglang.server_process import ServerFolder


@pytest.fixture
def base() -> Iterator[Path]:
    """A parent whose path is short."""
    made = Path(f"/tmp/folders-{os.getpid()}")
    made.mkdir()
    yield made
    shutil.rmtree(made)


def test_a_folder_is_private_whatever_the_umask(base: Path) -> None:
    before = os.umask(0)
    try:
        made = ServerFolder(str(base))
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(made.path).st_mode) == 0o700
    Path(made.path, "socket").touch()
    made.remove()
    assert list(base.iterdir()) == []


def test_the_folder_is_short_enough_for_socket_paths(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    made = ServerFolder(str(long))
    assert Path(made.path).parent == Path("/tmp")
    assert len(made.path) + 45 < 107
    made.remove()


@pytest.mark.parametrize("kind", ["missing", "a file", "relative", "read-only"])
def test_an_unusable_parent_is_replaced_by_tmp(
    base: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TMPDIR of a job's node is often not there in its container."""
    parent = str(base / "parent") if kind != "relative" else "."
    if kind == "a file":
        (base / "parent").touch()
    if kind == "read-only":
        real = os.mkdir

        def mkdir(path: str, mode: int = 0o777) -> None:
            if str(path).startswith(parent):  # no file mode stops root
                raise OSError(errno.EROFS, "read-only", path)
            real(path, mode)

        monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setenv("TMPDIR", parent)
    for given in (parent, None):
        made = ServerFolder(given)
        assert Path(made.path).parent == Path("/tmp")
        made.remove()


def old(path: str) -> None:
    os.utime(path, (0, 0))


def test_a_folder_of_another_machine_is_left_alone(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of another machine may not be visible here."""
    with monkeypatch.context() as patch:
        patch.setattr(server_process.socket, "gethostname", lambda: "another")
        assert server_process._host() != server_process._PREFIX.split("-")[1]
        patch.setattr(server_process, "_PREFIX", f"bapo-{server_process._host()}-")
        theirs = ServerFolder(str(base))
    fcntl.flock(theirs._lock, fcntl.LOCK_UN)
    old(theirs.path)
    ServerFolder(str(base)).remove()
    assert Path(theirs.path).is_dir()
    theirs.remove()


def test_folders_without_locks_are_never_swept(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    with monkeypatch.context() as patch:
        patch.setattr(server_process.fcntl, "flock", no_locks)
        made = ServerFolder(str(base))
        old(made.path)
        ServerFolder(str(base)).remove()
    assert len(Path(made.path).name) == 20
    ServerFolder(str(base)).remove()
    assert [str(path) for path in base.iterdir()] == [made.path]
    made.remove()
    assert list(base.iterdir()) == []


def test_stale_folders_are_swept(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next folder sweeps those that killed servers have left."""
    program = (
        "import os, sys; from bapo_megatron.rollout.engines.sglang.server_process import ServerFolder;"
        "print(ServerFolder(sys.argv[1]).path, flush=True); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(base)], capture_output=True, text=True)
    left = Path(ended.stdout.strip())
    assert left.parent == base
    ServerFolder(str(base)).remove()
    assert left.is_dir()  # so young that its owner may not hold it yet
    monkeypatch.setattr(server_process, "_YOUNG_S", 0.0)
    held = ServerFolder(str(base))
    assert not left.exists()
    ServerFolder(str(base)).remove()
    assert [str(path) for path in base.iterdir()] == [held.path]
    held.remove()
