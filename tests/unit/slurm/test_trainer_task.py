"""`task.sh trainer`: exit codes of ranks, and the kind of end that the batch script derives from them."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.unit.slurm.conftest import SLURM, Shell


def run_rank(
    folder: Path, program: str, lines: str = "", home: str = "/", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run rank 3, whose interpreter is the script ``program``. ``lines``: what bash reads before task.sh."""
    (folder / "ended").mkdir(exist_ok=True)
    rank, begin = folder / "rank", folder / "begin"
    rank.write_text(f"#!/bin/bash\n{program}\n")
    rank.chmod(0o755)
    begin.write_text(lines)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": home,
        "BASH_ENV": str(begin),
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "3",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURMD_NODENAME": "n1",
        "BAPO_LIB": str(SLURM / "lib"),
        "BAPO_LOGS": str(folder),
        "BAPO_RUN": str(folder),
        "BAPO_ROOT": str(folder),
        "BAPO_PYTHON": str(rank),
        "BAPO_EXPECTED": "0",
        **variables,
    }
    command = ["bash", str(SLURM / "task.sh"), "trainer", "recipe.py"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_a_stop_signal_during_start_up_is_no_crash(shell: Shell, tmp_path: Path, name: str) -> None:
    """The rank has no signal handler yet, so the signal that task.sh forwards kills it."""
    rank = f"trap - {name}; kill -{name} $PPID; exec sleep 1000"
    done = run_rank(tmp_path, rank)
    assert done.returncode == 85, done.stderr
    assert "killed" not in done.stdout
    assert shell("bapo_first_failure; bapo_kind_of_end 85").stdout == "preemption\n"


def test_a_rank_that_saves_on_a_stop_signal_keeps_its_exit_code(shell: Shell, tmp_path: Path) -> None:
    rank = "trap 'exit 85' TERM; kill -TERM $PPID; while :; do sleep 0.01; done"
    assert run_rank(tmp_path, rank).returncode == 85
    assert shell("bapo_first_failure").stdout == ""


def test_a_stop_signal_before_the_rank_starts_is_no_crash(tmp_path: Path) -> None:
    """The signal comes while task.sh waits for rollout servers."""
    lines = "export BAPO_EXPECTED=1\nsleep() { kill -TERM $$; }\n"
    done = run_rank(tmp_path, "echo started", lines)
    assert (done.returncode, done.stdout) == (85, "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, 137), (signal.SIGSEGV, 139)])
def test_a_rank_killed_by_another_signal_is_a_crash(
    shell: Shell, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    done = run_rank(tmp_path, f"kill -{number:d} $$")
    assert done.returncode == code
    assert f"rank 3 on n1 was killed by {number.name}" in done.stdout
    assert shell("bapo_first_failure").stdout == f"3 {code}\n"


def test_a_task_without_the_users_home_has_another(tmp_path: Path) -> None:
    """Most containers do not mount it, and what compiles kernels at run time writes there."""
    found = run_rank(tmp_path, 'test -w "$HOME" && mkdir "$HOME/.cache" && echo "$HOME"', home="/proc/none")
    said, home = found.stdout.splitlines()
    assert said.startswith("the home /proc/none cannot be written to here")
    assert home.startswith("/tmp/bapo-home.")
    assert not Path(home).exists(), "it ends with its task"
    without = run_rank(tmp_path, "true", home="").stdout
    assert without.startswith("the home  cannot be written to here")


@pytest.mark.parametrize(("folder", "kept"), [("/proc/none", False), ("/tmp", True)])
def test_a_folder_for_temporary_files_that_is_not_there_is_not_used(
    tmp_path: Path, folder: str, kept: bool
) -> None:
    """A site's TMPDIR is on the node, and no container mounts it: nvcc would write nothing."""
    said = run_rank(tmp_path, 'echo "rank: ${TMPDIR-none}"', TMPDIR=folder).stdout
    assert said.endswith("rank: /tmp\n" if kept else "rank: none\n")
    assert ("TMPDIR=/proc/none cannot be written to here" in said) is not kept


def test_a_task_keeps_a_home_that_it_has(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    assert run_rank(tmp_path, 'echo "$HOME"', home=f"{tmp_path}/home").stdout == f"{tmp_path}/home\n"


def test_a_read_only_home_is_kept_without_a_container(tmp_path: Path) -> None:
    """Sites mount it so on their nodes: `pip install --user` and .netrc are there. /proc is such a folder."""
    assert run_rank(tmp_path, 'echo "$HOME"', home="/proc/self").stdout == "/proc/self\n"
    inside = run_rank(tmp_path, "true", home="/proc/self", BAPO_CONTAINER="image.sqsh").stdout
    assert inside.startswith("the home /proc/self cannot be written to here")


def test_a_rank_runs_the_code_of_the_checkout(tmp_path: Path) -> None:
    """Not the copy in the image, where the job was submitted from another folder."""
    for before, path in (("", "/shared/checkout"), ("/x", "/shared/checkout:/x")):
        found = run_rank(
            tmp_path, 'echo "$PYTHONPATH"', BAPO_SLURM="/shared/checkout/slurm", PYTHONPATH=before
        )
        assert found.stdout == f"{path}\n"
