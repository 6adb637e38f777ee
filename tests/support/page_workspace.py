"""A copy of the repository in which the commands of a page are run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.support.forked_commands import put_bapo_into, server
from tests.support.pages import ROOT

_FOLDERS = (
    "bapo_megatron",
    "bapo_rehearsal",
    "checkpoints_tools",
    "recipes",
    "slurm",
    "tests",
    "benchmarks",
    "studies",
    "docs",
)


def copy_repository(workspace: Path, copied: Iterable[str], files: dict[str, str]) -> None:
    """Put the repository into ``workspace``, with new ``files``; what is not ``copied`` is linked."""
    touched = {*copied, *(path.split("/")[0] for path in files)}
    for name in _FOLDERS:
        if name in touched:
            shutil.copytree(ROOT / name, workspace / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (workspace / name).symlink_to(ROOT / name)
    for path, text in files.items():
        (workspace / path).parent.mkdir(parents=True, exist_ok=True)
        (workspace / path).write_text(text)


def environment_of(workspace: Path) -> dict[str, str]:
    """Variables of a shell whose `bapo` is that of the workspace."""
    put_bapo_into(workspace / "bin", workspace)
    path = os.pathsep.join([str(workspace / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PYTHONPATH": str(workspace), "PATH": path, "OMP_NUM_THREADS": "1"}


def run_commands(commands: str, expected: str, workspace: Path, environment: dict[str, str]) -> None:
    """Run a block of commands; AssertionError if one fails, or a line of ``expected`` is not printed."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=workspace,
        env=environment,
        pass_fds=[server().fileno()],
        capture_output=True,
        text=True,
        timeout=600,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{commands}\n{output[-4000:]}"
    for line in filter(None, map(str.strip, expected.splitlines())):
        assert line in output, f"{commands}\ndid not print {line!r}:\n{output[-4000:]}"


_SMALL = "--rollout.prompts-per-step 4 --rollout.group-size 4 --evaluation.every 0 --reward.workers 1"


def shortened(commands: str) -> str:
    """The commands with one step for each run that says no number of steps; of the demo, small ones."""

    def short(line: str) -> str:
        steps = "" if " --steps " in line else " --steps 1"
        small = f" {_SMALL}" if "bapo train recipes/demo_cpu.py" in line else ""
        return re.sub(r"bapo train \S+", rf"\g<0>{steps}{small}", line)

    return "\n".join(map(short, commands.replace("\\\n", " ").splitlines()))
