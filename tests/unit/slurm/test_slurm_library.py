"""The shell library of slurm/lib: each test sources it and calls a function."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bapo_megatron.commands.cluster.run_job import read_job_state
from bapo_megatron.runtime.jsonl_log import read_jsonl
from bapo_megatron.runtime.run_paths import RunPaths
from tests.support.executables import executable
from tests.unit.slurm.conftest import SLURM, Shell

pytestmark = pytest.mark.integration


def test_every_script_is_clean() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    files = [*SLURM.glob("lib/*.sh"), SLURM / "task.sh", *SLURM.glob("*.sbatch")]
    assert len(files) >= 15
    subprocess.run(["shellcheck", "-x", *map(str, files)], check=True, cwd=SLURM)


IMAGE = """
    srun() {  # a container, whose image has values of its own
        while [[ $1 = -* ]]; do shift; done
        (
            export NCCL_DEBUG=WARN OF_IMAGE=kept HOME=/proc/none TMPDIR=/proc/none PYTHONPATH=/image
            SLURMD_NODENAME=n1 "$@"
        )
    }
"""


@pytest.mark.parametrize("script", ["eval", "evaluate", "convert"])
def test_the_cluster_files_variables_win_over_the_images_in_helper_jobs(
    shell: Shell, tmp_path: Path, script: str
) -> None:
    shown = 'echo "$NCCL_DEBUG $OF_IMAGE ${TMPDIR-none} $PYTHONPATH"\ntest -w "$HOME"'
    say = executable(tmp_path / "say", shown)
    words = {"eval": "100 aime24", "evaluate": f"{say}", "convert": "bapo-ckpt inspect"}[script]
    found = shell(
        f"{IMAGE}\nset -- {tmp_path} {words}\n. {SLURM}/{script}.sbatch",
        BAPO_SLURM=str(SLURM),
        BAPO_PYTHON=str(say),
        BAPO_TASK_SETTINGS="export NCCL_DEBUG=INFO",
    )
    [log] = tmp_path.glob("logs/7/0/job.log")
    assert f"INFO kept none {SLURM.parent}:/image" in log.read_text()
    assert found.returncode == 0, found.stderr
    assert read_jsonl(RunPaths(tmp_path).events)[-1]["exit_code"] == 0


def test_limits_of_the_login_node_are_refused(shell: Shell) -> None:
    """Slurm hands them on: a rank would die after an hour of its processor's time."""
    assert shell("bapo_check_limits; echo well").stdout == "well\n"
    for limit in ("-t 3600", "-v 16000000"):
        found = shell(f"ulimit {limit}; bapo_check_limits")
        assert found.returncode == 2
        assert f"ulimit {limit[:2]} is {limit[3:]} in this job" in found.stderr
        assert "sbatch --propagate=NONE" in found.stderr


@pytest.mark.parametrize(
    ("array", "told"),
    [
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "1", "BAPO_SHARDS": "8"}, "3 of 8"),
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "1"}, "element 3 of 1: arrays begin at 0"),
    ],
)
def test_an_element_of_an_array_knows_how_many_there_are(
    shell: Shell, array: dict[str, str], told: str
) -> None:
    """`--array=3` repeats one of eight, and Slurm says that there is one."""
    found = shell('bapo_shard; echo "$BAPO_SHARD of $BAPO_SHARDS"', **array)
    assert told in found.stdout + found.stderr


def test_job_events_have_the_trainers_format(shell: Shell, tmp_path: Path) -> None:
    odd = 'say "x\\y"\n\ttab\x01 end'
    (tmp_path / "events.jsonl").write_text('{"kind": "start"}\n{"kind": "torn')
    shell('bapo_event kind "text=$ODD" count=3 "share=0.5" "name=007" "none="', ODD=odd)
    first, second = read_jsonl(tmp_path / "events.jsonl")
    assert first == {"kind": "start"}  # what a killed trainer left half is cut off
    assert second.pop("time")[-6:] == "+00:00"
    expected = {"text": 'say "x\\y"\n\ttab end', "count": 3, "share": 0.5, "name": "007", "none": ""}
    assert second == {"kind": "kind", **expected, "job": 7, "restart": 0}
    (tmp_path / "events.jsonl").write_text('{"half')
    shell("BAPO_TRAINER=1 bapo_event kind")  # the running trainer is about to write the rest
    assert (tmp_path / "events.jsonl").read_text().startswith('{"half')


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
@pytest.mark.parametrize("text", ["a" + "é" * 500, "a\udcff\udc80b" + "字" * 400, "\udce9"])
def test_an_event_with_a_truncated_text_is_valid_json(
    shell: Shell, tmp_path: Path, text: str, locale: str
) -> None:
    shell('bapo_event kind "text=$ODD"', ODD=text, LC_ALL=locale)
    row = json.loads((tmp_path / "events.jsonl").read_bytes().decode("utf-8"))
    kept = row["text"]
    assert "\ufffd" not in kept
    assert kept == "".join(char for char in text if not "\udc80" <= char <= "\udcff")[: len(kept)]
    assert len(kept) > 250 or len(text) == 1


