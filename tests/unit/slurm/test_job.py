"""A job of Slurm: the launcher of `bapo submit` and what it leaves, and exit codes of `task.sh trainer`."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.executables import executable
from tests.unit.slurm.conftest import SLURM, Shell, program


def run_rank(
    folder: Path, program: str, lines: str = "", home: str = "/", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run rank 3, whose interpreter is the script ``program``. ``lines``: what bash reads before task.sh."""
    (folder / "ended").mkdir(exist_ok=True)
    rank, begin = executable(folder / "rank", program), folder / "begin"
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


def test_a_stop_signal_before_the_rank_starts_is_no_crash(tmp_path: Path) -> None:
    """The signal comes while task.sh waits for rollout servers."""
    lines = "export BAPO_EXPECTED=1\nsleep() { kill -TERM $$; }\n"
    done = run_rank(tmp_path, "echo started", lines)
    assert (done.returncode, done.stdout) == (85, "")


def test_a_task_without_the_users_home_has_another(tmp_path: Path) -> None:
    """Most containers do not mount it, and what compiles kernels at run time writes there. Sites mount it
    read-only on their nodes (as /proc is): without a container it is kept, for .netrc is there."""
    found = run_rank(tmp_path, 'test -w "$HOME" && mkdir "$HOME/.cache" && echo "$HOME"', home="/proc/none")
    said, home = found.stdout.splitlines()
    assert said.startswith("the home /proc/none cannot be written to here")
    assert home.startswith("/tmp/bapo-home.")
    assert not Path(home).exists(), "it ends with its task"
    for kept in (str(tmp_path), "/proc/self"):
        assert run_rank(tmp_path, 'echo "$HOME"', home=kept).stdout == f"{kept}\n"
    inside = run_rank(tmp_path, "true", home="/proc/self", BAPO_CONTAINER="image.sqsh").stdout
    assert inside.startswith("the home /proc/self cannot be written to here")


@pytest.mark.parametrize(("folder", "kept"), [("/proc/none", False), ("/tmp", True)])
def test_a_folder_for_temporary_files_that_is_not_there_is_not_used(
    tmp_path: Path, folder: str, kept: bool
) -> None:
    """A site's TMPDIR is on the node, and no container mounts it: nvcc would write nothing."""
    said = run_rank(tmp_path, 'echo "rank: ${TMPDIR-none}"', TMPDIR=folder).stdout
    assert said.endswith("rank: /tmp\n" if kept else "rank: none\n")
    assert ("TMPDIR=/proc/none cannot be written to here" in said) is not kept


def test_a_rank_runs_the_code_of_the_checkout(tmp_path: Path) -> None:
    """Not the copy in the image, where the job was submitted from another folder."""
    for before, path in (("", "/shared/checkout"), ("/x", "/shared/checkout:/x")):
        found = run_rank(
            tmp_path, 'echo "$PYTHONPATH"', BAPO_SLURM="/shared/checkout/slurm", PYTHONPATH=before
        )
        assert found.stdout == f"{path}\n"


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """slurm/launch.py, which runs where NeMo-Run is."""
    for name in ("nemo_run", "nemo_run.core", "nemo_run.core.execution", "nemo_run.core.execution.slurm"):
        part: Any = ModuleType(name)
        part.SlurmBatchRequest = part.SlurmExecutor = part.SlurmJobDetails = object
        monkeypatch.setitem(sys.modules, name, part)
    return program("launch")


def test_the_script_of_a_job_is_readable_by_its_user_alone(
    launch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cluster file's [environment], with its tokens, is in it, on a file system that all share."""
    (tmp_path / "logs").mkdir()
    executable(tmp_path / "sbatch", 'grep -q TOKEN "$2" && echo 4711')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(launch, "script_of", lambda job: "export HF_TOKEN=hf_secret\n")
    monkeypatch.setattr(sys, "argv", ["launch.py"])
    path = tmp_path / "logs/submitted.sbatch"
    path.write_text("that of an earlier version, which others may read\n")
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"run": str(tmp_path)})))
        launch.main()
        assert path.read_text() == "export HF_TOKEN=hf_secret\n"
        assert path.stat().st_mode & 0o777 == 0o600
    assert capsys.readouterr().out == "4711\n4711\n"


def test_the_number_of_a_job_is_found_after_a_sites_own_words(launch: ModuleType) -> None:
    assert launch.job_number("Welcome.\nA project: 12 hours\n\n4711;cluster\n") == "4711"
    with pytest.raises(SystemExit, match=r"named no job; `squeue --me` shows .*: held for review"):
        launch.job_number("held for review\n")
