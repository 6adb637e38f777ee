"""Event sender process: tails RUN/events.jsonl, sends events to `logging.on_event` targets, detects stalls.

    python -m bapo_megatron.runtime.event_sender PID

A run's rank 0, whose process id is PID, starts it. It resumes where an earlier start's sender stopped, and so
also sends events that the job's shell wrote between two starts. As a separate process it can report a hanging
run as `stalled` and a killed one as `failed`, and a hanging target delays no step. No torch.

Standard input: the ``SenderSettings`` as a line of JSON; at the run's end, the seconds left for queued
events. If the pipe closes without that second line, the run was killed.

``read_progress`` returns a run's ``Progress``, from its metrics and the modification times of its files.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import select
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
from bapo_megatron.runtime.exit_codes import ignore_signals
from bapo_megatron.runtime.files import file_time, open_lock, write_atomically
from bapo_megatron.runtime.jsonl_log import EventLog, append_event, parse_row, rows_from_end
from bapo_megatron.runtime.run_paths import RunPaths

QUIET_S = 60.0
"""Seconds for which events of a kind are held back after a message of it, and then sent as one; and after
which a target that has refused a message is asked again."""


@dataclass
class _Waiting:
    """Event that some targets have not accepted yet."""

    event: dict[str, Any]
    """Newest event of its kind."""
    begin: int
    """Byte offset in events.jsonl of the oldest event's line."""
    counts: dict[str, int]
    """By target without it, the number of events of the kind that it stands for."""


_LEAST_S, _UNKNOWN_S = 600.0, 3600.0
_TIMES_LONGER = 3.0
_STEPS = 10


@dataclass(frozen=True)
class Progress:
    """Progress of a run, from its files."""

    at: float
    """Time of the last sign of life, seconds since 1970."""
    step: int
    longest_step_s: float | None
    """Duration of the longest of the last ten steps; None before the first."""


def read_progress(run: Path) -> Progress:
    """Return the current progress of ``run``. Signs of life are writes of steps, updates, evaluations,
    checkpoints, exports and the sampler's journal."""
    paths = RunPaths(run)
    logs = sorted(paths.journal.glob("segments-*.log"))[-1:]  # a growing file does not touch its folder
    signs = [paths.metrics, paths.updates, paths.evaluations, *logs]
    signs += [paths.journal, paths.evaluation, paths.checkpoints, paths.step_exports]
    rows = list(islice(rows_from_end(paths.metrics), _STEPS))
    times = [float(seconds) for row in rows if isinstance(seconds := row.get("time/step_s"), (int, float))]
    step = rows[0].get("step") if rows else 0
    return Progress(
        max(_status(sign, "st_mtime") for sign in signs),
        step if isinstance(step, int) else 0,
        max(times, default=None),
    )


def _key(target: str) -> str:
    """Name of a target in RUN/on_event.json, without its secrets."""
    return hashlib.sha256(target.encode()).hexdigest()[:12]


def _status(path: Path, field: str) -> Any:
    """Return a field of a file's status; 0 for a missing one."""
    try:
        return getattr(path.stat(), field)
    except OSError:
        return 0


_POLL_S = 1.0
_PROGRESS_S = 15.0
"""Longest interval between two progress checks, seconds."""
_KILLED_S = 10.0
"""How long this process outlives a killed run to send queued events, seconds."""
_BLOCK = 1 << 20


@dataclass(frozen=True)
class SenderSettings:
    """Settings of a run's event sender, a line of JSON on its standard input."""

    run_dir: str
    name: str
    targets: tuple[str, ...]
    offset: int
    """Size of events.jsonl at the start; a new target receives nothing older."""
    steps: int
    """Steps of the whole run; after the last it cannot stall."""
    evaluate_every: int
    """Steps between evaluations; 0 for none."""
    stalled_minutes: float | None
    """Stall limit; None: computed from the last steps."""

    @property
    def paths(self) -> RunPaths:
        return RunPaths(Path(self.run_dir))

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    def limit_s(self, progress: Progress) -> float:
        """Return how long the run may be silent: ``stalled_minutes``, or three times the longest of the last
        ten steps, at least ten minutes. At least an hour before the first step, which loads and compiles, and
        where an evaluation is due."""
        if progress.step >= self.steps:
            return math.inf
        if self.stalled_minutes is not None:
            return 60 * self.stalled_minutes
        evaluates = self.evaluate_every > 0 and progress.step % self.evaluate_every == 0
        is_known = progress.longest_step_s is not None and not evaluates
        least = _LEAST_S if is_known else _UNKNOWN_S
        return max(least, _TIMES_LONGER * (progress.longest_step_s or 0.0))


