"""Cleanup and isolation of a real server: private sockets, and no leftover files or processes."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

from bapo_megatron.runtime.processes import descendants

from .conftest import start_server


def test_a_killed_server_leaves_nothing_and_its_sockets_are_private(
    sglang: Path, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    before = os.umask(0)
    server = start_server(make_model("qwen2"), tmp_path)
    os.umask(before)
    try:
        server.wait_ready()
        processes = descendants(server.pid)
        (folder,) = {
            value
            for one in processes
            for name, _, value in (
                item.partition("=") for item in Path(f"/proc/{one}/environ").read_text().split("\0")
            )
            if name == "TMPDIR"
        }
        modes = {path: path.lstat().st_mode for path in [Path(folder), *Path(folder).rglob("*")]}
        assert sum(stat.S_ISSOCK(mode) for mode in modes.values()) >= 3
        assert {path: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}
        for one in processes:
            os.kill(one, signal.SIGKILL)
        server.process.wait(60)
    finally:
        server.close()
    assert [path for path in modes if path.exists()] == []