def test_a_failing_file_system_at_the_start_is_retried(shell: Shell, tmp_path: Path) -> None:
    """mkdir fails as on NFS, twice; then it is well."""
    fails = """
        sleep() { :; }
        mkdir() { echo x >>"$BAPO_RUN/tries"; (($(wc -l <"$BAPO_RUN/tries") > 2)) && return 0
                  echo "mkdir: cannot create directory: $WORDS" >&2; return 1; }
        bapo_await_disk && echo well
    """
    assert shell(fails, WORDS="Stale file handle").stdout.strip() == "well"
    (tmp_path / "tries").unlink()
    refused = shell(fails, WORDS="Permission denied")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "cannot be written to: mkdir: cannot create directory: Permission denied" in refused.stderr
    (tmp_path / "tries").unlink()
    assert shell(fails, WORDS="Input/output error", BAPO_DISK_WAIT_S="0").returncode == 2


@pytest.mark.parametrize(
    ("flags", "directory"),
    [
        ("recipes/a.py", "{root}/runs/a"),
        ("recipes/a.py --run-dir x/y --steps 3", "{root}/x/y"),
        ("a.py run_dir=/z", "/z"),
    ],
)
def test_the_run_directory(shell: Shell, tmp_path: Path, flags: str, directory: str) -> None:
    assert shell(f"bapo_run_directory {flags}").stdout.strip() == directory.format(root=tmp_path)


def test_ports_of_jobs_and_restarts_differ(shell: Shell) -> None:
    script = 'scontrol() { echo n1; }; bapo_rendezvous; echo "$MASTER_ADDR $MASTER_PORT $BAPO_FIRST_PORT"'
    assert shell(script).stdout.split() == ["n1", "20007", "10056"]
    assert shell(script, SLURM_RESTART_COUNT="1").stdout.split() == ["n1", "25007", "10056"]
    assert shell(script, SLURM_RESTART_COUNT="2").stdout.split() == ["n1", "20007", "10056"]
    assert shell(script, SLURM_JOB_ID="8").stdout.split() == ["n1", "20008", "10064"]


@pytest.mark.parametrize(
    ("kill_wait", "margin", "lead", "fitted"),
    [
        *((30, "", "45", 22), (30, "", "60", 30), (30, "", "61", 60), (30, "", "600", 60)),
        # A site may wait longer for processes that it kills: its job would be over before the requeue.
        *((120, "", "600", 150), (120, "200", "600", 200), (120, "60", "120", 60)),
    ],
)
def test_ranks_are_told_to_save_before_they_are_killed(
    shell: Shell, tmp_path: Path, kill_wait: int, margin: str, lead: str, fitted: int
) -> None:
    (tmp_path / "recipe.py").touch()
    script = f"""
        squeue() {{ echo N/A; }}
        scontrol() {{ [[ $2 = config ]] && echo "KillWait                = {kill_wait} sec" || echo n1; }}
        bapo_health() {{ echo "$BAPO_MARGIN_S" >"$BAPO_RUN/margin"; exit; }}
        bapo_begin recipe.py --run-dir {tmp_path}
    """
    found = shell(script, BAPO_LEAD_S=lead, **({"BAPO_MARGIN_S": margin} if margin else {}))
    assert (tmp_path / "margin").read_text() == f"{fitted}\n", found.stderr


