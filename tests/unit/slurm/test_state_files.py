"""State files of a Slurm job are read as data: no line is evaluated, and invalid lines are skipped."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bapo_megatron.commands.cluster.run_job import read_job_state
from tests.unit.slurm.conftest import NO_PAUSES

pytestmark = pytest.mark.integration

Shell = Callable[..., subprocess.CompletedProcess[str]]

COUNTERS = ("idle", "progress", "preemption")


@pytest.mark.parametrize("name", COUNTERS)
def test_a_command_in_the_state_file_does_not_run(shell: Shell, tmp_path: Path, name: str) -> None:
    ran = tmp_path / "ran"
    value = f"x[$(touch {ran})]"
    (tmp_path / "slurm.state").write_text(f"job=7\nstatus=running\nprogress=0\n{name}={value}\n")
    said = shell("bapo_read_state; bapo_account; bapo_may_requeue preemption 85; bapo_write_state").stdout
    shell("bapo_read_state; bapo_may_requeue preemption 85")
    assert not ran.exists(), said
    assert value not in (tmp_path / "slurm.state").read_text()
    assert read_job_state(tmp_path) is not None


def test_invalid_lines_of_the_state_file_are_reported(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "slurm.state").write_text(
        "job=7\ncrash=010\nx[$(id)]=1\nidle=2\nexcluded=n1,n2\nnodes=a b-1.c\n"
    )
    found = shell('bapo_read_state; echo "${bapo_state[crash]} ${bapo_state[idle]} ${bapo_state[excluded]}"')
    assert found.stdout.strip() == "0 2 n1,n2"
    assert found.stderr.count("a line that no job wrote is ignored") == 2
    assert "crash=010" in found.stderr


def test_the_state_file_round_trips(shell: Shell, tmp_path: Path) -> None:
    written = shell(
        'bapo_read_state; bapo_write_state restart=3 status=running signal=USR1 "nodes=n1 n2" end=1790000000'
        ' excluded=n3,n4 progress=12000003; bapo_read_state; echo "${bapo_state[*]}"'
    )
    assert written.stderr == ""
    state = read_job_state(tmp_path)
    assert state is not None
    assert (state.restart, state.status, state.end, state.nodes, state.excluded) == (
        *(3, "running", 1790000000, "n1 n2"),
        "n3,n4",
    )
    assert "crash, and no newer checkpoint" in shell("bapo_read_state; bapo_may_requeue crash").stdout


def test_an_invalid_exit_code_counts_as_a_crash(shell: Shell, tmp_path: Path) -> None:
    """Ranks leave theirs in files; the job's shell calculates with them."""
    ran = tmp_path / "ran"
    (tmp_path / "ended").mkdir()
    (tmp_path / "ended/3").write_text(f"x[$(touch {ran})]\n")
    (tmp_path / "ended/$(id)").write_text("7\n")
    found = shell(f'{NO_PAUSES}first=$(bapo_first_failure); echo "$first"; bapo_kind_of_end "${{first#* }}"')
    assert found.stdout.split("\n")[:2] == ["3 1", "crash"]
    assert not ran.exists()


@pytest.mark.parametrize(
    "url",
    ["http://a:1/x", "--run-dir=/", "http://a b:1", "https://a:1", "http://$(id):1", "http://-a:1", "a:1"],
)
def test_a_registered_engine_with_an_invalid_url_is_skipped(shell: Shell, tmp_path: Path, url: str) -> None:
    (tmp_path / "engines").mkdir()
    for name, one in (("a", url), ("b", "http://node-1.x:30000")):
        text = f'{{"url": "{one}", "node": "{name}", "job": 7, "state": "ready"}}\n'
        (tmp_path / f"engines/{name}.json").write_text(text)
    (tmp_path / "engines/c.json").symlink_to(tmp_path / "engines/b.json")
    assert shell("bapo_engines_alive").stdout.splitlines() == ["http://node-1.x:30000"]


@pytest.mark.parametrize("text", ["²", "--5", "x[$(id)]", "", "9" * 40])
def test_python_reads_the_numbers_of_the_state_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "slurm.state").write_text(f"job=7\nrestart={text}\n")
    state = read_job_state(tmp_path)
    assert state is not None
    assert state.restart == 0
