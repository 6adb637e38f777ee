"""Event sender process: tails RUN/events.jsonl and sends events to the targets of `logging.on_event`; stalls.

    python -m bapo_megatron.runtime.event_sender PID

Rank 0 starts it (``trainer/records/recorder.py``). It resumes where the process before it stopped, so it also
sends the events that the job's shell wrote between two starts. It is a process of its own: it reports a run
that hangs as `stalled` and a killed one as `failed`, and a target that hangs delays no step. Each target has
an outbox, in which events queue, with retries and backoff, until it takes them. No torch.

Standard input: the ``SenderSettings`` as a line of JSON; then, when the run has ended, the seconds that its
queued events may take. If the pipe closes without that line, the run was killed.

Whether a run makes progress follows from the modification times of its files (``read_progress``), also for
`bapo status` in another process.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

from bapo_megatron.errors import RunStopped
from bapo_megatron.runtime.event_kinds import ENDS, is_sent, sent_text
from bapo_megatron.runtime.event_targets import LIMIT_S, Refused, send, shown
from bapo_megatron.runtime.files import file_time, open_lock, write_atomically
from bapo_megatron.runtime.jsonl_log import EventLog, append_event, parse_row, rows_from_end
from bapo_megatron.runtime.run_paths import RunPaths

QUIET_S = 60.0
"""Rate limit: for so many seconds after a message, events of its kind are held, and then sent as one."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0

Send = Callable[[dict[str, Any], int], None]
"""Sends an event and the number of events of its kind that it stands for; Refused if it is not taken."""


@dataclass
class _Queued:
    event: dict[str, Any]
    """The newest."""
    begin: int
    """Byte offset in events.jsonl of the oldest one's line."""
    count: int = 1


class Outbox:
    """Queue of events for one target, at most one message of each kind, however long the target is down.

    ``deliver`` is called again and again, and blocks while it sends; a failed send stays queued, and is due
    after 5 s, then twice as long each time, at most 300 s.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._queued: dict[str, _Queued] = {}
        self._not_before: dict[str, float] = {}
        self._failures: dict[str, int] = {}

    def add(self, event: dict[str, Any], begin: int) -> None:
        """Queue an event, whose line begins at the byte ``begin`` of events.jsonl."""
        kind = str(event["kind"])
        if queued := self._queued.get(kind):
            queued.event, queued.count = event, queued.count + 1
        else:
            self._queued[kind] = _Queued(event, begin)

    def position(self, read: int) -> int:
        """Resume offset in events.jsonl, read up to ``read``: before the oldest queued event."""
        return min((queued.begin for queued in self._queued.values()), default=read)

    def is_empty(self) -> bool:
        return not self._queued

    def is_failing(self) -> bool:
        """Whether the target has refused something that still waits."""
        return bool(self._failures)

    def deliver(self, now: float, at_once: bool = False) -> str | None:
        """Send the events that are due, oldest first; ``at_once``: all of them. Blocks while it sends.

        Returns the reason of a failure, if it is the first since a success; a failed send raises nothing.
        """
        was_failing, reason = any(self._failures.values()), None
        for kind, queued in sorted(self._queued.items(), key=lambda item: item[1].begin):
            if not at_once and now < self._not_before.get(kind, now):
                continue
            try:
                self._send(queued.event, queued.count)
            except Refused as refused:
                failures = self._failures[kind] = self._failures.get(kind, 0) + 1
                self._not_before[kind] = now + min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (failures - 1))
                reason = reason or str(refused)
                continue
            del self._queued[kind]
            self._failures.pop(kind, None)
            self._not_before[kind] = now + QUIET_S
        return None if was_failing else reason


_LEAST_S, _UNKNOWN_S = 600.0, 3600.0
_TIMES_LONGER = 3.0
_STEPS = 10


@dataclass(frozen=True)
class Patience:
    """Stall limit of a run, as plain data from its configuration: the longest silence that is not a stall."""

    steps: int
    """Steps of the whole run. After the last one there is no limit."""
    evaluate_every: int
    """Steps between evaluations; 0 for none. One may take an hour."""
    stalled_minutes: float | None
    """The limit. None: three times the longest of the last ten steps, and at least ten minutes; an hour
    before the first step, which loads and compiles."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run, as plain data: its last sign of life, in seconds since 1970, and its step times."""

    at: float
    step: int
    longest_step_s: float | None

    def silent_s(self, begun: float, now: float) -> float:
        """Seconds since the last sign of life, or the start at ``begun``; all by the clock of the files."""
        return now - max(self.at, begun)

    def is_stalled(self, patience: Patience, begun: float, now: float) -> bool:
        """Whether the run has been silent for longer than its limit."""
        return self.step < patience.steps and self.silent_s(begun, now) > self._limit_s(patience)

    def _limit_s(self, patience: Patience) -> float:
        if patience.stalled_minutes is not None:
            return 60 * patience.stalled_minutes
        if self.longest_step_s is None:
            return _UNKNOWN_S
        limit_s = max(_LEAST_S, _TIMES_LONGER * self.longest_step_s)
        evaluates = patience.evaluate_every > 0 and self.step % patience.evaluate_every == 0
        return max(limit_s, _UNKNOWN_S) if evaluates else limit_s


