"""The shell library of slurm/lib: each test sources it and calls a function."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bapo_megatron.commands.cluster.cluster_file import ClusterFile
from bapo_megatron.commands.cluster.run_job import read_job_state
from bapo_megatron.runtime.guards import LATE
from bapo_megatron.runtime.jsonl_log import read_jsonl
from bapo_megatron.runtime.run_paths import JOB_END, RunPaths
from tests.support.executables import executable
from tests.unit.slurm.conftest import NO_PAUSES

pytestmark = pytest.mark.integration

SLURM = Path(__file__).parents[3] / "slurm"
Shell = Callable[..., subprocess.CompletedProcess[str]]


def checkpoint(run: Path, step: int, whole: bool = True, update: int | None = None) -> None:
    within = "" if update is None else f"_update_{update:03d}"
    folder = run / f"checkpoints/step_{step:06d}{within}"
    folder.mkdir(parents=True)
    if whole:
        (folder / "manifest.json").write_text("{}")


def may_requeue(shell: Shell, kind: str, **variables: str) -> str:
    """`yes`, or why not."""
    found = shell(f'bapo_read_state; why=$(bapo_may_requeue {kind}) && echo yes || echo "$why"', **variables)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_every_script_is_clean() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    files = [*SLURM.glob("lib/*.sh"), SLURM / "task.sh", *SLURM.glob("*.sbatch")]
    assert len(files) >= 15
    subprocess.run(["shellcheck", "-x", *map(str, files)], check=True, cwd=SLURM)


def test_scripts_stay_small() -> None:
    for path in [*SLURM.glob("lib/*.sh"), SLURM / "task.sh", *SLURM.glob("*.sbatch"), *SLURM.glob("*.py")]:
        lines = path.read_text().splitlines()
        assert len(lines) <= 350, path
        assert max(map(len, lines)) <= 110, path


def test_a_requeue_needs_a_newer_checkpoint(shell: Shell, tmp_path: Path) -> None:
    """The first requeue needs no newer checkpoint; the next does."""
    assert may_requeue(shell, "crash") == "yes"
    assert may_requeue(shell, "crash") == "crash, and no newer checkpoint than step 0 since the last requeue"
    checkpoint(tmp_path, 10)
    assert may_requeue(shell, "crash") == "yes"
    checkpoint(tmp_path, 20, whole=False)
    assert may_requeue(shell, "time_limit").startswith("time_limit, and no newer checkpoint than step 10")


def test_a_mid_step_checkpoint_counts_as_newer(shell: Shell, tmp_path: Path) -> None:
    """A job whose step takes longer than its time gets through it, a few updates at a time."""
    checkpoint(tmp_path, 10)
    assert may_requeue(shell, "time_limit") == "yes"
    for update in (2, 9, 10):
        checkpoint(tmp_path, 10, update=update)
        assert may_requeue(shell, "time_limit") == "yes"
        assert may_requeue(shell, "time_limit").endswith(
            "no newer checkpoint than step 10 since the last requeue"
        )
    checkpoint(tmp_path, 11)
    assert may_requeue(shell, "time_limit") == "yes"
    assert shell("bapo_checkpoint_step").stdout == "11\n"


def test_crashes_and_time_limits_have_separate_retry_budgets(shell: Shell, tmp_path: Path) -> None:
    limits = {"BAPO_MAX_CRASHES": "2", "BAPO_MAX_TIME_LIMITS": "1"}
    for step, kind, answer in (
        (1, "crash", "yes"),
        (2, "time_limit", "yes"),
        (3, "time_limit", "time_limit number 2, and the budget is 1"),
        (4, "crash", "yes"),
        (5, "crash", "crash number 3, and the budget is 2"),
        (6, "preemption", "yes"),
    ):
        checkpoint(tmp_path, step)
        assert may_requeue(shell, kind, **limits) == answer
    state = read_job_state(tmp_path)
    assert state is not None
    assert {kind: n for kind, n in state.requeues.items() if n} == {
        "crash": 2,
        "preemption": 1,
        "time_limit": 1,
    }


def test_a_few_preemptions_may_come_before_a_checkpoint(shell: Shell, tmp_path: Path) -> None:
    """One with a first chance, then as many as BAPO_MAX_IDLE; a checkpoint forgives them."""
    assert [may_requeue(shell, "preemption", BAPO_MAX_IDLE="2") for _ in range(4)] == [
        *["yes"] * 3,
        "preemption, and no newer checkpoint than step 0 since the last requeue",
    ]
    checkpoint(tmp_path, 1)
    assert may_requeue(shell, "node", BAPO_MAX_IDLE="2") == "yes"
    assert may_requeue(shell, "preemption", BAPO_MAX_IDLE="2") == "yes"


@pytest.mark.parametrize(
    ("codes", "answers"), [([85, 85, 85, 85, 137], ["yes"] * 3 + ["no"] * 2), ([137, 137], ["yes", "no"])]
)
def test_a_time_limit_without_a_newer_checkpoint(shell: Shell, codes: list[int], answers: list[str]) -> None:
    """Ranks that ended well had nothing newer to save: sampling continues from the journal. Others,
    whose save was given up, would fail in the same way again."""
    script = "bapo_read_state; bapo_may_requeue time_limit {} >/dev/null && echo yes || echo no"
    found = [shell(script.format(code), BAPO_MAX_IDLE="2").stdout.strip() for code in codes]
    assert found == answers


def test_another_job_begins_with_full_budgets(shell: Shell) -> None:
    assert may_requeue(shell, "crash") == "yes"
    assert may_requeue(shell, "crash") != "yes"
    assert may_requeue(shell, "crash", SLURM_JOB_ID="8") == "yes"


@pytest.mark.parametrize(
    ("code", "before", "kind"),
    [
        (0, "", "finished"),
        (1, "", "crash"),
        (2, "", "config"),
        (3, "", "stopped"),
        (3, "BAPO_EXPECTED=2", "engines"),
        (4, "", "storage"),
        (137, "", "crash"),
        (85, "", "preemption"),
        (138, "BAPO_SIGNAL=USR1", "preemption"),
        (85, "BAPO_END=$(($(date +%s) + 500))", "time_limit"),
        (85, "BAPO_END=$(($(date +%s) + 5000))", "preemption"),
        (85, f'echo "stopped: {LATE}; saved after step 3" >"$BAPO_LOGS/trainer-n1-0.log"', "time_limit"),
        (85, 'echo "stopped: told to stop by SIGUSR1" >"$BAPO_LOGS/trainer-n1-0.log"', "preemption"),
        (1, 'touch "$BAPO_RUN/stop"', "cancelled"),
        (85, "squeue() { echo CANCELLED; }", "slurm"),
        (85, "squeue() { echo COMPLETING; }", "slurm"),
        (85, "squeue() { echo; }", "slurm"),
        (85, "squeue() { echo SIGNALING; }", "preemption"),  # Slurm continues a job before it preempts it
        (1, "sinfo() { echo n1; }", "node"),
        (143, "BAPO_NO_ENGINES=yes", "engines"),
    ],
)
def test_kind_of_end_by_exit_code(shell: Shell, code: int, before: str, kind: str) -> None:
    found = shell(f"{NO_PAUSES}{before}\nbapo_kind_of_end {code}")
    assert found.stdout.strip() == kind, found.stderr


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("srun: error: Node failure on n2", "node"),
        ("srun: error: Node failure on n3,n2.", "node"),
        ("srun: error: Node failure on n3", "crash"),  # it samples
        ("Node failure on n2, says a rank", "crash"),
    ],
)
def test_a_node_failure_is_found_in_the_job_log(shell: Shell, tmp_path: Path, said: str, kind: str) -> None:
    (tmp_path / "job.log").write_text(f"[10:00:00] start\n{said}\nsrun: error: n1: task 0: Killed\n")
    names = "scontrol() { tr , '\\n' <<<\"$3\"; }\nsleep() { :; }\n"
    found = shell(f"{names}bapo_kind_of_end 137", SLURM_JOB_NODELIST="n1,n2")
    assert found.stdout.strip() == kind, found.stderr


UNENDED = "srun: error: Timed out waiting for job step to complete"


@pytest.mark.parametrize(
    ("said", "before", "kind"),
    [
        (UNENDED, "", "node"),
        (UNENDED, "DOWN_AFTER=400", "crash"),  # the node lives: its processes only hang
        (UNENDED, "BAPO_END=$(($(date +%s) + 30))", "crash"),  # the last minute is for the requeue
        ("srun: error: n1: task 0: Exited with exit code 1", "", "crash"),
    ],
)
def test_a_dead_node_is_waited_for_until_slurm_reports_it(
    shell: Shell, tmp_path: Path, said: str, before: str, kind: str
) -> None:
    """After its SlurmdTimeout: minutes after the other ranks have failed, and srun has given up on it."""
    (tmp_path / "job.log").write_text(f"{said}\n")
    (tmp_path / "slept").write_text("0\n")
    slurm = """
        DOWN_AFTER=300
        sleep() { echo $(($(<"$BAPO_RUN/slept") + $1)) >"$BAPO_RUN/slept"; }
        sinfo() { (($(<"$BAPO_RUN/slept") < DOWN_AFTER)) || echo n1; }
        scontrol() { [[ $* = "show config" ]] && echo "SlurmdTimeout           = 300 sec"; }
    """
    assert shell(f"{slurm}{before}\nbapo_kind_of_end 1").stdout.strip() == kind


BUSY = """
    sleep() { :; }
    %s() { echo x >>"$BAPO_RUN/tries"; (($(wc -l <"$BAPO_RUN/tries") < 3)) || { %s; return; }
           echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; return 1; }
