"""The other megatron-core that is tested, beside the installed one: its wheel unpacked, first on PYTHONPATH.

``make megatron`` fetches it. On Python 3.11 the installed one is 0.16.1, the last that pip offers there.
0.19.2 asks for 3.12 and runs on 3.11, but for its compiled part, which only Megatron's data sets need.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from bapo_megatron.runtime.device import environment_variable
from tests.support.forked_commands import ROOT

INSTALLED, OTHER = "0.16.1", "0.19.2"


def other_folder() -> Path:
    """The folder of the unpacked wheel; skips the test where another megatron-core is installed."""
    if metadata.version("megatron-core") != INSTALLED:
        pytest.skip(f"megatron-core {INSTALLED} is not the installed one")
    folder = Path(environment_variable("BAPO_MEGATRON_SOURCES") or ROOT / ".megatron") / OTHER
    assert (folder / "megatron/core").is_dir(), f"{folder} has no megatron-core: run `make megatron`"
    return folder


def launcher(folder: Path | None) -> tuple[str, ...]:
    """The words that start an interpreter with the megatron-core in ``folder``; None: the installed one."""
    path = () if folder is None else ("env", f"PYTHONPATH={folder}")
    return (*path, sys.executable)


def run_tests(folder: Path, *arguments: str) -> str:
    """Run pytest with the megatron-core in ``folder``; its output. No test may fail, or be skipped."""
    words = [*launcher(folder), "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-n", "0"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    child = subprocess.run(
        [*words, *arguments], cwd=ROOT, env=own, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, f"{child.stdout[-6000:]}\n{child.stderr[-2000:]}"
    assert " skipped" not in child.stdout, child.stdout[-3000:]
    return child.stdout
