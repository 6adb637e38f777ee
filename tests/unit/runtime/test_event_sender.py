"""The process that sends events: where it continues, what it says of a run that hangs or is killed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.runtime import event_sender
from bapo_megatron.runtime.event_sender import EventSender, Progress, SenderSettings, read_progress
from bapo_megatron.runtime.event_targets import Refused
from bapo_megatron.runtime.jsonl_log import EventLog, read_jsonl
from tests.support.waiting import until
from tests.support.webhook import Webhook

DEADLINE_S = 300.0


@pytest.fixture
def hook() -> Iterator[Webhook]:
    hook = Webhook()
    yield hook
    hook.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    (tmp_path / "journal").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/step_s": 2.0}\n')
    return tmp_path


def order(run: Path, *targets: str, **changes: Any) -> SenderSettings:
    return replace(SenderSettings(str(run), "r", targets, 0, 9, 0, None), **changes)


def written(run: Path, *kinds: str) -> None:
    log = EventLog(run / "events.jsonl")
    for number, kind in enumerate(kinds, 1):
        log.event(kind, step=number)
    log.close()


def passed(sender: EventSender) -> None:
    sender.read()
    sender.deliver()


def test_events_are_sent_once_over_all_starts(run: Path, hook: Webhook) -> None:
    """Also those that a job's shell writes between two starts. Usual events are not sent."""
    written(run, "start", "engine_ready", "checkpoint", "preempted")
    passed(EventSender(order(run, hook.url)))
    written(run, "job_requeue")
    passed(EventSender(order(run, hook.url, offset=10**6)))
    assert hook.kinds() == ["start", "preempted", "job_requeue"]
    assert hook.messages[0]["text"] == "r: start (step 1)"
    assert hook.messages[0]["run_dir"] == str(run)


def test_a_target_that_is_new_gets_no_old_events(run: Path, hook: Webhook) -> None:
    written(run, "start", "done")
    size = (run / "events.jsonl").stat().st_size
    written(run, "resume")
    passed(EventSender(order(run, "true", hook.url, offset=size)))
    assert hook.kinds() == ["resume"]


def test_undelivered_events_are_sent_by_the_next_start(run: Path, hook: Webhook) -> None:
    """The target beside it gets them once. The failure is an event, once, which is not sent."""
    hook.answer = 503
    log = run / "taken"
    tee = f"""sh -c 'echo "$BAPO_EVENT" >> {log}'"""
    written(run, "start")
    sender = EventSender(order(run, hook.url, tee))
    passed(sender)
    written(run, "engine_lost")
    passed(sender)
    assert log.read_text().split() == ["start", "engine_lost"]
    hook.answer = 200
    hook.messages.clear()
    passed(EventSender(order(run, hook.url, tee, offset=size(run))))
    assert hook.kinds() == ["start", "engine_lost"]
    assert log.read_text().split() == ["start", "engine_lost"]
    failures = [row for row in read_jsonl(run / "events.jsonl") if row["kind"] == "on_event_failed"]
    assert [row["reason"] for row in failures] == ["HTTP 503 Service Unavailable"]
    assert "S3CRET" not in (run / "events.jsonl").read_text() + (run / "on_event.json").read_text()


def test_positions_of_an_earlier_version_are_read(run: Path, hook: Webhook) -> None:
    written(run, "start")
    size = (run / "events.jsonl").stat().st_size
    written(run, "job_requeue")
    (run / "on_event.json").write_text(
        json.dumps(
            {"sent": {"9f86d081884c": 10 * size, hashlib.sha256(hook.url.encode()).hexdigest()[:12]: size}}
        )
    )
    passed(EventSender(order(run, hook.url, offset=10**6)))
    assert hook.kinds() == ["job_requeue"]