def test_a_job_that_another_job_submits_has_its_own_nodes(shell: Shell) -> None:
    """As `checkpoint.after_export` may do: sbatch hands the variables of the run's job on."""
    group = {"SLURM_JOB_ID_HET_GROUP_0": "5", "SLURM_JOB_NODELIST_HET_GROUP_0": "n7"}
    other = {"SLURM_HET_SIZE": "2", "SLURM_TRES_PER_TASK": "cpu=12", "SLURM_CPUS_PER_TASK": "1", **group}
    script = """
        scontrol() { tr , '\\n' <<<"$3"; }
        bapo_srun_flags 0 eval
        echo "$(bapo_all_nodes)" "${SLURM_TRES_PER_TASK-none}" "${bapo_flags[@]}"
    """
    words = shell(script, **other).stdout.split()
    assert words[:2] == ["n1", "none"]
    assert not any(word.startswith("--het-group") for word in words)
    own = {**other, "SLURM_JOB_ID_HET_GROUP_0": "7", "SLURM_CPUS_PER_TASK": "12"}
    words = shell(script, **own).stdout.split()
    assert words[0] == "n7"
    assert "cpu=12" in words
    assert "--het-group=0" in words


def test_a_job_that_a_requeued_job_submits_has_not_been_restarted(shell: Shell) -> None:
    """It inherits the variable that Slurm sets at a restart alone."""
    says = 'scontrol() { echo "JobId=7 JobName=x Requeue=1 Restarts=0 BatchFlag=1"; }; bapo_restart'
    assert shell(says, SLURM_RESTART_COUNT="3").stdout == "0\n"
    assert shell("scontrol() { return 1; }; bapo_restart", SLURM_RESTART_COUNT="3").stdout == "3\n"


def test_settings_are_checked(shell: Shell) -> None:
    found = shell("bapo_check_numbers", BAPO_LEAD_S="ten")
    assert (found.returncode, found.stderr) == (2, "error: BAPO_LEAD_S=ten must be a whole number\n")


def entry(run: Path, name: str, age_s: float = 0, job: int = 7, state: str = "ready") -> None:
    """A server's, written ``age_s`` ago."""
    path = run / f"engines/{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'{{"url": "http://{name}:1", "node": "{name}", "job": {job}, "state": "{state}"}}\n')
    os.utime(path, (path.stat().st_mtime - age_s,) * 2)


def test_servers_are_alive_while_they_renew_their_entries(shell: Shell, tmp_path: Path) -> None:
    """By the clock of the file server, which stamps the entries: here it is an hour behind the node's."""
    entry(tmp_path, "a", age_s=3600)
    entry(tmp_path, "b", age_s=3700)
    entry(tmp_path, "c", age_s=3600, state="starting")
    script = 'touch() { command touch -d "1 hour ago" "$1"; }; bapo_engines_alive; bapo_forget_engines'
    assert shell(script).stdout.split() == ["http://a:1"]
    assert not list((tmp_path / "engines").iterdir())


def test_servers_that_start_late_join_a_run_that_has_begun(shell: Shell, tmp_path: Path) -> None:
    """Else a day of sixteen nodes would sample with the one server that was ready in time."""
    entry(tmp_path, "a")
    for name, state, job in (("b", "starting", 7), ("c", "down", 7), ("d", "starting", 5)):
        entry(tmp_path, name, 1e8, job, state)
    (tmp_path / "logs").mkdir()
    begin = "BAPO_LOGS=$BAPO_RUN/logs BAPO_EXPECTED=3 BAPO_TRAINER=$$; "
    script = f'{begin}bapo_await_engines; cat "$BAPO_LOGS/engines"'
    found = shell(script, BAPO_ENGINES_WAIT_S="0")
    assert found.stdout.split() == ["http://a:1", "http://b:1", "http://c:1"]
    kinds = [row["kind"] for row in read_jsonl(tmp_path / "events.jsonl")]
    assert kinds == ["engines_missing", "engines_ready"]
    enough = shell(script.replace("=3", "=1"), BAPO_ENGINES_WAIT_S="0")
    assert enough.stdout.split() == ["http://a:1"]
    # While none is ready, a large model is still read: as long as the job says, or as one may start.
    loads = (
        'rm "$BAPO_RUN/logs/engines"; file=$BAPO_RUN/engines/a.json; mv "$file" a; (sleep 1; mv a "$file") & '
    )
    other = tmp_path / "engines/b.json"
    for load_s, start_s in ((60, 0), (0, 900)):
        other.write_text(other.read_text().replace("}", f', "start_s": {start_s}}}'))
        first = shell(loads + script, BAPO_ENGINES_WAIT_S="0", BAPO_ENGINES_LOAD_S=str(load_s))
        assert first.stdout.split() == found.stdout.split()