"""
"""A Slurm command that a busy controller refuses twice; then it does what follows its name."""


SILENT, NO_LIMIT = "squeue() { return 1; }", "squeue() { echo N/A UNLIMITED; }"
ISO = "squeue() { [[ ${SLURM_TIME_FORMAT:-} = standard ]] && echo 2001-09-09T01:46:40 1:00 || echo 01:46; }"
BERLIN = "CET-1CEST,M3.5.0,M10.5.0/3"


@pytest.mark.parametrize(
    ("squeue", "variables", "end"),
    [
        (BUSY % ("squeue", "echo 2001-09-09T01:46:40 30:00"), {"TZ": "UTC"}, "1000000000 30:00"),
        (SILENT, {"BAPO_SLURM_WAIT_S": "0"}, "0 "),
        (SILENT, {"BAPO_SLURM_WAIT_S": "0", "SLURM_JOB_END_TIME": "1700000000"}, "1700000000 "),
        (NO_LIMIT, {"SLURM_JOB_END_TIME": "1700000000"}, "0 UNLIMITED"),
        (ISO, {"TZ": "UTC", "SLURM_TIME_FORMAT": "%H:%M"}, "1000000000 1:00"),  # the user's
        # 25 October 2026, half past two in Berlin, in summer time and an hour later.
        *(
            (f"squeue() {{ date -d @{end} +%FT%T; }}", {"TZ": BERLIN}, f"{end} ")
            for end in (1792888200, 1792891800)
        ),
    ],
)
def test_a_job_asks_for_its_end_until_slurm_answers(
    shell: Shell, squeue: str, variables: dict[str, str], end: str
) -> None:
    """No answer is not an end: `date -d ""` is the last midnight, at which every rank would have to stop."""
    assert shell(f"{squeue}\nbapo_end_time bapo_ask", **variables).stdout == f"{end}\n"


def test_another_time_limit_moves_the_end_a_preemption_does_not(shell: Shell, tmp_path: Path) -> None:
    """Slurm moves the end of a job that it preempts, too, and leaves its limit."""
    look = """
        timeout() { cat "$BAPO_RUN/answer"; }
        BAPO_END=1000000000 BAPO_LIMIT=30:00 TZ=UTC0
        bapo_read_state
        for answer in "2001-09-09T01:40:00 30:00" "" "2001-09-09T02:46:40 1:30:00" "N/A UNLIMITED"; do
            echo "$answer" >"$BAPO_RUN/answer"
            bapo_look_at_end
            bapo_heed_end
            echo "$BAPO_END $BAPO_LIMIT $(sed -n s/^end=//p "$BAPO_RUN/$BAPO_STATE_FILE")"
        done
    """
    found = shell(f"touch {RunPaths(tmp_path).slurm_state}; {look}")
    assert found.stdout.splitlines() == [
        "1000000000 30:00 ",
        "1000000000 30:00 ",
        "1000003600 1:30:00 1000003600",
        "0 UNLIMITED 0",
    ], found.stderr
    events = read_jsonl(RunPaths(tmp_path).events)
    assert [(row["kind"], row["end"]) for row in events] == [
        ("job_end_moved", 1000003600),
        ("job_end_moved", 0),
    ]
    assert (tmp_path / JOB_END).read_text() == "0 UNLIMITED\n"


def test_a_signal_while_slurm_does_not_answer_is_kept(shell: Shell, tmp_path: Path) -> None:
    """Before the job has counted its start: no rank begins, and it ends as preempted."""
    (tmp_path / "recipe.py").touch()
    script = f"""
        bapo_ask() {{ kill -TERM $$; "$@"; }}
        bapo_finish() {{ echo "finished $1" >"$BAPO_RUN/said"; }}
        bapo_begin recipe.py --run-dir {tmp_path}
        echo "a rank" >"$BAPO_RUN/said"
    """
    found = shell(script, BAPO_HEALTH="off")
    assert found.returncode == 85, found.stderr
    assert (tmp_path / "said").read_text() == "finished 85\n"
    assert read_jsonl(RunPaths(tmp_path).events)[-1]["signal"] == "TERM"


def test_a_trainer_that_starts_after_the_signal_is_told(shell: Shell, tmp_path: Path) -> None:
    script = """
        bapo_finish() { echo "finished $1"; }
        bapo_read_state
        BAPO_SIGNAL=USR1
        bash -c 'trap "exit 85" USR1; touch "$0/ready"; while :; do sleep 0.01; done' "$BAPO_RUN" &
        until [[ -e $BAPO_RUN/ready ]]; do :; done
        bapo_supervise "$!"
    """
    assert "finished 85" in (found := shell(script)).stdout, found.stderr


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


def test_a_busy_controller_does_not_keep_a_job_from_its_requeue(shell: Shell, tmp_path: Path) -> None:
    """Neither its question after the job's state, nor after lost nodes, nor the requeue itself."""
    silent = shell("squeue() { return 1; }; bapo_kind_of_end 85", BAPO_SLURM_WAIT_S="0")
    assert silent.stdout == "preemption\n"
    late = shell(BUSY % ("squeue", "echo CANCELLED") + "bapo_kind_of_end 85")
    assert late.stdout == "slurm\n"
    (tmp_path / "tries").unlink()
    assert shell(BUSY % ("sinfo", "echo n1") + "bapo_kind_of_end 1").stdout == "node\n"
    (tmp_path / "tries").unlink()
    requeued = "builtin() { echo killed by Slurm; exit; }\nbapo_requeue '' || echo stopped"
    assert shell(BUSY % ("scontrol", "true") + requeued).stdout.strip() == "killed by Slurm"
    refused = shell("bapo_requeue '' || echo stopped", BAPO_SLURM_WAIT_S="0")
    assert refused.stdout == "stopped\n"