class Targets:
    """Targets that take messages, of which some are dead; and a clock."""

    def __init__(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dead: set[str] = set()
        self.refused_kind = ""
        self.taken: list[tuple[str, str, int, int]] = []
        """Target, kind, step and count of each message."""
        self.now, self.tried = 1000.0, 0
        self.run, self.sender = run, EventSender(order(run, "a", "b"))
        monkeypatch.setattr(event_sender, "send", self._send)
        monkeypatch.setattr(event_sender.time, "monotonic", lambda: self.now)

    def _send(self, target: str, message: dict[str, Any], *_: object) -> None:
        self.tried += 1
        event = message["event"]
        if target in self.dead or event["kind"] == self.refused_kind:
            raise Refused("dead")
        self.taken.append((target, event["kind"], event["step"], message["count"]))

    def passed(self, *kinds: str) -> list[tuple[str, str, int, int]]:
        """Write events of these kinds, with their places as steps; return what the targets get then."""
        written(self.run, *kinds)
        self.taken.clear()
        self.sender.read()
        self.sender.deliver()
        return self.taken.copy()

    def stored(self) -> int:
        """The position from which the next start reads."""
        file = self.run / "on_event.json"
        return min(json.loads(file.read_text())["sent"].values()) if file.exists() else 0


@pytest.fixture
def targets(run: Path, monkeypatch: pytest.MonkeyPatch) -> Targets:
    return Targets(run, monkeypatch)


def size(run: Path) -> int:
    return (run / "events.jsonl").stat().st_size


def test_events_of_a_kind_are_sent_at_once_then_together(targets: Targets) -> None:
    first = [("a", "engine_lost", 1, 1), ("b", "engine_lost", 1, 1)]
    assert targets.passed("engine_lost") == first
    before = size(targets.run)
    assert targets.stored() == before
    targets.now += event_sender.QUIET_S - 1
    assert targets.passed(*["engine_lost"] * 3, "engine_gap")[0] == ("a", "engine_gap", 4, 1)
    assert targets.stored() == before  # before the oldest that waits
    targets.now += 1
    assert targets.passed() == [("a", "engine_lost", 3, 3), ("b", "engine_lost", 3, 3)]
    assert targets.stored() == size(targets.run)
    targets.passed("engine_lost")
    assert targets.taken == []
    targets.sender.deliver(at_once=True)  # the end of a run does not wait
    assert targets.taken == first


def test_a_dead_target_is_asked_again_each_minute_and_reported_once(targets: Targets) -> None:
    targets.dead = {"a"}
    assert targets.passed("engine_lost") == [("b", "engine_lost", 1, 1)]
    for _ in range(8):
        targets.now += 30.0
        assert targets.passed() == []
    assert targets.tried == 2 + 4
    targets.now += 60.0
    assert targets.passed("done", "engine_lost") == [("b", "engine_lost", 2, 1), ("b", "done", 1, 1)]
    assert targets.stored() == 0
    targets.dead.clear()
    targets.now += 60.0
    assert targets.passed() == [("a", "engine_lost", 2, 2), ("a", "done", 1, 1)]
    assert targets.stored() == size(targets.run)
    targets.dead, targets.now = {"a"}, targets.now + 60.0  # it had worked in between
    targets.passed("engine_lost")
    told = [row["kind"] for row in read_jsonl(targets.run / "events.jsonl")]
    assert told.count("on_event_failed") == 2


def test_a_refused_message_does_not_block_others(targets: Targets) -> None:
    targets.refused_kind = "engine_lost"
    assert targets.passed("engine_lost", "done") == [("a", "done", 2, 1), ("b", "done", 2, 1)]
    assert targets.stored() == 0


def test_a_torn_line_is_read_once_it_is_complete_and_damaged_ones_are_passed_over(
    run: Path, hook: Webhook
) -> None:
    sender = EventSender(order(run, hook.url))
    with (run / "events.jsonl").open("a") as file:
        file.write('{"kind": "do')
        file.flush()
        passed(sender)
        file.write('ne", "step": 9}\nno json\n[1]\nx\ry\n{"kind": "start",\r"step": 1}\n')
    for _ in range(6):  # what follows a carriage return is not sent again and again
        passed(sender)
    written(run, "resume")
    passed(sender)
    assert hook.kinds() == ["done", "start", "resume"]
    (run / "on_event.json").write_text("")  # as of another hand: the sender starts
    EventSender(order(run, hook.url))


def test_a_log_that_lost_its_end_is_read_from_there(run: Path, hook: Webhook) -> None:
    """As after the loss of a node: the position is on disk, the last lines are not."""
    written(run, "start", "engine_lost")
    passed(EventSender(order(run, hook.url, offset=0)))
    (run / "events.jsonl").write_text("")
    sender = EventSender(order(run, hook.url, offset=0))
    written(run, "resume")
    passed(sender)
    assert hook.kinds() == ["start", "engine_lost", "resume"]


@pytest.mark.parametrize(
    ("step", "longest_s", "every", "minutes", "limit_s"),
    [
        (5, 100.0, 0, None, 600.0),  # three times 100 s is less than ten minutes
        (5, 1000.0, 4, None, 3000.0),
        (0, None, 0, None, 3600.0),
        (5, 100.0, 5, None, 3600.0),  # an evaluation is due
        (5, 1000.0, 5, 2.0, 120.0),
        (9, 1000.0, 5, 2.0, math.inf),  # the last step
    ],
)
def test_stall_limit_of_a_run(
    step: int, longest_s: float | None, every: int, minutes: float | None, limit_s: float
) -> None:
    asked = order(Path("run"), evaluate_every=every, stalled_minutes=minutes)
    assert asked.limit_s(Progress(1000.0, step, longest_s)) == limit_s


def test_signs_of_life_are_steps_and_what_the_sampler_writes(run: Path) -> None:
    rows = [{"step": step, "time/step_s": 10.0 * step} for step in range(1, 31)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"step": 31}]))
    for name in ("journal/segments-000001.log", "journal/segments-000002.log"):
        (run / name).touch()
    for path, age_s in (("metrics.jsonl", 50), ("journal", 40), ("journal/segments-000002.log", 30)):
        os.utime(run / path, (1e6 - age_s, 1e6 - age_s))
    assert read_progress(run) == Progress(at=1e6 - 30, step=31, longest_step_s=300.0)
    os.utime(run / "metrics.jsonl", (1e6 - 20, 1e6 - 20))
    assert read_progress(run).at == 1e6 - 20
    assert read_progress(run / "nothing") == Progress(at=0.0, step=0, longest_step_s=None)