def read_progress(run: Path) -> Progress:
    """The progress of the run in the directory ``run``, now.

    Signs of life are writes of steps, updates, evaluations, checkpoints, exports and the sampler's journal.
    """
    paths = RunPaths(run)
    logs = sorted(paths.journal.glob("segments-*.log"))[-1:]  # a growing file does not touch its folder
    signs = [paths.metrics, paths.updates, paths.evaluations, *logs]
    signs += [paths.journal, paths.evaluation, paths.checkpoints, paths.step_exports]
    rows = list(islice(rows_from_end(paths.metrics), _STEPS))
    times = [float(seconds) for row in rows if isinstance(seconds := row.get("time/step_s"), (int, float))]
    step = rows[0].get("step") if rows else 0
    return Progress(max(map(_time, signs)), step if isinstance(step, int) else 0, max(times, default=None))


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


_POLL_S = 1.0
_PROGRESS_S = 15.0
"""Seconds between two checks of the run's progress, at most."""
_KILLED_S = 10.0
"""Seconds for queued events after the run was killed: so long this process outlives it."""
_BLOCK = 1 << 20

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Slurm gives these to every process of a job, whatever its session: they are for the run, whose end this
process is to tell."""


@dataclass(frozen=True)
class SenderSettings:
    """Settings of a run's event sender, plain data that the run sends to it as a line of JSON."""

    run_dir: str
    name: str
    targets: tuple[str, ...]
    offset: int
    """Size of events.jsonl at the start: a new target is sent nothing older."""
    steps: int
    evaluate_every: int
    stalled_minutes: float | None

    @property
    def paths(self) -> RunPaths:
        return RunPaths(Path(self.run_dir))

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


