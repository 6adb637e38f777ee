"""The trainer's client of the sampler's process, which it starts again if it dies."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bapo_megatron.errors import ConfigError, RunStopped, StorageFailed
from bapo_megatron.interfaces import Need
from bapo_megatron.rollout.engines.sent_weights import SentDigests
from bapo_megatron.rollout.sampler.heartbeat import ALIVE, HeartbeatWatchdog
from bapo_megatron.rollout.sampler.process import WAKE_CALLS, Setup
from bapo_megatron.rollout.sampler.step_batches import read_step
from bapo_megatron.runtime.out_of_memory import death
from bapo_megatron.types import StepBatch

_RESTARTS = 5
"""Restarts in a row, without a batch between them; the next death ends the run."""

_SILENT_S = 300.0
"""A process that sends no heartbeat for so long during a call is killed. Its event loop sends them every few
seconds whatever engines do: loads of weights and long requests are no silence."""

_END_S = 60.0
"""The longest wait for the end of a process. One that waits for a file system that hangs cannot be killed."""

_CLOSE_S = 30.0
"""The longest wait for the end of a process that is asked to close."""

_SERVICE = "bapo_megatron.rollout.sampler.process"

_ERRORS: dict[str, type[Exception]] = {"ConfigError": ConfigError, "FailingDiskError": StorageFailed}
"""The types of errors that the process sends by name; any other is a RunStopped."""

Event = Callable[[dict[str, Any]], None]
"""A callback for events: a kind and its fields."""


class SamplerDied(Exception):
    """The sampler's process has ended during a call."""