def test_a_stall_is_one_by_the_clock_of_the_files(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server an hour off would have a run stall for ever, or never."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600.0)
    sender = EventSender(order(run, "true"))
    assert abs(sender._begun - now) < DEADLINE_S
    sender._begun = 0.0
    for seconds, events in ((100.0, 0), (2000.0, 1)):
        for path in (run / "metrics.jsonl", run / "journal"):
            os.utime(path, (now - seconds, now - seconds))
        sender.check_progress()
        log = run / "events.jsonl"
        assert len(read_jsonl(log) if log.exists() else []) == events, seconds


def test_a_target_that_hangs_leaves_the_others_time_at_the_end(run: Path, hook: Webhook) -> None:
    """The first one never answers: a part of the time that is left is for the second."""
    hanging = Webhook("drip")
    sender = EventSender(order(run, hanging.url, hook.url))
    written(run, "preempted")
    sender.finish(6.0)
    hanging.close()
    assert hook.kinds() == ["preempted"]


def test_the_end_of_a_run_is_told_before_a_hanging_target_is_tried_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes 20 s for each kind of event, and the run does not wait so long."""
    reading, writing = os.pipe()
    tried: list[str] = []

    def send(target: str, message: dict[str, Any], *_: object) -> None:
        tried.append(f"{target} {message['event']['kind']}")
        if target == "hangs":
            if len(tried) == 1:
                os.write(writing, b"1\n")  # the run ends meanwhile
            raise Refused("no answer within 20 s")

    monkeypatch.setattr(event_sender, "send", send)
    written(run, "start", "stalled", "done")
    with open(reading, "rb", buffering=0) as orders:
        event_sender.work(EventSender(order(run, "hangs", "works")), orders, os.getppid())
    os.close(writing)
    assert tried[:4] == ["hangs start", "works start", "works stalled", "works done"]


def test_a_run_that_has_told_its_end_is_not_told_as_killed(run: Path, hook: Webhook) -> None:
    """It may be killed while it waits for its boards. The end of an earlier start does not count."""
    written(run, "done")
    sender = EventSender(order(run, hook.url, offset=(run / "events.jsonl").stat().st_size))
    written(run, "resume", "preempted")
    sender.killed()
    assert hook.kinds() == ["resume", "preempted"]
    (run / "on_event.json").write_text(
        json.dumps({"sent": {event_sender._key(hook.url): 0}})
    )  # what the earlier start has not sent is told, too
    sender = EventSender(order(run, hook.url, offset=(run / "events.jsonl").stat().st_size))
    sender.killed()
    assert hook.kinds()[2:] == ["done", "resume", "preempted", "failed"]


# --- the process ----------------------------------------------------------------------------------

PARENT = """
import os, subprocess, sys, time
sender = subprocess.Popen(
    [sys.executable, "-m", "bapo_megatron.runtime.event_sender", str(os.getpid())], stdin=subprocess.PIPE
)
sender.stdin.write(sys.argv[1].encode())
sender.stdin.flush()
print(sender.pid, flush=True)
sys.stdin.readline()
print(sender.communicate(b"60\\n")[0], sender.returncode, flush=True)
"""


def parent_and_sender(asked: SenderSettings) -> tuple[subprocess.Popen[str], int]:
    """A process that stands for a trainer, whose end is a line on its standard input; and its sender's id."""
    command = [sys.executable, "-c", PARENT, asked.line().decode()]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    return process, int(process.stdout.readline())


def wait_for(hook: Webhook, *kinds: str) -> None:
    until(lambda: hook.kinds() == list(kinds), hook.kinds)


@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGUSR1])
def test_all_events_of_a_run_are_sent_though_a_signal_comes_to_all_processes_of_its_job(
    run: Path, hook: Webhook, number: signal.Signals | None
) -> None:
    """A preempted job is one: what comes of it is still to be told."""
    written(run, "start")
    process, sender = parent_and_sender(order(run, hook.url))
    wait_for(hook, "start")
    if number:
        os.kill(sender, number)
    written(run, "engine_lost", "preempted")
    output, _ = process.communicate("the end\n", timeout=DEADLINE_S)
    assert output.split() == ["None", "0"]
    assert hook.kinds() == ["start", "engine_lost", "preempted"]


def test_a_killed_run_is_reported_as_failed(run: Path, hook: Webhook) -> None:
    """Half a line, which the kill left, is cut off. The next sender begins after this one."""
    written(run, "start")
    process, _ = parent_and_sender(order(run, hook.url))
    wait_for(hook, "start")
    with (run / "events.jsonl").open("a") as file:
        file.write('{"kind": "check')
    process.send_signal(signal.SIGKILL)
    process.wait(DEADLINE_S)
    again, _ = parent_and_sender(order(run, hook.url))
    wait_for(hook, "start", "failed")
    again.communicate("the end\n", timeout=DEADLINE_S)
    assert hook.kinds() == ["start", "failed"]
    assert [row["kind"] for row in read_jsonl(run / "events.jsonl")] == ["start", "failed"]
    assert "killed, out of memory, or a hang" in hook.messages[-1]["text"]