def test_a_node_without_a_command_of_slurms_is_not_asked_again(shell: Shell, tmp_path: Path) -> None:
    """Some have no sinfo: the job of a crash would wait an hour for its answers."""
    script = 'sleep() { :; }; sinfo() { echo x >>"$BAPO_RUN/asked"; return 127; }; bapo_lost_nodes'
    assert shell(script, BAPO_SLURM_WAIT_S="2").stdout == ""
    assert (tmp_path / "asked").read_text() == 2 * "x\n"


def test_a_users_defaults_of_squeue_do_not_change_a_jobs_answers(shell: Shell, tmp_path: Path) -> None:
    """SQUEUE_STATES=PENDING hides every running job: none would be requeued."""
    executable(tmp_path / "bin/squeue", '[ -n "$SQUEUE_STATES" ] || echo RUNNING')
    executable(tmp_path / "bin/sinfo", '[ -z "$SINFO_PARTITION" ] && [ "$1" = -a ] && echo n1; true')
    found = shell("bapo_kind_of_end 1", SQUEUE_STATES="PENDING", SINFO_PARTITION="cpu")
    assert found.stdout == "node\n"


def test_nodes_that_the_user_has_left_out_stay_out(shell: Shell, tmp_path: Path) -> None:
    """`sbatch --exclude`: an update of ExcNodeList replaces the whole list."""
    script = """
        scontrol() {
            [[ $1 = show ]] || { echo "$*" >>"$BAPO_RUN/updates"; return 0; }
            echo "JobId=7 HetJobId=7 NodeList=n1 ExcNodeList=n[8-9] NumNodes=1"
            echo "JobId=8 HetJobId=7 NodeList=n2 ExcNodeList=(null) NumNodes=1"
        }
        builtin() { exit; }
        bapo_requeue n1,n2
    """
    ids = {f"SLURM_JOB_ID_HET_GROUP_{group}": str(7 + group) for group in (0, 1)}
    shell(script, SLURM_HET_SIZE="2", **ids)
    assert (tmp_path / "updates").read_text().splitlines() == [
        "requeue 7",
        "update JobId=7 ExcNodeList=n[8-9],n1,n2",
        "update JobId=8 ExcNodeList=n1,n2",
    ]


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
        ({}, "0 of 1"),
        ({"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_COUNT": "8"}, "7 of 8"),
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


