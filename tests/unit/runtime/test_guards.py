"""When a run stops by itself or by a signal, which every rank hears of, and a rank without memory says so."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime import guards
from bapo_megatron.runtime.distributed import free_port
from bapo_megatron.runtime.exit_codes import handling
from bapo_megatron.runtime.guards import LATE, OutOfMemoryError, PreemptionSignal, naming_memory
from bapo_megatron.runtime.run_paths import JOB_END
from tests.support.forked_commands import run_python, start_bapo
from tests.support.processes import heed_signals

START = 1_000_000.0


class Clock:
    """The time of a test."""

    def __init__(self) -> None:
        self.now = START
        self.jump = 0.0
        """By how much somebody has set the wall clock."""

    def time(self) -> float:
        return self.now + self.jump

    def monotonic(self) -> float:
        return self.now - START


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """One rank alone, at a time that only the test moves."""
    clock = Clock()
    monkeypatch.setattr(guards, "time", clock)
    monkeypatch.setattr(dist, "all_reduce", lambda *_: None)
    for name in ("BAPO_END_TIME", "SLURM_JOB_END_TIME", "BAPO_LOGS", "RANK"):
        monkeypatch.delenv(name, raising=False)
    return clock


def ends_in(monkeypatch: pytest.MonkeyPatch, seconds: int) -> PreemptionSignal:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(START) + seconds))
    return PreemptionSignal()


@pytest.mark.parametrize("told", [None, "", "0", "UNLIMITED"])
def test_without_a_job_end_the_run_is_not_preempted(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, told: str | None
) -> None:
    if told is not None:
        monkeypatch.setenv("SLURM_JOB_END_TIME", told)
    watched = PreemptionSignal()
    for _ in range(3):
        clock.now += 1e6
        assert watched.reason() is None


def test_it_stops_while_the_longest_update_a_save_and_a_minute_still_fit(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stretches of 100 s and 10 s, a save of 30 s: 190 s before the end it continues, after that no more."""
    watched = ends_in(monkeypatch, 1000)
    clock.now += 500  # starting up is not a stretch
    for now in (500, 600, 700, 800, 810):
        clock.now = START + now
        assert watched.reason() is None
        watched.saved(30)
        watched.saved(20)
    clock.now = START + 811
    assert watched.reason() == "the job's time would end before the next update is saved"


