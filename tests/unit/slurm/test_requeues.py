"""How a job of slurm/lib ends: what it says of the end, and whether it is requeued."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bapo_megatron.commands.cluster.run_job import read_job_state
from bapo_megatron.runtime.guards import LATE
from bapo_megatron.runtime.jsonl_log import read_jsonl
from bapo_megatron.runtime.run_paths import JOB_END, RunPaths
from tests.support.executables import executable
from tests.unit.slurm.conftest import NO_PAUSES, Shell, checkpoint

pytestmark = pytest.mark.integration


def may_requeue(shell: Shell, kind: str, **variables: str) -> str:
    """`yes`, or why not."""
    found = shell(f'bapo_read_state; why=$(bapo_may_requeue {kind}) && echo yes || echo "$why"', **variables)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_a_requeue_needs_a_newer_checkpoint(shell: Shell, tmp_path: Path) -> None:
    """The first needs none; the next does, be it in the middle of a step: a job whose step takes longer than
    its time gets through it, a few updates at a time."""
    checkpoint(tmp_path, 10)
    assert may_requeue(shell, "time_limit") == "yes"
    for update in (2, 9, 10):
        checkpoint(tmp_path, 10, update=update)
        assert may_requeue(shell, "time_limit") == "yes"
        refusal = "time_limit, and no newer checkpoint than step 10 since the last requeue"
        assert may_requeue(shell, "time_limit") == refusal
    checkpoint(tmp_path, 11, whole=False)
    assert "no newer checkpoint than step 10" in may_requeue(shell, "time_limit")
    assert may_requeue(shell, "crash", SLURM_JOB_ID="8") == "yes"  # another job begins with full budgets
    checkpoint(tmp_path, 12)
    assert may_requeue(shell, "time_limit") == "yes"
    assert shell("bapo_checkpoint_step").stdout == "12\n"


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


ENDS = {0: "finished", 1: "crash", 2: "config", 3: "stopped", 4: "storage", 85: "preemption", 137: "crash"}
"""Kinds of end by the exit code alone."""


@pytest.mark.parametrize(
    ("code", "before", "kind"),
    [
        *((code, "", kind) for code, kind in ENDS.items()),
        (1, 'touch "$BAPO_RUN/stop"', "cancelled"),
        (3, "BAPO_EXPECTED=2", "engines"),
        (138, "BAPO_SIGNAL=USR1", "preemption"),
        (85, "BAPO_END=$(($(date +%s) + 500))", "time_limit"),
        (85, "BAPO_END=$(($(date +%s) + 5000))", "preemption"),
        (85, f'echo "stopped: {LATE}; saved after step 3" >"$BAPO_LOGS/trainer-n1-0.log"', "time_limit"),
        (85, 'echo "stopped: told to stop by SIGUSR1" >"$BAPO_LOGS/trainer-n1-0.log"', "preemption"),
        (85, "squeue() { echo CANCELLED; }", "slurm"),
        (85, "squeue() { echo COMPLETING; }", "slurm"),
        (85, "squeue() { echo; }", "slurm"),
        (85, "squeue() { echo SIGNALING; }", "preemption"),  # Slurm continues a job before it preempts it
        (1, "sinfo() { echo n1; }", "node"),
        (143, "BAPO_NO_ENGINES=yes", "engines"),
    ],
)
def test_kind_of_end(shell: Shell, code: int, before: str, kind: str) -> None:
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


@pytest.mark.parametrize(
    ("restart", "health", "status"), [("0", "checked", "running"), ("1", "", "cancelled")]
)
def test_a_cancelled_job_that_slurm_takes_back_trains_no_more(
    shell: Shell, tmp_path: Path, restart: str, health: str, status: str
) -> None:
    """Its node was lost before it had saved. A request of before the first start was for another job."""
    (tmp_path / "recipe.py").touch()
    (tmp_path / "stop").touch()
    (tmp_path / "slurm.state").write_text("job=7\nstatus=running\n")
    script = f"""
        bapo_health() {{ echo checked >&3; exit; }}
        bapo_begin recipe.py --run-dir {tmp_path} 3>&1
    """
    found = shell(script, SLURM_RESTART_COUNT=restart)
    assert (found.returncode, found.stdout.splitlines()[1:]) == (0, health.split()), found.stderr
    assert f"status={status}\n" in (tmp_path / "slurm.state").read_text()
    assert not (tmp_path / "stop").exists()


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


def test_the_cause_comes_from_the_first_rank_that_failed(shell: Shell, tmp_path: Path) -> None:
    """By the exit records, if there are any: a killed rank writes no last line. Else by the logs, at last by
    the job's own."""
    texts = {
        "trainer-n1-0": "Traceback (most recent call last):\nConnectionError: peer closed\n",
        "trainer-n2-1": "step 3\nTraceback (most recent call last):\ntorch.OutOfMemoryError: 80 GB\n  note\n",
        "trainer-n3-2": "step 3\nerror: rank 2 on n3 was killed by SIGKILL\n",
    }
    (tmp_path / "ended").mkdir()
    assert shell("bapo_first_failure").stdout == ""
    for age, (name, text) in zip((10, 20, 5), texts.items(), strict=True):
        path = tmp_path / f"{name}.log"
        path.write_text(text)
        os.utime(path, (1e9 - age, 1e9 - age))
    assert shell("bapo_cause").stdout.strip() == "torch.OutOfMemoryError: 80 GB (trainer-n2-1.log)"
    for rank, code, age in ((0, 1, 10), (2, 137, 20), (1, 85, 30), (3, 0, 40)):
        path = tmp_path / f"ended/{rank}"
        path.write_text(f"{code}\n")
        os.utime(path, (1e9 - age, 1e9 - age))
    assert shell("bapo_first_failure").stdout == "2 137\n"
    said = "error: rank 2 on n3 was killed by SIGKILL (trainer-n3-2.log)"
    assert shell("bapo_cause").stdout.strip() == said
    for path in (*tmp_path.glob("trainer-*"), *tmp_path.glob("ended/*")):
        path.unlink()
    (tmp_path / "job.log").write_text("srun: error: n2: task 1: Killed\nsrun: bye\n")
    assert shell("bapo_cause").stdout.strip() == "srun: error: n2: task 1: Killed"
