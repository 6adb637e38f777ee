"""The trainer's client of the sampler process: RPC through a pipe, restart of a process that dies or hangs.

On rank 0; the other end is ``process.py``.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bapo_megatron.errors import ConfigError, RunStopped, StorageFailed
from bapo_megatron.interfaces import Need
from bapo_megatron.rollout.sampler.process import ALIVE, WAKE_CALLS, Setup
from bapo_megatron.rollout.sampler.step_batches import read_header
from bapo_megatron.runtime.exit_codes import holding_signals
from bapo_megatron.runtime.guards import death
from bapo_megatron.types import StepHeader

_RESTARTS = 5
"""Most restarts in a row without a batch between them (crash loop); the next death ends the run."""

_SILENT_S = 300.0
"""Longest time without a heartbeat during a call; then the process is killed. Its event loop sends
heartbeats every few seconds, also during weight loads and long requests."""

_END_S = 60.0
"""Longest wait for a killed process. One that is blocked in a hanging file system cannot be killed."""

_WAITS = 20
"""Number of waits that make up the timeout of a ``HeartbeatWatchdog``."""

_CLOSE_S = 30.0
"""Longest wait for a process that is asked to close."""

_SERVICE = "bapo_megatron.rollout.sampler.process"

_ERRORS: dict[str, type[Exception]] = {"ConfigError": ConfigError, "FailingDiskError": StorageFailed}
"""Exception types by the names that the process sends; any other becomes a RunStopped."""

Event = Callable[[dict[str, Any]], None]
"""A callback for events: a kind and its fields."""


class SamplerDied(Exception):
    """The sampler's process has ended during a call. Only futures of ``submit`` raise it."""


