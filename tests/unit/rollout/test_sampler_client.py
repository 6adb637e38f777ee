"""The trainer's client of the sampler process: heartbeats, kill and restart of a stopped or dead process."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from bapo_megatron.errors import RunStopped, StorageFailed
from bapo_megatron.rollout.sampler import client, process
from bapo_megatron.rollout.sampler.client import SamplerClient
from bapo_megatron.rollout.sampler.process import ALIVE, with_heartbeats
from bapo_megatron.runtime.exit_codes import SIGNALS
from tests.support.waiting import until


def test_a_signal_to_stop_does_not_end_a_sampler_that_starts(events: list[dict[str, Any]]) -> None:
    """Slurm sends it to every process of a job, also while this one still imports."""
    made = SamplerClient(None, events.append)  # type: ignore[arg-type]
    for number in SIGNALS:
        os.kill(made._process.pid, number)
    made.close()
    assert made._process.returncode == 0


@pytest.fixture
def events() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def sampler(
    tmp_path: Path, events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[SamplerClient]:
    monkeypatch.setattr(client, "_SERVICE", "tests.support.mute_service")
    monkeypatch.setattr(client, "_CLOSE_S", 1.0)
    monkeypatch.setattr(client, "_SILENT_S", 5.0)  # longer than a busy machine takes to start an interpreter
    made = SamplerClient(tmp_path / "stopped", events.append)  # type: ignore[arg-type]
    yield made
    made.close()


def test_a_stopped_process_is_killed_and_restarted(
    sampler: SamplerClient, events: list[dict[str, Any]]
) -> None:
    sampler.start(1, None)
    first = sampler.state()["pid"]
    sampler.checkpointed(1)  # asks a process that stops; the next one answers
    assert sampler.state()["pid"] != first
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    (event,) = events
    assert event == {"kind": "sampler_died", "reason": "no heartbeat for 5 s", "deaths": 1}


def test_a_long_call_with_heartbeats_is_awaited(sampler: SamplerClient, events: list[dict[str, Any]]) -> None:
    """A call of 7 s, where 5 s without a heartbeat would be too long."""
    assert sampler.next_batch(1, 0.0) is None
    assert events == []


def test_a_process_that_does_not_close_is_killed(sampler: SamplerClient) -> None:
    """The fake process stops itself (SIGSTOP) when it is asked to close."""
    pid, started = sampler.state()["pid"], time.monotonic()
    sampler.close()
    assert time.monotonic() - started < 20
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_call_that_is_never_read_times_out(sampler: SamplerClient, events: list[dict[str, Any]]) -> None:
    """More than fits into the pipe: it is the writing that would wait for ever."""
    os.kill(sampler.state()["pid"], signal.SIGSTOP)
    sampler.start(1, {"much": "x" * 10_000_000})
    assert [event["kind"] for event in events] == ["sampler_died"]


SUSPENDED = """
import os, signal, threading, time
from multiprocessing import Pipe
from bapo_megatron.rollout.sampler.client import limit_waits
ours, theirs = Pipe()
limit_waits(ours, 5.0)
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGSTOP)).start()
began = time.monotonic()
try:
    ours.recv()
except BlockingIOError:
    print(time.monotonic() - began, flush=True)
"""


def test_a_suspended_job_is_not_a_silent_sampler() -> None:
    """Both processes are stopped for longer than the limit, which begins anew when they continue."""
    with subprocess.Popen([sys.executable, "-c", SUSPENDED], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout
        process = psutil.Process(trainer.pid)
        until(lambda: process.status() == psutil.STATUS_STOPPED, process.status)
        time.sleep(6.0)
        process.resume()
        assert float(trainer.stdout.readline()) > 6.0 + 4.9


def test_heartbeats_are_sent_during_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_BEAT_S", 0.02)
    ours, theirs = Pipe()
    assert asyncio.run(with_heartbeats(theirs, asyncio.sleep(0.3, "done"))) == "done"
    assert ours.recv() == ALIVE


def test_an_error_of_the_setup_reaches_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that crashed with a traceback would be restarted five times."""
    ours, theirs = Pipe()

    async def fail(*_: Any) -> None:
        raise RunStopped("the journal could not be written")

    monkeypatch.setattr(process, "_open", fail)
    ours.send(("start", (1, None)))
    asyncio.run(process._serve(theirs, None))  # type: ignore[arg-type]
    assert ours.recv() == ("error", "RunStopped", "the journal could not be written", [])