def test_a_signal_during_the_decision_does_not_stop_a_job_that_slurm_takes_back(
    shell: Shell, tmp_path: Path
) -> None:
    """Slurm signals every process of the job, also the subshell that finds out what has become of it."""
    script = """
        trap 'bapo_told TERM' TERM
        squeue() { kill -TERM "$BASHPID" $$; echo COMPLETING; }
        bapo_read_state
        bapo_finish 137
    """
    found = shell(script)
    assert "the job is COMPLETING for Slurm, which decides what comes now" in found.stdout, found.stderr
    assert found.returncode == 137
    assert not (tmp_path / "events.jsonl").exists()


def test_job_events_have_the_trainers_format(shell: Shell, tmp_path: Path) -> None:
    odd = 'say "x\\y"\n\ttab\x01 end'
    (tmp_path / "events.jsonl").write_text('{"kind": "start"}\n{"kind": "torn')
    shell('bapo_event kind "text=$ODD" count=3 "share=0.5" "name=007" "none="', ODD=odd)
    first, second = read_jsonl(tmp_path / "events.jsonl")
    assert first == {"kind": "start"}  # what a killed trainer left half is cut off
    assert second.pop("time")[-6:] == "+00:00"
    expected = {"text": 'say "x\\y"\n\ttab end', "count": 3, "share": 0.5, "name": "007", "none": ""}
    assert second == {"kind": "kind", **expected, "job": 7, "restart": 0}


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