class SamplerClient:
    """The ``Sampler`` of the trainer: blocking calls to the sampler's process, which is restarted if it dies.

    The call is then repeated, but for the wake-up calls of colocated engines, which name no engine then, and
    ``submit``, whose future fails. RunStopped in a crash loop, StorageFailed if the process cannot be killed;
    errors that it reports are raised here, as these or as ConfigError.
    """

    def __init__(self, setup: Setup, on_event: Event, silent_s: float = _SILENT_S) -> None:
        """Start the process. ``silent_s``: longest time without a heartbeat during a call."""
        self._setup, self._on_event, self._silent_s = setup, on_event, silent_s
        self._start_arguments: tuple[int, dict[str, Any] | None] = (1, None)
        """The arguments of ``start`` for a restarted process."""
        self._weights: tuple[Path, int, int] | None = None
        self._ipc_weights: tuple[int, int] | None = None
        """The version and step of weights that colocated engines get by memory handles; None for a folder."""
        self._is_admitted = False
        """Whether colocated engines may sample: a restarted process holds them until it is told."""
        self._deaths = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sampler")  # one call at a time
        self._is_set_up = False
        self._process, self._pipe = self._launch()

    def start(self, first_step: int, state: dict[str, Any] | None) -> None:
        """Start sampling for ``first_step``. ``state``: the sampler's part of the checkpoint before it."""
        self._start_arguments = (first_step, state)
        self._call("start", first_step, state)

    def next_batch(self, step: int, wait_s: float) -> StepHeader | Need | None:
        """The header of the batch of ``step``; None if it is not ready within ``wait_s`` seconds."""
        path = self._call("next_batch", step, wait_s)
        if path is None or path is Need.WEIGHTS:
            return path  # type: ignore[no-any-return]
        # The journal has this step: a restarted process needs no state of a checkpoint any more.
        self._deaths = 0
        self._start_arguments = (step + 1, None)
        return read_header(path.parent, step)

    def evaluated(self, step: int, wait_s: float) -> Path | Need | None:
        """The file of the responses to held-out problems at the weights of ``step``, like ``next_batch``."""
        answer: Path | Need | None = self._call("evaluated", step, wait_s)
        return answer

    def load_weights(self, folder: Path, version: int, step: int) -> None:
        """Load the weights in ``folder``, made by the updates of ``step``, into the engines."""
        # Noted before the call: if the process dies in it, the restart loads them.
        self._weights, self._ipc_weights = (folder, version, step), None
        self._call("load_weights", folder, version, step)

    def keep_weights(self, step: int) -> None:
        """Record that ``step`` made no update: engines sample on from the same weights, and load nothing.

        For a run that trains nothing (`--rollout-only`).
        """
        assert self._weights is not None
        folder, version, _ = self._weights
        self._weights = (folder, version, step)
        self._call("keep_weights", version, step)

    def submit(self, method: str, *arguments: Any) -> Future[Any]:
        """Begin a call of a weight broadcast. The future fails if an engine does, or the process dies.

        A process that dies is restarted only by the next call.
        """
        if method == "begin":
            # The engines' next weights are in no folder: a restart must not load the folder of older ones.
            self._weights = None
        return self._thread.submit(self._exchange, method, *arguments)

    def release(self) -> list[str]:
        """Put colocated engines to sleep; names of those that have released their memory.

        The memory of the others, of all if the process dies meanwhile, is in an unknown state.
        """
        self._is_admitted = False  # before the call: a process that is restarted in it must hold them, too
        names: list[str] = self._call("release")
        return names

    def wake(self, names: Sequence[str]) -> list[str]:
        """Wake sleeping engines; names of those that sample again.

        Empty if the process dies meanwhile: their memory is in an unknown state then.
        """
        return self._call("wake", names) or []

    def expect_handles(self, version: int, step: int) -> None:
        """Announce weights, made by ``step``, that colocated engines get by memory handles at wake-up."""
        self._weights, self._ipc_weights = None, (version, step)
        self._call("expect_handles", version, step)

    def update(self, call: str, *arguments: Any) -> list[str]:
        """Make a call of ``WeightUpdates``, for weights by handles; names of engines on which it succeeded.

        Empty if the process dies.
        """
        return self._call(call, *arguments) or []

    def admit(self) -> None:
        """End the hold of colocated engines."""
        self._is_admitted = True
        self._call("admit")

    def state(self) -> dict[str, Any]:
        """The sampler's part of a checkpoint, for a fork or a lost journal; empty if the sampler ended."""
        try:
            state: dict[str, Any] = self._call("state")
        except RunStopped:
            return {}
        return state

    def checkpointed(self, oldest: int) -> None:
        """Delete journal files that a resume from step ``oldest``, the oldest checkpoint, does not need."""
        self._call("checkpointed", oldest)

    def close(self) -> None:
        """End the process, which first commits the tokens of requests in flight.

        It is killed if that takes too long.
        """
        try:
            with HeartbeatWatchdog(self._process, self._pipe, _CLOSE_S):
                self._pipe.send(None)
                while self._pipe.recv() == ALIVE:
                    pass
        except (OSError, EOFError):
            pass  # the process has ended already
        self._pipe.close()
        self._exit_code(10)

    def _call(self, method: str, *arguments: Any) -> Any:
        while True:
            try:
                return self._exchange(method, *arguments)
            except SamplerDied as died:
                self._restart(str(died))
                if method in ("start", "load_weights") or method in WAKE_CALLS:
                    # A restart includes the first two. A wake is not repeated: what state it left the
                    # engines in is unknown, so the caller ends their servers.
                    return None

    def _exchange(self, method: str, *arguments: Any) -> Any:
        """One call and its reply. SamplerDied if the process ends, or sends no heartbeat."""
        watch = HeartbeatWatchdog(self._process, self._pipe, self._silent_s)
        try:
            with watch:
                if not self._is_set_up:
                    self._pipe.send(self._setup)
                    self._is_set_up = True
                self._pipe.send((method, arguments))
                while (reply := self._pipe.recv()) == ALIVE:
                    watch.beat()
        except (EOFError, OSError) as error:
            raise SamplerDied(self._end(watch.kill_reason)) from error
        kind, *rest, events = reply
        for event in events:
            self._on_event(event)
        if kind == "ok":
            return rest[0]
        name, text = rest
        raise _ERRORS.get(name, RunStopped)(text)

    def _restart(self, why: str) -> None:
        while True:
            self._deaths += 1
            self._on_event({"kind": "sampler_died", "reason": why, "deaths": self._deaths})
            print(f"the sampler's process has ended ({why}); restarting it", flush=True)
            if self._deaths > _RESTARTS:
                raise RunStopped(f"the sampler's process ended {self._deaths} times in a row: {why}")
            time.sleep(min(30, 2**self._deaths / 4))
            self._pipe.close()
            self._process, self._pipe = self._launch()
            try:
                # The journal first, then the weights, then admission: an engine may sample only when the
                # sampler knows its groups and which weights the engine must have.
                self._exchange("start", *self._start_arguments)
                if self._weights is not None:
                    self._exchange("load_weights", *self._weights)
                if self._ipc_weights is not None:
                    self._exchange("expect_handles", *self._ipc_weights)  # engines that run have them already
                if self._is_admitted:
                    self._exchange("admit")
                return
            except SamplerDied as died:
                why = str(died)

    def _end(self, kill_reason: str | None) -> str:
        """Reap the process; returns why it ended. StorageFailed if it cannot even be killed."""
        if (code := self._exit_code(_END_S)) is None:
            raise StorageFailed(
                f"the sampler's process {self._process.pid} cannot be ended; its file system may hang"
            )
        return kill_reason or death(code)

    def _exit_code(self, limit_s: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(limit_s)
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_END_S)
        return None

    def _launch(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", _SERVICE, str(theirs.fileno())]
        with holding_signals():
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._is_set_up = False
        return process, ours


class HeartbeatWatchdog:
    """A watchdog that kills ``process`` if ``beat`` is not called for ``limit_s`` seconds within the block.

    A context manager, with a thread: a process that is stopped, or hangs, does not close its pipe, and a
    reader without a timeout would wait for ever. Reads and writes of ``pipe`` fail after the kill, also if
    the process cannot be killed. Time is counted in many waits: if both processes are stopped for hours (a
    suspended job), that counts as one wait.
    """

    def __init__(self, process: subprocess.Popen[bytes], pipe: Connection, limit_s: float) -> None:
        self._process, self._pipe, self._limit_s = process, pipe, limit_s
        self._waits = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sampler-watch", daemon=True)
        self.kill_reason: str | None = None
        """Why the process was killed; None if it was not."""

    def beat(self) -> None:
        self._waits = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._limit_s / _WAITS):
            self._waits += 1
            if self._waits >= _WAITS:
                self.kill_reason = f"no heartbeat for {self._limit_s:g} s"
                self._process.kill()
                # The pipe, too: a process that is blocked in the kernel keeps its end open after the kill.
                with socket.socket(fileno=os.dup(self._pipe.fileno())) as ours:
                    ours.shutdown(socket.SHUT_RDWR)
                return