def test_the_steps_of_a_start_share_one_container(shell: Shell) -> None:
    """pyxis removes a container without a name after each step, and unpacks the image again for the next."""
    named, alone = (
        f"BAPO_CONTAINER_NAME={name}; for role in probe trainer; do bapo_srun_flags 0 $role; "
        'echo "${bapo_flags[@]}"; done'
        for name in ("bapo-7-2", "")
    )
    found = shell(named, BAPO_CONTAINER="/images/a.sqsh")
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("--container-name=bapo-7-2") == 2
    assert found.stdout.count("--container-image=/images/a.sqsh") == 2
    assert "container-name" not in shell(alone, BAPO_CONTAINER="/images/a.sqsh").stdout
    assert "container" not in shell(named).stdout


def test_tasks_get_the_jobs_variables_and_the_ranks_of_a_node_are_neighbours(shell: Shell) -> None:
    """`sbatch --export=NONE`, the rule of some sites, leaves SLURM_EXPORT_ENV=NONE for every srun.
    SLURM_DISTRIBUTION=cyclic would put the ranks of a tensor group on as many nodes."""
    for role, blocks in (("probe", False), ("trainer", True), ("rollout", False)):
        found = shell(f'bapo_srun_flags 0 {role}; echo "${{bapo_flags[@]}}"', SLURM_DISTRIBUTION="cyclic")
        assert "--export=ALL" in found.stdout.split()
        assert ("--distribution=block" in found.stdout.split()) is blocks


@pytest.mark.parametrize(
    ("other", "status", "state", "code"),
    [
        (3, "running", "SIGNALING", 2),  # it saves
        (3, "running", "COMPLETED", 0),
        (3, "stopped", "RUNNING", 0),  # a salloc, in which the run has ended
        (7, "running", "RUNNING", 0),
    ],
)
def test_a_second_job_leaves_the_state_of_the_first_alone(
    shell: Shell, tmp_path: Path, other: int, status: str, state: str, code: int
) -> None:
    """`bapo cancel` finds the running job there."""
    (tmp_path / "recipe.py").touch()
    (tmp_path / "slurm.state").write_text(f"job={other}\nstatus={status}\n")
    script = f"""
        squeue() {{ [[ $3 != {other} ]] || echo {state}; }}
        scontrol() {{ echo n1; }}
        bapo_health() {{ exit 0; }}
        bapo_begin recipe.py --run-dir {tmp_path}
    """
    found = shell(script)
    assert found.returncode == code, found.stderr
    now = read_job_state(tmp_path)
    assert now is not None
    assert now.job == ("3" if code else "7")
    if code:
        log = (tmp_path / "logs/7/0/job.log").read_text()
        assert log.startswith(
            f"error: job 3 of the run {tmp_path} is {state}: `bapo cancel {tmp_path}` lets it"
        )


def test_the_container_is_removed_unless_the_job_is_about_to_end(shell: Shell, tmp_path: Path) -> None:
    executable(tmp_path / "bin/srun", f'echo "$*" >>{tmp_path}/calls')
    executable(tmp_path / "bin/scontrol", "echo n1; echo n2")
    name = "BAPO_CONTAINER_NAME=bapo-7-0; "
    soon = shell(
        name + "BAPO_END=$(($(date +%s) + 100)); bapo_remove_containers", BAPO_CONTAINER="/images/a.sqsh"
    )
    none = shell(name + "bapo_remove_containers")
    assert (soon.returncode, none.returncode, (tmp_path / "calls").exists()) == (0, 0, False)
    late = name + "BAPO_END=$(($(date +%s) + 1000)); bapo_remove_containers"
    assert shell(late, BAPO_CONTAINER="/images/a.sqsh").returncode == 0
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert call.endswith("--ntasks=2 --output=/dev/null enroot remove -f pyxis_bapo-7-0")
    kept = "bapo-7-0 bapo-7-1 bapo-7-2 bapo-71-0 other"
    executable(tmp_path / "bin/srun", 'exec "${@: -3}"')
    executable(
        tmp_path / "bin/enroot",
        f"[ $1 != list ] || printf 'pyxis_%s\\n' {kept}; echo $* >>{tmp_path}/removed",
    )
    old = "BAPO_CONTAINER_NAME=bapo-7-2; BAPO_END=0; bapo_remove_containers old"
    assert shell(old, BAPO_CONTAINER="/images/a.sqsh").returncode == 0
    removed = (tmp_path / "removed").read_text().splitlines()
    assert removed == ["list", "remove -f pyxis_bapo-7-0", "remove -f pyxis_bapo-7-1"]