def test_the_logs_may_be_on_another_disk(shell: Shell, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "logs").symlink_to(scratch)
    found = shell("bapo_open_logs")
    assert found.returncode == 0, found.stderr
    assert list(scratch.rglob("job.log"))


def test_a_half_line_of_the_running_trainer_is_kept(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"half')
    shell("BAPO_TRAINER=1 bapo_event kind")
    assert path.read_text().startswith('{"half')


def test_the_cause_comes_from_the_first_rank_that_failed(shell: Shell, tmp_path: Path) -> None:
    texts = {
        "trainer-n1-0": "Traceback (most recent call last):\nConnectionError: peer closed\n",
        "trainer-n2-1": "step 3\nTraceback (most recent call last):\ntorch.OutOfMemoryError: 80 GB\n  note\n",
        "trainer-n3-2": "step 3\n",
    }
    for age, (name, text) in zip((10, 20, 30), texts.items(), strict=True):
        path = tmp_path / f"{name}.log"
        path.write_text(text)
        os.utime(path, (1e9 - age, 1e9 - age))
    assert shell("bapo_cause").stdout.strip() == "torch.OutOfMemoryError: 80 GB (trainer-n2-1.log)"
    for path in tmp_path.glob("trainer-*"):
        path.unlink()
    (tmp_path / "job.log").write_text("srun: error: n2: task 1: Killed\nsrun: bye\n")
    assert shell("bapo_cause").stdout.strip() == "srun: error: n2: task 1: Killed"


def test_the_first_failure_is_the_earliest_exit_record(shell: Shell, tmp_path: Path) -> None:
    """The time of a log says nothing: a killed rank writes no last line."""
    (tmp_path / "ended").mkdir()
    assert shell("bapo_first_failure").stdout == ""
    for rank, code, age in ((0, 1, 10), (1, 137, 20), (2, 85, 30), (3, 0, 40)):
        path = tmp_path / f"ended/{rank}"
        path.write_text(f"{code}\n")
        os.utime(path, (1e9 - age, 1e9 - age))
    assert shell("bapo_first_failure").stdout == "1 137\n"
    (tmp_path / "trainer-n1-0.log").write_text("ConnectionError: peer closed\n")
    (tmp_path / "trainer-n2-1.log").write_text("step 3\nerror: rank 1 on n2 was killed by SIGKILL\n")
    os.utime(tmp_path / "trainer-n1-0.log", (1e9, 1e9))
    expected = "error: rank 1 on n2 was killed by SIGKILL (trainer-n2-1.log)"
    assert shell("bapo_cause").stdout.strip() == expected


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
        ("a.py --run_dir=/z", "/z"),
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


def test_a_save_that_is_given_up_leaves_time_for_the_requeue(shell: Shell) -> None:
    """srun waits for ranks that cannot be killed at once for Slurm's KillWait, 30 s, and two more. Then Slurm
    must not have ended the job: it would not be requeued."""
    margin = ClusterFile(account="a", partition="p", time="1", gpus_per_node=8).margin_s
    assert shell('echo "$BAPO_MARGIN_S"').stdout == f"{margin}\n"
    assert 30 + 2 + 20 <= margin <= 90


@pytest.mark.parametrize(("lead", "margin"), [("45", "22"), ("60", "30"), ("61", "60"), ("600", "60")])
def test_ranks_are_told_to_save_before_they_are_killed(
    shell: Shell, tmp_path: Path, lead: str, margin: str
) -> None:
    (tmp_path / "recipe.py").touch()
    script = f"""
        squeue() {{ echo N/A; }}
        scontrol() {{ echo n1; }}
        bapo_health() {{ echo "$BAPO_MARGIN_S" >"$BAPO_RUN/margin"; exit; }}
        bapo_begin recipe.py --run-dir {tmp_path}
    """
    found = shell(script, BAPO_LEAD_S=lead)
    assert (tmp_path / "margin").read_text() == f"{margin}\n", found.stderr


@pytest.mark.parametrize(
    ("margin", "lead", "fitted"), [("60", "600", "150"), ("200", "600", "200"), ("60", "120", "60")]
)
def test_a_site_may_wait_longer_for_processes_that_it_kills(
    shell: Shell, margin: str, lead: str, fitted: str
) -> None:
    """Its job would be over before the requeue."""
    config = (
        'scontrol() { echo "KillWait                = 120 sec"; }; bapo_fit_margin; echo "$BAPO_MARGIN_S"'
    )
    assert shell(config, BAPO_MARGIN_S=margin, BAPO_LEAD_S=lead).stdout == f"{fitted}\n"


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


@pytest.mark.parametrize(("name", "value"), [("BAPO_LEAD_S", "ten"), ("BAPO_MAX_CRASHES", "-1")])
def test_settings_are_checked(shell: Shell, name: str, value: str) -> None:
    found = shell("bapo_check_numbers", **{name: value})
    assert (found.returncode, found.stderr.strip()) == (2, f"error: {name}={value} must be a whole number")


def entry(run: Path, name: str, age_s: float = 0, job: int = 7, state: str = "ready") -> None:
    """A server's, written ``age_s`` ago."""
    path = run / f"engines/{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'{{"url": "http://{name}:1", "node": "{name}", "job": {job}, "state": "{state}"}}\n')
    os.utime(path, (path.stat().st_mtime - age_s,) * 2)


def test_servers_are_alive_while_they_renew_their_entries(shell: Shell, tmp_path: Path) -> None:
    entry(tmp_path, "a")
    entry(tmp_path, "b", age_s=100)
    entry(tmp_path, "c", state="starting")
    assert shell("bapo_engines_alive").stdout.split() == ["http://a:1"]
    shell("bapo_forget_engines")
    assert not list((tmp_path / "engines").iterdir())


def test_the_clock_of_a_file_server_may_be_off(shell: Shell, tmp_path: Path) -> None:
    """It stamps the entries: by the node's clock an hour ahead all servers would be silent for an hour."""
    entry(tmp_path, "a", age_s=3600)
    entry(tmp_path, "b", age_s=3700)
    script = 'touch() { command touch -d "1 hour ago" "$1"; }; bapo_engines_alive'
    assert shell(script).stdout.split() == ["http://a:1"]


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


def test_an_array_task_of_an_evaluation_has_one_step_and_suite(shell: Shell) -> None:
    lines = "\n".join(f"bapo_pick_evaluation 100,200 aime24,aime25,math500 {n} || true" for n in range(7))
    assert shell(lines).stdout.splitlines() == [
        *(f"{step} {suite}" for step in (100, 200) for suite in ("aime24", "aime25", "math500")),
        "element 6: 2 steps and 3 suites make --array=0-5",
    ]
    assert shell("bapo_pick_evaluation latest aime24 1").returncode == 1


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


PROBE = """
    bapo_nodes() { printf '%s\\n' $NODES; }
    srun() {
        printf '%s\\n' "$@" >>"$BAPO_RUN/calls"
        [[ $ANSWER = no ]] || echo {} >"$BAPO_RUN/health/0/n1.json"
    }
    timeout() { shift 3; "$@"; }
    bapo_event() { echo "$1"; }
    bapo_headline() { echo "$1"; }
    bapo_requeue() { echo "without $1"; exit; }
    bapo_read_state
    bapo_health
"""


@pytest.mark.parametrize(
    ("nodes", "answer", "told"),
    [
        ("n1 n2 n3", "yes", "without n2,n3"),
        ("n1 n2 n3", "no", "STOPPED: health: no bad node could be identified\ncause: * no node answered"),
        ("n1", "no", "without n1"),
    ],
)
def test_a_probe_that_could_not_run_does_not_exclude_every_node(
    shell: Shell, tmp_path: Path, nodes: str, answer: str, told: str
) -> None:
    """A wrong interpreter or image: without all nodes of a partition the job would wait for ever."""
    found = shell(PROBE, NODES=nodes, ANSWER=answer)
    assert told in found.stdout, found.stderr


def test_nodes_that_are_all_bad_are_not_excluded(shell: Shell, tmp_path: Path) -> None:
    """A broken environment, or memory_gb too high: a job without all of a partition would wait for ever."""
    verdict = PROBE.replace(
        "bapo_health\n", 'printf "n1 x\\nn2 x\\n" >"$BAPO_RUN/health/0/verdict"; bapo_health'
    )
    (tmp_path / "health/0").mkdir(parents=True)
    both = shell(verdict, NODES="n1 n2", ANSWER="yes")
    assert "STOPPED: health: every node is bad: the setup" in both.stdout, both.stderr
    assert both.returncode == 1
    some = {"NODES": "n1 n2 n3", "ANSWER": "yes"}
    assert "without n1,n2\n" in shell(verdict, **some).stdout
    again = shell(verdict.replace("n1 x\\nn2 x", "n3 x"), **some)
    assert "STOPPED: health: nodes n1,n2 were left out before; others are bad now" in again.stdout
    checkpoint(tmp_path, 10)  # weeks later another node fails
    assert "without n3\n" in shell(verdict.replace("n1 x\\nn2 x", "n3 x"), **some).stdout
    assert "excluded=n1,n2,n3\n" in (tmp_path / "slurm.state").read_text()


@pytest.mark.parametrize(("gpus", "count"), [("8", "8"), ("h100:4", "4"), ("", "0")])
def test_the_probe_gets_the_number_of_gpus_of_any_type(
    shell: Shell, tmp_path: Path, gpus: str, count: str
) -> None:
    shell(PROBE, NODES="n1", ANSWER="no", SLURM_GPUS_PER_NODE=gpus)
    assert f"--gpus={count}" in (tmp_path / "calls").read_text().splitlines()


def test_the_probe_of_a_heterogeneous_job_gets_its_groups_gpus(shell: Shell, tmp_path: Path) -> None:
    """Slurm names the variable after the group there, and no other: no GPU of a large job was counted."""
    found = shell(
        PROBE.replace("bapo_health\n", "bapo_probe 0; bapo_probe 1\n"),
        NODES="n1",
        ANSWER="no",
        SLURM_HET_SIZE="2",
        SLURM_GPUS_PER_NODE_HET_GROUP_0="8",
        SLURM_GPUS_PER_NODE_HET_GROUP_1="h100:4",
    )
    counts = [word for word in (tmp_path / "calls").read_text().split() if word.startswith("--gpus=")]
    assert counts == ["--gpus=8", "--gpus=4"], found.stderr


@pytest.mark.parametrize(
    ("other", "status", "state", "code"),
    [
        (3, "running", "RUNNING", 2),
        (3, "running", "SIGNALING", 2),  # it saves
        (3, "running", "STOPPED", 2),
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


@pytest.mark.parametrize("name", ["train", "colocated", "rollout", "eval"])
def test_a_group_that_takes_whole_nodes_takes_their_memory(name: str) -> None:
    """Slurm's default is a share for each processor, and saving needs most of a node's memory."""
    lines = (SLURM / f"{name}.sbatch").read_text().splitlines()
    assert lines.count("#SBATCH --mem=0") == lines.count("#SBATCH --gpus-per-node=8")