class SamplerClient:
    """A ``Sampler`` (see interfaces.py) whose work is done in a process beside this one."""

    def __init__(self, setup: Setup, on_event: Event, silent_s: float = _SILENT_S) -> None:
        """Start the process. ``silent_s``: the longest time without a heartbeat during a call."""
        self._setup, self._on_event, self._silent_s = setup, on_event, silent_s
        self._start_arguments: tuple[int, dict[str, Any] | None] = (1, None)
        """The arguments of ``start`` for the next process."""
        self._weights: tuple[Path, int, int] | None = None
        self._ipc_weights: tuple[int, int] | None = None
        """The version and step of weights that colocated engines get by handles, if no folder holds them."""
        self._is_admitted = False
        """Whether colocated engines may sample: a new process holds them until it is told."""
        self._deaths = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sampler")  # one call at a time
        self._is_set_up = False
        self._process, self._pipe = self._launch()

    def start(self, first_step: int, state: dict[str, Any] | None) -> None:
        """Begin before ``first_step``, at the ``state`` of the checkpoint before it, if there is one."""
        self._start_arguments = (first_step, state)
        self._call("start", first_step, state)

    def next_batch(self, step: int, wait_s: float) -> StepBatch | Need | None:
        """The groups that ``step`` trains on; None if they do not exist yet after ``wait_s`` seconds."""
        path = self._call("next_batch", step, wait_s)
        if path is None or path is Need.WEIGHTS:
            return path  # type: ignore[no-any-return]
        self._deaths = 0
        self._start_arguments = (step + 1, None)
        return read_step(path.parent, step)

    def evaluated(self, step: int, wait_s: float) -> Path | Need | None:
        """The file of the responses to held-out problems at the weights of ``step``, like ``next_batch``."""
        found: Path | Need | None = self._call("evaluated", step, wait_s)
        return found

    def load_weights(self, folder: Path, version: int, step: int) -> None:
        """Sample from the weights in ``folder``, which the updates of ``step`` have made."""
        self._weights, self._ipc_weights = (folder, version, step), None
        self._call("load_weights", folder, version, step)

    def keep_weights(self, step: int) -> None:
        """Sample for the next step from the same weights: ``step`` has not changed them. Nothing is loaded.

        For a run that trains nothing.
        """
        assert self._weights is not None
        folder, version, _ = self._weights
        self._weights = (folder, version, step)
        self._call("keep_weights", version, step)

    def tell(self, method: str, *arguments: Any) -> Future[Any]:
        """Begin a call that is part of a broadcast of weights. The future fails if an engine does.

        A process that dies meanwhile is not started again here, but by the next call.
        """
        if method == "begin":
            self._weights = None  # no folder holds the weights that the engines will have
        return self._thread.submit(self._exchange, method, *arguments)

    def release(self) -> list[str]:
        """Have colocated engines give up their memory, and hold all back; names of those that have.

        Of the others, all if the process dies meanwhile, nobody knows what memory they hold.
        """
        self._is_admitted = False
        names: list[str] = self._call("release")
        return names

    def wake(self, names: Sequence[str]) -> list[str]:
        """Let engines that have released their memory sample again; names of those that do.

        None of them if the process dies meanwhile: nobody knows then what memory they hold.
        """
        return self._call("wake", names) or []

    def expect_handles(self, version: int, step: int) -> None:
        """Sample from weights that colocated engines get by handles when they wake, those of ``step``."""
        self._weights, self._ipc_weights = None, (version, step)
        self._call("expect_handles", version, step)

    # Instead of `wake`, for such weights: names of engines that can go on; none if the process dies.

    def begin_wake(self, names: Sequence[str]) -> list[str]:
        """Let engines that have released their memory take back that of the weights."""
        return self._call("begin_wake", names) or []

    def receive_handles(self, handles: Mapping[str, Sequence[bytes]]) -> list[str]:
        """Let each of these engines load a bucket of weights by its handles."""
        return self._call("receive_handles", handles) or []

    def confirm_weights(
        self, names: Sequence[str], version: int, sent: SentDigests | None = None
    ) -> list[str]:
        """Compare the digests of engines that have all weights of ``version`` with those ``sent``."""
        return self._call("confirm_weights", names, version, sent) or []

    def finish_wake(self, names: Sequence[str]) -> list[str]:
        """Let engines whose weights are confirmed sample."""
        return self._call("finish_wake", names) or []

    def admit(self) -> None:
        """Hold no engine back any more."""
        self._is_admitted = True
        self._call("admit")

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, needed if the journal is lost; empty if the sampler has ended."""
        try:
            found: dict[str, Any] = self._call("state")
        except RunStopped:
            return {}
        return found

    def checkpointed(self, oldest: int) -> None:
        """Delete what no continuation after step ``oldest``, the oldest checkpoint, needs."""
        self._call("checkpointed", oldest)

    def close(self) -> None:
        """End the process; it keeps the tokens of requests in flight."""
        try:
            with HeartbeatWatchdog(self._process, self._pipe, _CLOSE_S):
                self._pipe.send(None)
                while self._pipe.recv() == ALIVE:
                    pass
        except (OSError, EOFError):
            pass  # it is gone already
        self._pipe.close()
        self._exit_code(10)

    def _call(self, method: str, *arguments: Any) -> Any:
        """The reply of the process, or of the next one if it dies meanwhile."""
        while True:
            try:
                return self._exchange(method, *arguments)
            except SamplerDied as death:
                self._restart(str(death))
                if method in ("start", "load_weights") or method in WAKE_CALLS:
                    return None  # the first two are part of a restart

    def _exchange(self, method: str, *arguments: Any) -> Any:
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
        """Start the process again, with its last weights. RunStopped after too many deaths."""
        while True:
            self._deaths += 1
            self._on_event({"kind": "sampler_died", "reason": why, "deaths": self._deaths})
            print(f"the sampler's process has ended ({why}); starting it again", flush=True)
            if self._deaths > _RESTARTS:
                raise RunStopped(f"the sampler's process ended {self._deaths} times in a row: {why}")
            time.sleep(min(30, 2**self._deaths / 4))
            self._pipe.close()
            self._process, self._pipe = self._launch()
            try:
                self._exchange("start", *self._start_arguments)
                if self._weights is not None:
                    self._exchange("load_weights", *self._weights)
                if self._ipc_weights is not None:
                    self._exchange("expect_handles", *self._ipc_weights)  # engines that sample have them
                if self._is_admitted:
                    self._exchange("admit")
                return
            except SamplerDied as death:
                why = str(death)

    def _end(self, kill_reason: str | None) -> str:
        """End the sampler process; returns why it ended. StorageFailed if it does not end."""
        if (code := self._exit_code(_END_S)) is None:
            raise StorageFailed(
                f"the sampler's process {self._process.pid} cannot be ended; its file system may hang"
            )
        return kill_reason or death(code)

    def _exit_code(self, limit_s: float) -> int | None:
        """The exit code of the process, which is killed after ``limit_s``; None if that does not end it."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(limit_s)
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_END_S)
        return None

    def _launch(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", _SERVICE, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._is_set_up = False
        return process, ours
