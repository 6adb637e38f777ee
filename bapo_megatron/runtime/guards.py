"""Guards of a rank: preemption by signal or job end, a watchdog for hangs, and readable out-of-memory errors.

``PreemptionSignal`` records a request to stop. The training loop polls its ``reason`` between updates; if
there is one, the run saves and exits with code 85, and the same command continues it. ``Watchdog`` ends a
rank that makes no progress. ``naming_memory`` is a context manager that turns a failed allocation into an
error which names the rank, the memory, and settings that need less. ``death`` returns the cause of a
process's death in words.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.child_process import exit_text
from bapo_megatron.runtime.device import environment_variable
from bapo_megatron.runtime.event_kinds import OnEvent
from bapo_megatron.runtime.exit_codes import SIGNALS, handling, stop_at_once
from bapo_megatron.runtime.run_paths import JOB_END

LATE = "the job's time would end before the next update is saved"
"""Reason for a stop without a signal; slurm/lib/requeue.sh searches rank 0's log for it."""

_MARGIN_S = 60.0
"""Seconds of the job reserved for what follows the save: barriers, closing files, the requeue."""

_LAST_EVENT_S = 5.0
"""Time limit for the event of a preempted start, whose file system may hang."""


class PreemptionSignal:
    """Preemption request, recorded on any rank and seen by all at the same point of the training loop.

    Caused by a stop signal, or by a Slurm job that would end before the next save. Each rank creates one.
    ``heeding`` installs the signal handlers; ``reason`` returns the cause or None, is collective, and is
    polled wherever the run can stop; the caller saves. Until ``begun`` is called, for up to an hour, the run
    is starting and has nothing to save: a signal ends the process immediately with exit code 85.
    """

    def __init__(self) -> None:
        self._reason: str | None = None
        self._job_end = JobEnd()
        self.record: OnEvent = lambda _event: None
        """Records the event `preempted` of a start; set on rank 0 once events are open."""
        self._is_starting = False
        self._wakeups: tuple[int, int] | None = None
        """Write end of the signal pipe, and the previous wakeup descriptor."""
        self._asked_at: float | None = None
        self._longest_stretch_s = 0.0
        self._longest_save_s = 0.0

    @contextmanager
    def heeding(self) -> Iterator[None]:
        """Context manager: SIGUSR1, SIGTERM and SIGHUP request a stop, or before ``begun`` exit."""
        with handling(self._note):
            self._watch_start()
            try:
                yield
            finally:
                self.begun()

    def begun(self) -> None:
        """End the start phase: from here the loop stops the run and saves it."""
        self._is_starting = False
        if self._wakeups is not None:
            writing, before = self._wakeups
            signal.set_wakeup_fd(before)
            os.close(writing)
            self._wakeups = None

    def _watch_start(self) -> None:
        """Watch for signals in a thread, since the main one may wait in C, for another rank or a disk."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        self._wakeups = writing, signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._is_starting = True
        threading.Thread(target=self._end_start, args=(reading,), name="start-watch", daemon=True).start()

    def _end_start(self, reading: int) -> None:
        with open(reading, "rb", buffering=0) as signals:
            while number := signals.read(1):
                if self._is_starting and number[0] in SIGNALS:
                    late = threading.Timer(_LAST_EVENT_S, stop_at_once, (number[0], None))
                    late.daemon = True
                    late.start()
                    name = signal.Signals(number[0]).name
                    with suppress(Exception):  # an error must not prevent the end
                        self.record(
                            {"kind": "preempted", "reason": f"told to stop by {name} while it started"}
                        )
                    stop_at_once(number[0], None)

    def saved(self, seconds: float) -> None:
        """Record a checkpoint's duration: time for the longest so far is reserved before the job's end."""
        self._longest_save_s = max(self._longest_save_s, seconds)

    def reason(self) -> str | None:
        """Return the reason to stop now, as text, or None. Collective (all-reduce, max): one rank's request
        stops all.

        The run can stop only here, so the longest time between two calls plus a save must fit into the job.
        """
        # Not the wall clock: when it is set, a jump would count as an update for the whole run.
        asked_at = time.monotonic()
        if self._asked_at is not None:
            self._longest_stretch_s = max(self._longest_stretch_s, asked_at - self._asked_at)
        self._asked_at = asked_at
        if self._reason is None and self._is_late(time.time()):
            self._reason = LATE
        requested = torch.tensor([self._reason is not None], dtype=torch.int32)
        dist.all_reduce(requested, dist.ReduceOp.MAX)
        return (self._reason or "another rank was told to stop") if requested.item() else None

    def _is_late(self, now: float) -> bool:
        ends_at = self._job_end.time()
        if ends_at is None:
            return False
        return now + self._longest_stretch_s + self._longest_save_s + _MARGIN_S > ends_at

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._reason = f"told to stop by {signal.Signals(number).name}"


class JobEnd:
    """End of this Slurm job: ``time`` returns it in seconds since 1970; None if there is no end, and on all
    ranks but 0, whose decision to stop reaches the others. The job's script exports the time, and writes it
    to the logs when `scontrol update TimeLimit` moves it."""

    def __init__(self) -> None:
        self._given = (
            environment_variable("BAPO_END_TIME") or environment_variable("SLURM_JOB_END_TIME") or ""
        )
        logs = environment_variable("BAPO_LOGS")
        self._moved = Path(logs) / JOB_END if logs else None

    def time(self) -> float | None:
        """Return the current end; None outside a job, without a time limit, or on other ranks."""
        if (environment_variable("RANK") or "0") != "0":
            return None
        if self._moved is not None:
            with suppress(OSError, ValueError, ConfigError), self._moved.open("rb") as file:
                self._given = file.read(32).decode("ascii").partition(" ")[0]
        return float(self._given) if self._given.isdigit() and self._given != "0" else None


class Watchdog:
    """Watchdog timer: if ``beat`` does not reset it in time, it prints all threads' stacks and exits with
    code 1.

    One per rank and process, started on construction. It is a C thread (faulthandler), so it works even if
    hanging C code holds the interpreter. The loop resets it before each update, and when it polls for
    preemption, also while it waits for rollouts.
    """

    def __init__(self, minutes: float) -> None:
        """``minutes``: longest time between calls of ``beat``; 0 disables the watchdog."""
        self._limit_s = 60 * minutes
        self.beat()

    def beat(self) -> None:
        """Reset the timer: this rank makes progress."""
        if self._limit_s:
            faulthandler.dump_traceback_later(self._limit_s, exit=True, file=2)

    def close(self) -> None:
        if self._limit_s:
            faulthandler.cancel_dump_traceback_later()


_MESSAGES = ("out of memory", "allocate memory", "not enough memory", "_STATUS_ALLOC_FAILED")
"""Message texts of torch's allocators and CUDA libraries, which raise a plain RuntimeError."""

