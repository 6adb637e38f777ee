"""The temporary folder of a server: private, short enough for sockets, and gone once nobody holds it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bapo_megatron.rollout.engines.sglang import server_folder
from bapo_megatron.rollout.engines.sglang.server_folder import ServerFolder


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


def test_no_folder_is_too_long_for_the_path_of_a_socket(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    made = ServerFolder(str(long))
    assert Path(made.path).parent == Path("/tmp")
    assert len(made.path) + 45 < 107
    made.remove()


def test_folders_that_nobody_holds_are_removed(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one removes what a server has left that was killed with its owner."""
    program = (
        "import os, sys; from bapo_megatron.rollout.engines.sglang.server_folder import ServerFolder;"
        "print(ServerFolder(sys.argv[1]).path, flush=True); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(base)], capture_output=True, text=True)
    left = Path(ended.stdout.strip())
    assert left.parent == base
    ServerFolder(str(base)).remove()
    assert left.is_dir()  # so young that its owner may not hold it yet
    monkeypatch.setattr(server_folder, "_YOUNG_S", 0.0)
    held = ServerFolder(str(base))
    assert not left.exists()
    ServerFolder(str(base)).remove()
    assert [str(path) for path in base.iterdir()] == [held.path]
    held.remove()
