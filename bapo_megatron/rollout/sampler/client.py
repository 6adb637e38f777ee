"""Trainer's side of the sampler process (``process.py``), on rank 0: starts it and makes calls over a pipe.

``SamplerClient`` is the ``Sampler`` of ``interfaces.py``: each method but ``submit`` is one blocking call. A
process that dies or hangs during a call is restarted.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bapo_megatron.errors import ConfigError, RunStopped, StorageFailed
from bapo_megatron.interfaces import Need
from bapo_megatron.rollout.sampler.process import ALIVE, WAKE_CALLS, Setup
from bapo_megatron.rollout.sampler.step_batches import read_header
from bapo_megatron.runtime.event_kinds import OnEvent
from bapo_megatron.runtime.exit_codes import holding_signals
from bapo_megatron.runtime.guards import death
from bapo_megatron.types import StepHeader

_RESTARTS = 5  # maximum consecutive restarts without a batch in between; the next death ends the run
_SILENT_S = 300.0  # seconds without a heartbeat during a call after which the process is killed
_END_S = 60.0  # maximum wait for a killed process, which a hung file system may keep from ending
_CLOSE_S = 30.0  # maximum wait for a process to close on request
_SERVICE = "bapo_megatron.rollout.sampler.process"

_ERRORS: dict[str, type[Exception]] = {"ConfigError": ConfigError, "FailingDiskError": StorageFailed}
"""Exception types by the name that the process sends; other names become RunStopped."""


class SamplerDied(Exception):
    """The sampler process died or hung during a call. Callers get this only from a ``submit`` future."""


class SamplerClient:
    """The trainer's ``Sampler`` on rank 0: blocking calls to the sampler process, which it (re)starts.

    A call during which the process dies or hangs is repeated after the restart, except wake-up calls of
    colocated engines, which then return no engine, and ``submit``, whose future fails. Raises RunStopped in a
    crash loop, StorageFailed if the process cannot be killed, and errors that the process reports as
    RunStopped, StorageFailed or ConfigError.
    """

    def __init__(self, setup: Setup, on_event: OnEvent) -> None:
        """Start the process. ``on_event`` gets the run events that it reports with its replies."""
        self._setup, self._on_event = setup, on_event
        self._start_arguments: tuple[int, dict[str, Any] | None] = (1, None)  # for a restarted process
        self._weights: tuple[Path, int, int] | None = None
        self._ipc_weights: tuple[int, int] | None = None
        """Version and step of weights that colocated engines get as memory handles; None for a folder."""
        self._is_admitted = False
        """Whether colocated engines may sample; a restarted process holds them until ``admit``."""
        self._deaths = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sampler")  # one call at a time
        self._is_set_up = False
        self._process, self._pipe = self._launch()

    def start(self, first_step: int, state: dict[str, Any] | None) -> None:
        """Start sampling for ``first_step``. ``state``: sampler state from the preceding checkpoint."""
        self._start_arguments = (first_step, state)
        self._call("start", first_step, state)

    def next_batch(self, step: int, wait_s: float) -> StepHeader | Need | None:
        """Return the batch header of ``step``, None if it is not ready within ``wait_s`` seconds, or
        ``Need.WEIGHTS`` if no engine works and the trainer must push the weights again."""
        path = self._call("next_batch", step, wait_s)
        if path is None or path is Need.WEIGHTS:
            return path  # type: ignore[no-any-return]
        # The journal contains this step, so a restarted process needs no checkpoint state.
        self._deaths = 0
        self._start_arguments = (step + 1, None)
        return read_header(path.parent, step)

    def evaluated(self, step: int, wait_s: float) -> Path | Need | None:
        """Return the file of held-out responses at the weights of ``step``; otherwise like ``next_batch``."""
        answer: Path | Need | None = self._call("evaluated", step, wait_s)
        return answer

    def load_weights(self, folder: Path, version: int, step: int) -> None:
        """Load the weights in ``folder``, produced by ``step``, into the engines."""
        # Set before the call: if the process dies during it, the restart loads these weights.
        self._weights, self._ipc_weights = (folder, version, step), None
        self._call("load_weights", folder, version, step)

    def keep_weights(self, step: int) -> None:
        """Record that ``step`` made no update, so the engines keep their weights (`--rollout-only`)."""
        assert self._weights is not None
        folder, version, _ = self._weights
        self._weights = (folder, version, step)
        self._call("keep_weights", version, step)

    def submit(self, method: str, *arguments: Any) -> Future[Any]:
        """Start a weight broadcast call. Its future fails if an engine fails or the process dies."""
        if method == "begin":
            # The next weights are in no folder, and a restart must not load an older folder.
            self._weights = None
        return self._thread.submit(self._exchange, method, *arguments)

    def release(self) -> list[str]:
        """Put colocated engines to sleep. Returns those that released their memory; the memory of the others
        (of all engines if the process dies) is in an unknown state."""
        self._is_admitted = False  # before the call: a process restarted during it must hold the engines too
        names: list[str] = self._call("release")
        return names

    def wake(self, names: Sequence[str]) -> list[str]:
        """Wake sleeping engines. Returns those that can sample again; none if the process dies."""
        return self._call("wake", names) or []

    def expect_handles(self, version: int, step: int) -> None:
        """Announce weights, produced by ``step``, that colocated engines get as memory handles at wake-up."""
        self._weights, self._ipc_weights = None, (version, step)
        self._call("expect_handles", version, step)

    def update(self, call: str, *arguments: Any) -> list[str]:
        """Call a ``WeightUpdates`` method; return engines where it succeeded, none if the process dies."""
        return self._call(call, *arguments) or []

    def admit(self) -> None:
        """Let colocated engines sample again."""
        self._is_admitted = True
        self._call("admit")

    def state(self) -> dict[str, Any]:
        """Return the sampler state for a checkpoint (``GroupSampler.state``); empty if the run stopped."""
        try:
            state: dict[str, Any] = self._call("state")
        except RunStopped:
            return {}
        return state

    def checkpointed(self, oldest: int) -> None:
        """Delete journal files that a resume from ``oldest``, the oldest checkpoint's step, does not need."""
        self._call("checkpointed", oldest)

    def close(self) -> None:
        """End the process, which first commits the tokens of in-flight requests; kill it on timeout."""
        try:
            limit_waits(self._pipe, _CLOSE_S)
            self._pipe.send(None)
            while self._pipe.recv() == ALIVE:
                pass
        except BlockingIOError:
            self._process.kill()
        except (OSError, EOFError):
            pass  # the process already ended
        self._pipe.close()
        self._exit_code(10)

    def _call(self, method: str, *arguments: Any) -> Any:
        while True:
            try:
                return self._exchange(method, *arguments)
            except SamplerDied as died:
                self._restart(str(died))
                if method in ("start", "load_weights") or method in WAKE_CALLS:
                    # A restart includes the first two; after a failed wake the caller ends the servers.
                    return None

    def _exchange(self, method: str, *arguments: Any) -> Any:
        """Make one call and return its result. Raises SamplerDied if the process ends or hangs."""
        try:
            if not self._is_set_up:
                self._pipe.send(self._setup)
                self._is_set_up = True
            self._pipe.send((method, arguments))
            while (reply := self._pipe.recv()) == ALIVE:
                pass
        except BlockingIOError as error:
            self._process.kill()
            self._end()
            raise SamplerDied(f"no heartbeat for {_SILENT_S:g} s") from error
        except (EOFError, OSError) as error:
            raise SamplerDied(death(self._end())) from error
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
                # In this order: an engine may sample only once the sampler knows its groups and weights.
                self._exchange("start", *self._start_arguments)
                if self._weights is not None:
                    self._exchange("load_weights", *self._weights)
                if self._ipc_weights is not None:
                    self._exchange("expect_handles", *self._ipc_weights)  # running engines already have them
                if self._is_admitted:
                    self._exchange("admit")
                return
            except SamplerDied as died:
                why = str(died)

    def _end(self) -> int:
        """Reap the process and return its exit code. Raises StorageFailed if it cannot be killed."""
        if (code := self._exit_code(_END_S)) is None:
            raise StorageFailed(
                f"the sampler's process {self._process.pid} cannot be ended; its file system may hang"
            )
        return code

    def _exit_code(self, limit_s: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(limit_s)
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_END_S)
        return None

    def _launch(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = Pipe()
        limit_waits(ours, _SILENT_S)
        command = [sys.executable, "-m", _SERVICE, str(theirs.fileno())]
        with holding_signals():
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._is_set_up = False
        return process, ours


def limit_waits(pipe: Connection, limit_s: float) -> None:
    """Let reads and writes of ``pipe``, a socket, raise BlockingIOError after ``limit_s`` seconds without
    progress: a stopped or hung process keeps its end open. A suspension of both processes (a suspended job)
    does not count: it interrupts the call, which Python then repeats."""
    limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
    with socket.socket(fileno=os.dup(pipe.fileno())) as ours:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, limit)