_ON_A_GPU = "a smaller batch.pack_tokens or batch.logprob_chunk_tokens, batch.recompute=full, no \
batch.hold_forwards, or more parallel.tensor, pipeline or context need less"
_ON_THE_MACHINE = (
    "fewer processes on a node, a smaller batch.pack_tokens, or no checkpoint.background, whose copy \
of what is saved is there while it is written, need less"
)


class OutOfMemoryError(Exception):
    """Raised on the rank that runs out of memory; exit code 1. The launcher ends the other ranks."""


@contextmanager
def naming_memory() -> Iterator[None]:
    """Turn a failed allocation in the block into an OutOfMemoryError with rank, host and advice."""
    try:
        yield
    except Exception as error:
        if not _is_shortage(error):
            raise
        on_gpu = isinstance(error, torch.OutOfMemoryError) or any(
            word in str(error) for word in ("CUDA", "CUBLAS")
        )
        kind, advice = ("GPU memory", _ON_A_GPU) if on_gpu else ("memory", _ON_THE_MACHINE)
        message = " ".join(str(error).split()) or type(error).__name__
        rank = environment_variable("RANK") or "0"
        raise OutOfMemoryError(
            f"rank {rank} on {socket.gethostname()} has no {kind} left; {advice}; "
            f"`bapo plan` shows what takes it: {message}"
        ) from error


def death(exit_code: int) -> str:
    """Return the cause of a process's death, in words. ``exit_code`` is negative for a signal."""
    ended = exit_text(exit_code).replace("signal", "killed by")
    if exit_code == -signal.SIGKILL:
        return f"{ended}, most likely because the machine had no memory left (dmesg says so)"
    return ended


def _is_shortage(error: Exception) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(words in str(error) for words in _MESSAGES)