class EventSender:
    """Event sender of one run: ``read`` takes new events, ``deliver`` sends them to the targets,
    ``check_progress`` writes an event when the run stalls or makes progress again. Each call blocks.

    Failed sends are repeated each minute. RUN/on_event.json stores for each target the offset in events.jsonl
    up to which it has all events, so after a kill an event may be sent twice. Waiting events of one kind are
    sent as one, with their count: the queue stays short however long a target is down.
    """

    def __init__(self, order: SenderSettings) -> None:
        self._order, self._paths = order, order.paths
        self.is_awaited: Callable[[], bool] = lambda: False
        """Whether the run has ended and waits for its last events: then ``deliver`` stops, and ``finish``
        sends the rest within the run's limit; a message to a hanging target takes 20 s."""
        self._deadline: float | None = None
        """On the monotonic clock; None until the run has ended."""
        self._waiting: dict[str, _Waiting] = {}  # by kind
        self._rests_until: dict[str, float] = {}  # by kind
        self._failing: set[str] = set()
        """Targets that refused their last message."""
        stored: dict[str, int] = {}
        with suppress(OSError, ValueError, KeyError):  # without positions new targets begin at this start
            stored = json.loads(self._paths.on_event.read_text())["sent"]
        # Smaller than a position if a lost node had its last lines.
        size = _status(self._paths.events, "st_size")
        starts = {target: stored.get(_key(target), order.offset) for target in order.targets}
        self._positions = {one: start if start <= size else order.offset for one, start in starts.items()}
        self._read = min(self._positions.values())
        self._has_ended = False
        """Whether the run has reported its end; after that it only waits for its boards."""
        self._begun = file_time(self._paths.root)
        self._stalled_at: float | None = None
        minutes = order.stalled_minutes
        self.progress_every_s = _PROGRESS_S if minutes is None else min(_PROGRESS_S, 15 * minutes)
        """Interval of ``check_progress`` calls, seconds."""

    def read(self) -> None:
        """Take events written since the last call; none while the file system fails."""
        with suppress(OSError), self._paths.events.open("rb") as file:
            file.seek(self._read)
            for line in file.read().split(b"\n")[:-1]:  # a damaged line may contain a carriage return
                self._take(line, self._read)
                self._read += len(line) + 1

    def deliver(self, at_once: bool = False) -> bool:
        """Send the events that are due (``at_once``: all), oldest first, to working targets first; return
        whether any still wait."""
        now = time.monotonic()
        due = [kind for kind in self._waiting if at_once or now >= self._rests_until.get(kind, now)]
        self._rests_until |= dict.fromkeys(due, now + QUIET_S)
        for target in sorted(self._order.targets, key=self._failing.__contains__):
            for kind in due:
                if target in self._waiting[kind].counts and not self.is_awaited():
                    self._send(target, kind)
        self._waiting = {kind: one for kind, one in self._waiting.items() if one.counts}
        # After the sends: a kill in between sends an event twice but loses none.
        positions = {
            target: min(
                (one.begin for one in self._waiting.values() if target in one.counts), default=self._read
            )
            for target in self._order.targets
        }
        if positions != self._positions:
            self._positions = positions
            sent = {_key(target): position for target, position in positions.items()}
            with suppress(OSError):  # disk full: they are sent again
                write_atomically(self._paths.on_event, json.dumps({"sent": sent}) + "\n")
        return bool(self._waiting)

    def check_progress(self) -> None:
        """Write `stalled` or `progress_again` to events.jsonl when the run's state changes."""
        try:
            progress = read_progress(self._paths.root)
        except OSError:  # an NFS server is away, which this process must survive
            return
        now = file_time(self._paths.root)  # signs of progress are file times
        last = max(progress.at, self._begun)
        if self._stalled_at is None and now - last > self._order.limit_s(progress):
            self._stalled_at = last
            silent = f"no step, evaluation or rollout for {(now - last) / 60:.3g} min"
            self._note("stalled", step=progress.step, message=silent)
        elif self._stalled_at is not None and progress.at > self._stalled_at:
            silent = f"after {(progress.at - self._stalled_at) / 60:.3g} min"
            self._stalled_at = None
            self._note("progress_again", step=progress.step, message=silent)

    def finish(self, limit_s: float) -> None:
        """Send all queued events for at most ``limit_s`` seconds. The next start sends the rest."""
        self._deadline, self.is_awaited = time.monotonic() + limit_s, lambda: False
        while True:
            self.read()
            waits = self.deliver(at_once=True)
            if not waits or time.monotonic() >= self._deadline:
                return
            time.sleep(_POLL_S)

    def killed(self) -> None:
        """Write and send the event `failed` for a run that was killed without an end event."""
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
        kind = str(event.get("kind"))
        self._has_ended |= kind in ENDS and begin >= self._order.offset
        if is_sent(event):
            earlier = self._waiting.get(kind, _Waiting(event, begin, {}))
            lacking = [target for target, position in self._positions.items() if begin >= position]
            counts = earlier.counts | {target: earlier.counts.get(target, 0) + 1 for target in lacking}
            self._waiting[kind] = _Waiting(event, earlier.begin, counts)

    def _send(self, target: str, kind: str) -> None:
        order, waiting = self._order, self._waiting[kind]
        left, count = LIMIT_S, waiting.counts[target]
        if self._deadline is not None:  # a hanging target leaves the others their share
            left = min(LIMIT_S, (self._deadline - time.monotonic()) / len(order.targets))
        message = {
            "text": sent_text(order.name, waiting.event, count),
            "run": order.name,
            "run_dir": order.run_dir,
            "count": count,
            "event": waiting.event,
        }
        try:
            if left <= 0:
                raise Refused("there was no time left")
            send(target, message, self._paths.on_event_log, left)
        except Refused as refused:
            if target not in self._failing:
                print(f"{shown(target)}: {refused}", file=sys.stderr, flush=True)
                self._note("on_event_failed", target=shown(target), reason=str(refused))
            self._failing.add(target)
        else:
            self._failing.discard(target)
            del waiting.counts[target]

    def _note(self, kind: str, **fields: Any) -> None:
        with suppress(OSError):
            append_event(self._paths.events, kind, **fields)