class EventSender:
    """Event sender of one run, in its own process: queues and sends events to each target, detects stalls.

    ``work`` calls its methods in turn, each blocking. A failed send is repeated. RUN/on_event.json keeps how
    far each target is: after a kill an event may be sent twice. Events of one kind that wait are sent as one,
    with their count.
    """

    def __init__(self, order: SenderSettings) -> None:
        self._order, self._paths = order, order.paths
        self._deadline: float | None = None
        """On the monotonic clock; None until the run has ended."""
        self._keys = [hashlib.sha256(target.encode()).hexdigest()[:12] for target in order.targets]
        self._boxes = [Outbox(partial(self._send, target)) for target in order.targets]
        stored = _stored_positions(self._paths.on_event)
        self._positions = [stored.get(key, order.offset) for key in self._keys]
        self._read = min(self._positions)
        self._has_ended = False
        """Whether the run has told its end: what follows is the wait for its boards."""
        self._begun = file_time(self._paths.root)
        self._stalled_at: float | None = None
        minutes = order.stalled_minutes
        self.progress_every_s = _PROGRESS_S if minutes is None else min(_PROGRESS_S, 15 * minutes)
        """Seconds between two calls of ``check_progress``."""

    def read(self) -> None:
        """Queue the events that were written since the last call; none while the file system fails."""
        with suppress(OSError), self._paths.events.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._read:
                self._read, self._positions = 0, [0 for _ in self._positions]  # shorter: another file
            file.seek(self._read)
            block = file.read(_BLOCK)
            if b"\n" not in block and len(block) == _BLOCK:
                self._read += len(block)  # a line longer than any event
            for line in block.split(b"\n")[:-1]:  # a damaged line may hold a carriage return
                self._take(line, self._read)
                self._read += len(line) + 1

    def deliver(self, at_once: bool = False) -> bool:
        """Send the events that are due, and store each target's resume offset; whether some are queued."""
        pairs = zip(self._order.targets, self._boxes, strict=True)
        for target, box in sorted(pairs, key=lambda pair: pair[1].is_failing()):  # those that work first
            if reason := box.deliver(time.monotonic(), at_once):
                print(f"{shown(target)}: {reason}", file=sys.stderr, flush=True)
                self._note("on_event_failed", target=shown(target), reason=reason)
        # After the sends, never before: a kill between them sends an event twice, and loses none.
        positions = [box.position(self._read) for box in self._boxes]
        if positions != self._positions:
            self._positions = positions
            sent = dict(zip(self._keys, positions, strict=True))
            with suppress(OSError):  # a full disk: they are sent again
                write_atomically(self._paths.on_event, json.dumps({"sent": sent}) + "\n")
        return not all(box.is_empty() for box in self._boxes)

    def check_progress(self) -> None:
        """Stall check: write the event `stalled` or `progress_again` when the state of the run changes."""
        order = self._order
        try:
            progress = read_progress(self._paths.root)
        except OSError:  # a server of NFS that is away: this process is to tell what comes of it
            return
        now = file_time(self._paths.root)  # the signs of progress are times of files
        patience = Patience(order.steps, order.evaluate_every, order.stalled_minutes)
        last = now - progress.silent_s(self._begun, now)
        if self._stalled_at is None and progress.is_stalled(patience, self._begun, now):
            self._stalled_at = last
            silent = f"no step, evaluation or rollout for {(now - last) / 60:.3g} min"
            self._note("stalled", step=progress.step, message=silent)
        elif self._stalled_at is not None and progress.at > self._stalled_at:
            silent = f"after {(progress.at - self._stalled_at) / 60:.3g} min"
            self._stalled_at = None
            self._note("progress_again", step=progress.step, message=silent)

    def finish(self, limit_s: float) -> None:
        """Send all queued events, for at most ``limit_s`` seconds. The next start sends the rest."""
        self._deadline = time.monotonic() + limit_s
        while True:
            self.read()
            waits = self.deliver(at_once=True)
            if not waits or time.monotonic() >= self._deadline:
                return
            time.sleep(_POLL_S)

    def killed(self) -> None:
        """Write the event `failed` in place of a run that was killed without an end event, and send it."""
        self.read()
        if not self._has_ended:
            with suppress(OSError, RunStopped):
                message = "the run's process has ended without an event: killed, out of memory, or a hang"
                EventLog(self._paths.events).event("failed", message=message)
        self.finish(_KILLED_S)

    def _take(self, line: bytes, begin: int) -> None:
        try:
            event = parse_row(line)
        except ValueError:
            return
        self._has_ended |= event.get("kind") in ENDS and begin >= self._order.offset
        if is_sent(event):
            for box, position in zip(self._boxes, self._positions, strict=True):
                if begin >= position:
                    box.add(event, begin)

    def _send(self, target: str, event: dict[str, Any], count: int) -> None:
        order = self._order
        left = LIMIT_S
        if self._deadline is not None:  # of what is left, a target that hangs leaves the others a share
            left = min(LIMIT_S, (self._deadline - time.monotonic()) / len(order.targets))
        if left <= 0:
            raise Refused("there was no time left")
        message = {
            "text": sent_text(order.name, event, count),
            "run": order.name,
            "run_dir": order.run_dir,
            "count": count,
            "event": event,
        }
        send(target, message, self._paths.on_event_log, left)

    def _note(self, kind: str, **fields: Any) -> None:
        with suppress(OSError):
            append_event(self._paths.events, kind, **fields)


def work(sender: EventSender, orders: IO[bytes], parent: int) -> None:
    """Main loop: send events until ``orders`` has the time limit of the end, or the ``parent`` is gone."""
    looked = time.monotonic()
    while os.getppid() == parent and not select.select([orders], [], [], _POLL_S)[0]:
        sender.read()
        sender.deliver()
        if time.monotonic() - looked >= sender.progress_every_s:
            looked = time.monotonic()
            sender.check_progress()
    # The parent is asked first: after its death a fork of it may hold the pipe open, and readline would wait.
    line = orders.readline() if os.getppid() == parent else b""
    if line:
        sender.finish(float(line))
    else:
        sender.killed()


def _stored_positions(path: Path) -> dict[str, int]:
    try:
        sent = json.loads(path.read_text())["sent"]
        return {str(key): int(value) for key, value in sent.items()}
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return {}


def main(arguments: Sequence[str]) -> None:
    """Entry point: the process id of the trainer."""
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)  # a handler, unlike SIG_IGN, is not inherited by commands
    with open(0, "rb", buffering=0) as orders:  # so that no line hides in a buffer from select
        order = SenderSettings(**json.loads(orders.readline()))
        with open_lock(order.paths.on_event_lock) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the sender of a killed run may still be sending
            work(EventSender(order), orders, int(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
