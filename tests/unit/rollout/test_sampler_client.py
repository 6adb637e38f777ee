"""The sampler's process as the trainer meets it: alive, stopped, gone."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bapo_megatron.errors import RunStopped
from bapo_megatron.rollout.sampler import client, heartbeat, process
from bapo_megatron.rollout.sampler.client import SamplerClient
from bapo_megatron.rollout.sampler.heartbeat import ALIVE, with_heartbeats

SILENT_S = 5.0
WAKE_CALLS = [
    ("begin_wake", (["one"],)),
    ("receive_handles", ({"one": [b"7"]},)),
    ("confirm_weights", (["one"], 7)),
    ("finish_wake", (["one"],)),
]
"""Longer than a busy machine takes to start an interpreter."""


@pytest.fixture
def events() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def sampler(
    tmp_path: Path, events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[SamplerClient]:
    monkeypatch.setattr(client, "_SERVICE", "tests.support.mute_service")
    monkeypatch.setattr(client, "_CLOSE_S", 1.0)
    made = SamplerClient(tmp_path / "stopped", events.append, silent_s=SILENT_S)  # type: ignore[arg-type]
    yield made
    made.close()


def test_a_process_that_is_stopped_is_ended_and_started_again(
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


def test_a_long_answer_with_signs_of_life_is_waited_for(
    sampler: SamplerClient, events: list[dict[str, Any]]
) -> None:
    """7 s, where 5 s without a sign would be too long."""
    assert sampler.next_batch(1, 0.0) is None
    assert events == []


def test_a_process_that_does_not_end_is_ended(sampler: SamplerClient) -> None:
    """The stand-in stops itself when it is asked to end."""
    pid, started = sampler.state()["pid"], time.monotonic()
    sampler.close()
    assert time.monotonic() - started < 20
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_question_that_nobody_reads_is_given_up(
    sampler: SamplerClient, events: list[dict[str, Any]]
) -> None:
    """More than fits into the pipe: it is the writing that would wait for ever."""
    os.kill(sampler.state()["pid"], signal.SIGSTOP)
    sampler.start(1, {"much": "x" * 10_000_000})
    assert [event["kind"] for event in events] == ["sampler_died"]


def test_an_answer_in_the_making_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)
    ours, theirs = Pipe()

    async def slow() -> str:
        await asyncio.sleep(0.3)
        return "done"

    async def failing() -> None:
        raise ValueError("wrong")

    assert asyncio.run(with_heartbeats(theirs, slow())) == "done"
    assert ours.poll(1.0)
    assert ours.recv() == ALIVE
    with pytest.raises(ValueError, match="wrong"):
        asyncio.run(with_heartbeats(theirs, failing()))


def test_what_goes_wrong_at_the_beginning_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ended with a traceback would be started five times more."""
    ours, theirs = Pipe()

    async def fail(*_: Any) -> None:
        raise RunStopped("the journal could not be written")

    monkeypatch.setattr(process, "_open", fail)
    ours.send(("start", (1, None)))
    asyncio.run(process._serve(theirs, None))  # type: ignore[arg-type]
    assert ours.recv() == ("error", "RunStopped", "the journal could not be written", [])


class Told(SamplerClient):
    """A client of processes that note what they are told, and die at a call."""

    def __init__(self, events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[list[str]] = []
        """For each process, its calls."""
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
        return [f"of {method}"]


@pytest.fixture
def told(events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Told:
    made = Told(events, monkeypatch)
    made.start(1, None)
    return made


def test_a_new_process_is_told_that_engines_may_have_weights_of_no_folder(told: Told) -> None:
    """And that they sample, if they do. What was in a folder before is not loaded."""
    told.load_weights(Path("v0"), 0, 0)
    told.admit()
    told.release()
    told.expect_handles(7, 3)
    told.dies_at = ["state"]
    told.state()
    assert told.told[1] == ["start 1 None", "expect_handles 7 3", "state"], (
        "they are held while the policy trains"
    )
    assert told.finish_wake(["one"]) == ["of finish_wake"]
    told.admit()
    told.dies_at = ["state"]
    told.state()
    assert told.told[2] == ["start 1 None", "expect_handles 7 3", "admit", "state"]


def test_a_folder_that_came_after_handles_is_what_a_new_process_loads(told: Told) -> None:
    told.expect_handles(7, 3)
    told.load_weights(Path("v7"), 7, 3)
    told.dies_at = ["state"]
    told.state()
    assert told.told[1] == ["start 1 None", "load_weights v7 7 3", "state"]


@pytest.mark.parametrize(("method", "arguments"), WAKE_CALLS)
def test_a_wake_in_which_the_process_dies_is_not_repeated(
    told: Told, method: str, arguments: tuple[Any, ...]
) -> None:
    """The next process knows nothing of engines that are about to wake."""
    told.expect_handles(7, 3)
    told.dies_at = [method]
    assert getattr(told, method)(*arguments) == []
    assert told.told[1] == ["start 1 None", "expect_handles 7 3"]
    assert getattr(told, method)(*arguments) == [f"of {method}"]


def test_weights_by_handles_are_told_to_a_process_that_lives(told: Told) -> None:
    told.dies_at = ["expect_handles"]
    told.expect_handles(7, 3)
    assert told.told[1][0] == "start 1 None"
    assert "expect_handles 7 3" in told.told[1]