@pytest.mark.parametrize(("number", "kind"), [(errno.ESTALE, StorageFailed), (errno.ENOENT, RunStopped)])
def test_a_disk_that_fails_is_one_wherever_the_process_meets_it(number: int, kind: type[RunStopped]) -> None:
    """Else the job would stop for good (exit code 3), and not be requeued."""
    _, name, _ = process._failed(OSError(number, "journal"))
    assert client._ERRORS.get(name, RunStopped) is kind


class Told(SamplerClient):
    """A client of fake processes that record their calls, and die at a given one."""

    def __init__(self, events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[list[str]] = []
        """The calls of each process."""
        self.dies_at: list[str] = []
        monkeypatch.setattr(client.time, "sleep", lambda _: None)
        super().__init__(None, events.append)  # type: ignore[arg-type]

    def _launch(self) -> Any:
        self.told.append([])
        return None, SimpleNamespace(close=lambda: None)

    def _exchange(self, method: str, *arguments: Any) -> Any:
        if self.dies_at and self.dies_at[0] == method:
            self.dies_at.pop(0)
            raise client.SamplerDied(f"at {method}")
        self.told[-1].append(" ".join(map(str, (method, *arguments))))
        return Path("journal/step") if method == "next_batch" else [f"of {method}"]


@pytest.fixture
def told(events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Told:
    made = Told(events, monkeypatch)
    made.start(1, None)
    return made


FOLDER, HANDLES = (("load_weights", Path("v0"), 0, 0), ("expect_handles", 7, 3))


@pytest.mark.parametrize(
    ("calls", "repeated"),
    [
        ([FOLDER, ("admit",), ("state",)], ["load_weights v0 0 0", "admit"]),
        ([FOLDER, ("admit",), ("release",), HANDLES, ("state",)], ["expect_handles 7 3"]),  # held in training
        ([HANDLES, FOLDER, ("state",)], ["load_weights v0 0 0"]),
    ],
)
def test_a_restarted_process_knows_the_newest_weights_and_whether_engines_may_sample(
    told: Told, calls: list[tuple[Any, ...]], repeated: list[str]
) -> None:
    """It is told them before the call at which the other one died."""
    *before, (last, *arguments) = calls
    for method, *values in before:
        getattr(told, method)(*values)
    told.dies_at = [last]
    getattr(told, last)(*arguments)
    assert told.told[1] == ["start 1 None", *repeated, " ".join(map(str, (last, *arguments)))]


def test_deaths_count_since_the_last_batch(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted process begins after it, with what is in the journal: evaluations are not lost."""
    monkeypatch.setattr(client, "read_header", lambda folder, step: (folder, step))
    for step in range(1, client._RESTARTS + 2):
        assert told.next_batch(step, 1.0) == (Path("journal"), step)
        told.dies_at = ["state"]
        told.state()
        assert told.told[-1] == [f"start {step + 1} None", "state"]
    told.dies_at = ["checkpointed"] * client._RESTARTS
    with pytest.raises(RunStopped, match="ended 6 times in a row: at checkpointed"):
        told.checkpointed(1)


def test_an_update_call_is_not_repeated_after_a_crash(told: Told) -> None:
    """A restarted process does not know the state of engines that were waking up."""
    told.expect_handles(7, 3)
    for method in ("begin", "receive", "confirm", "resume"):
        told.dies_at = [method]
        assert told.update(method) == []
        assert told.told[-1] == ["start 1 None", "expect_handles 7 3"]
        assert told.update(method) == [f"of {method}"]