def work(sender: EventSender, orders: IO[bytes], parent: int) -> None:
    """Send events until a line in ``orders`` ends the run, with its time limit, or the ``parent`` is gone."""
    looked, sender.is_awaited = time.monotonic(), partial(_is_readable, orders)
    while os.getppid() == parent and not _is_readable(orders, _POLL_S):
        sender.read()
        sender.deliver()
        if time.monotonic() - looked >= sender.progress_every_s:
            looked = time.monotonic()
            sender.check_progress()
    # Check the parent first: after its death a fork of it may hold the pipe open, and readline would wait.
    line = orders.readline() if os.getppid() == parent else b""
    if line:
        sender.finish(float(line))
    else:
        sender.killed()


def _is_readable(orders: IO[bytes], limit_s: float = 0.0) -> bool:
    return bool(select.select([orders], [], [], limit_s)[0])


def main(arguments: Sequence[str]) -> None:
    """Entry point; the argument is the trainer's process id."""
    ignore_signals()  # Slurm sends them to every process of a job, and this one reports the run's end
    with open(0, "rb", buffering=0) as orders:  # unbuffered, so select sees every line
        order = SenderSettings(**json.loads(orders.readline()))
        with open_lock(order.paths.on_event_lock) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a killed run's sender may still be active
            work(EventSender(order), orders, int(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
