"""Runner of a study's arms: several at a time, resumable; a failed arm ends no other."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Protocol

from bapo_megatron.errors import Preempted
from bapo_megatron.runtime.child_process import exit_text
from benchmarks.study.plan import Arm

_POLL_S = 0.2
_SAVING_S = 120.0
"""Longest wait for arms that are preempted: they save first."""
_LOG_BYTES = 2000
_INTERRUPTED = 85


class Process(Protocol):
    """The process of an arm, as the runner sees it."""

    def code(self) -> int | None:
        """The exit code; None while it lives."""

    def tell(self, number: signal.Signals) -> None:
        """Send the process a signal, if it lives."""


@dataclass(frozen=True)
class Failure:
    """An arm that ended without its result, with the reason."""

    arm: Arm
    reason: str


def run_arms(
    arms: Sequence[Arm], start: Callable[[Arm], Process], parallel: int, say: Callable[[str], None]
) -> list[Failure]:
    """Run all arms that are not done, ``parallel`` at a time, in order. Returns those that have failed.

    An arm that was cut continues from its run directory, as any run does; one that is done keeps its logs,
    and no weights. On SIGTERM, SIGUSR1 or Ctrl-C:
    Preempted, after the arms have saved.
    """
    bench = _Bench([arm for arm in arms if not arm.is_done()], len(arms), start, parallel, say)
    with _stop_signals() as told:
        try:
            while bench.waiting or bench.at_work:
                if told:
                    raise Preempted("the study was told to stop; its arms are saved")
                bench.fill()
                bench.collect()
                time.sleep(_POLL_S)
        finally:
            _end([process for process, _ in bench.at_work.values()])
    return bench.failures


class _Bench:
    """Queue of arms: waiting, running, and failed ones."""

    def __init__(
        self,
        waiting: list[Arm],
        total: int,
        start: Callable[[Arm], Process],
        parallel: int,
        say: Callable[[str], None],
    ) -> None:
        self.waiting, self.failures = waiting, list[Failure]()
        self.at_work: dict[Arm, tuple[Process, float]] = {}
        """With the time of its start."""
        self._total, self._start, self._parallel, self._say = total, start, parallel, say
        self._clock = Clock(sum(arm.work for arm in waiting), parallel)
        say(f"{total} arms, {total - len(waiting)} of them done")

    def fill(self) -> None:
        """Start as many as may work at a time."""
        while self.waiting and len(self.at_work) < self._parallel:
            arm = self.waiting.pop(0)
            arm.run_dir.parent.mkdir(parents=True, exist_ok=True)
            self.at_work[arm] = self._start(arm), time.monotonic()

    def collect(self) -> None:
        """Take note of those that have ended."""
        codes = {arm: process.code() for arm, (process, _) in self.at_work.items()}
        for arm, code in [(arm, code) for arm, code in codes.items() if code is not None]:
            _, began = self.at_work.pop(arm)
            seconds = time.monotonic() - began
            self._clock.ended(arm.work, seconds)
            outcome = f"done in {_span(seconds)}"
            if failure := _failure(arm, code):
                self.failures.append(failure)
                outcome = f"failed, {failure.reason}"
            else:
                arm.delete_weights()
            left = len(self.waiting) + len(self.at_work)
            rest = f"; about {_span(self._clock.left_s())} left" if left else ""
            self._say(f"{self._total - left}/{self._total} {arm.name} {outcome}{rest}")


class Clock:
    """ETA estimator: the time left, from the mean time of a unit of work so far."""

    def __init__(self, work: float, parallel: int) -> None:
        self._left, self._parallel = work, parallel
        self._spent = self._spent_s = 0.0

    def ended(self, work: float, seconds: float) -> None:
        """Record that a piece of work took so long."""
        self._left -= work
        self._spent += work
        self._spent_s += seconds

    def left_s(self) -> float:
        """Seconds until the end, if all that is left goes as what was before; something must have ended."""
        return self._left * self._spent_s / self._spent / self._parallel


def _failure(arm: Arm, code: int) -> Failure | None:
    if code == 0 and arm.is_done():
        return None
    return Failure(arm, f"{_end_of(arm, code)}{_last_log_line(arm)}")


def _end_of(arm: Arm, code: int) -> str:
    """How the arm's process ended, in words."""
    if code != -signal.SIGKILL:
        return exit_text(code)
    needs = f"it needs {arm.memory}: " if arm.memory else ""
    return (
        "killed by signal 9, which is most often the kernel's out-of-memory killer "
        f"({needs}fewer arms at a time, --parallel, need less)"
    )


def log_of(arm: Arm) -> str:
    """The path of an arm's log, beside its run directory."""
    return f"{arm.run_dir}.log"


def _last_log_line(arm: Arm) -> str:
    """The last non-empty line of the arm's log."""
    try:
        with open(log_of(arm), "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _LOG_BYTES))
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return f": {lines[-1].strip()}" if lines else ""


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Stop signals that have arrived, as a list; their handlers are installed within the block."""
    heard: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        heard.append(number)

    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(processes: Sequence[Process]) -> None:
    """Ask running arms to save and stop; kill those that do not in time."""
    for process in processes:
        process.tell(signal.SIGTERM)
    deadline = time.monotonic() + _SAVING_S
    while any(process.code() is None for process in processes):
        if time.monotonic() > deadline:
            for process in processes:
                process.tell(signal.SIGKILL)
        time.sleep(_POLL_S)


def _span(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