def test_a_clock_that_is_set_is_no_long_update(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set on by 10,000 s: 9,000 s before the end another update of 6,000 s fits, and none of 10,000 s."""
    watched = ends_in(monkeypatch, 25_000)
    assert watched.reason() is None
    clock.now, clock.jump = START + 10, 10_000.0
    assert watched.reason() is None
    clock.now += 6_000
    assert watched.reason() is None


def test_the_end_that_the_script_knows_comes_before_slurms(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm moves the end of a job that it preempts."""
    monkeypatch.setenv("BAPO_END_TIME", str(int(START) + 10_000))
    assert ends_in(monkeypatch, 10).reason() is None


def test_a_moved_end_is_heeded(clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the job's script writes it: a later end, none, an earlier one."""
    monkeypatch.setenv("BAPO_LOGS", str(tmp_path))
    monkeypatch.setenv("BAPO_END_TIME", str(int(START) + 30))
    watched = PreemptionSignal()
    monkeypatch.setenv("RANK", "1")  # which leaves it to rank 0
    assert watched.reason() is None
    monkeypatch.setenv("RANK", "0")
    for moved in (f"{int(START) + 1000} 1:00:00", "0 UNLIMITED"):
        (tmp_path / JOB_END).write_text(f"{moved}\n")
        assert watched.reason() is None
    (tmp_path / JOB_END).write_text(f"{int(START) + 50} 10:00\n")
    assert watched.reason() == LATE


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_is_noted_within_the_block_alone(clock: Clock, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    watched = PreemptionSignal()
    with watched.heeding():
        watched.begun()
        assert watched.reason() is None
        os.kill(os.getpid(), number)
        assert watched.reason() == f"told to stop by {number.name}"
    assert signal.getsignal(number) is before


def test_a_rank_without_a_signal_stops_with_the_others(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def another_says_so(told: torch.Tensor, operation: object) -> None:
        assert operation is dist.ReduceOp.MAX
        told.fill_(1)

    monkeypatch.setattr(dist, "all_reduce", another_says_so)
    assert PreemptionSignal().reason() == "another rank was told to stop"


HUNG_UP = """
import os, time
from bapo_megatron.runtime.exit_codes import handling
told = []
with handling(lambda number, frame: told.append(number)):
    os.write(int(os.environ["READY"]), b"r")
    while not told:
        time.sleep(0.01)
    print("a line for a terminal that is gone", flush=True)
    os.write(int(os.environ["READY"]), b"d")
"""


WAITING = """
import os, sys, time
from bapo_megatron.runtime.distributed import process_group
from bapo_megatron.runtime.guards import PreemptionSignal
watched = PreemptionSignal()
watched.record = lambda event: {record}
with watched.heeding():
    os.write(1, b"r")
    with process_group("gloo", 60):  # the other rank never comes
        raise SystemExit("they met")
"""


@pytest.mark.parametrize(
    ("record", "said"),
    [("print(event, flush=True)", "told to stop by SIGTERM while"), ("time.sleep(600)", "")],
)
def test_a_start_that_waits_in_c_is_stopped_at_once(
    record: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For another rank, where no Python handler runs; also if its event cannot be written."""
    meeting = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in meeting.items():
        monkeypatch.setenv(name, value)
    reading, writing = os.pipe()
    process = start_bapo("-c", WAITING.format(record=record), log=writing)
    os.close(writing)
    assert os.read(reading, 1) == b"r"
    os.kill(process.pid, signal.SIGTERM)
    with open(reading) as rest:
        output = rest.read()
    assert process.wait() == 85, output
    assert said in output
    assert "stopped: told to stop by SIGTERM before the run began" in output


@pytest.mark.parametrize("opened", [pty.openpty, os.pipe])
def test_output_to_a_hung_up_terminal_raises_nothing(opened: Callable[[], tuple[int, int]]) -> None:
    """A terminal that is closed; a pipe to ``tee``, which ends with it: ``bapo train ... | tee log``."""
    reading, writing = os.pipe()
    outer, inner = opened()
    process = subprocess.Popen(
        [sys.executable, "-c", HUNG_UP],
        stdout=inner,
        stderr=inner,
        pass_fds=[writing],
        env={**os.environ, "READY": str(writing)},
        start_new_session=True,
        preexec_fn=heed_signals,
    )
    os.close(inner)
    os.close(writing)
    assert os.read(reading, 1) == b"r"
    os.close(outer)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=300) == 0
    assert os.read(reading, 1) == b"d"
    os.close(reading)


def test_an_ignored_hangup_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    told: list[int] = []
    try:
        with handling(lambda number, _frame: told.append(number)):
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert told == [signal.SIGTERM]


RUN = """
import os, resource, signal, sys, time
import torch, torch.distributed as dist
from bapo_megatron.runtime import distributed
from bapo_megatron.runtime.distributed import process_group, run_processes
from bapo_megatron.runtime.guards import naming_memory

def worker():
    with naming_memory(), process_group("gloo", 60):
        dist.barrier()
        if os.environ["RANK"] == "1":
            {harm}
        time.sleep(3600)  # as NCCL does while it waits for a rank that is gone

if __name__ == "__main__":
    distributed._GRACE_S = 0.5  # for the rank that sleeps, and would not end by itself
    run_processes(worker, (), 2, heeding={heeding})
"""
SHORT = """resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)); torch.zeros(2**40)"""


def fail(error: Exception) -> Callable[[], object]:
    def work() -> None:
        raise error

    return work


TOLD = "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 3 has 1.1 GiB free."


@pytest.mark.parametrize(
    ("work", "told"),
    [
        (
            fail(torch.OutOfMemoryError(TOLD)),
            "has no GPU memory left; a smaller batch.pack_tokens .*batch.recompute=full"
            f".*: {' '.join(TOLD.split())}$",
        ),
        (lambda: torch.zeros(2**50), "has no memory left; fewer processes"),
        (fail(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")), "no GPU memory left"),
    ],
)
def test_a_rank_without_memory_says_what_needs_less(
    work: Callable[[], object], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "5")
    with pytest.raises(OutOfMemoryError, match=told) as caught, naming_memory():
        work()
    assert str(caught.value).startswith(f"rank 5 on {socket.gethostname()} has no ")


@pytest.mark.parametrize("error", [RuntimeError("shape"), ConfigError("out of memory"), OSError(28, "full")])
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, naming_memory():
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("harm", "heeding", "code", "told"),
    [
        (SHORT, False, 1, f"OutOfMemoryError: rank 1 on {socket.gethostname()} has no memory left"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            False,
            128 + signal.SIGKILL,
            "error: rank 1 was killed by SIGKILL, most likely because the machine",
        ),
        # One of a run was still starting: it heeds them later. A warm start's, which never does, was killed.
        ("os.kill(os.getpid(), signal.SIGTERM)", True, 85, "stopped: told to stop before the run began"),
        ("os.kill(os.getpid(), signal.SIGTERM)", False, 143, "rank 1 was killed by"),
    ],
)
def test_a_rank_that_comes_to_harm_ends_the_others(harm: str, heeding: bool, code: int, told: str) -> None:
    ended, output = run_python(RUN.format(harm=harm, heeding=heeding))
    assert ended == code, output
    assert told in output
