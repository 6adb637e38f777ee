"""The sampler as the trainer sees it: a process of its own, started again if it dies."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from bapo_megatron.errors import ConfigError, RunStopped, StorageFailed
from bapo_megatron.rollout.sampler.heartbeat import ALIVE, Heartbeat
from bapo_megatron.rollout.sampler.process import Setup
from bapo_megatron.rollout.sampler.step_batches import read_step
from bapo_megatron.runtime.out_of_memory import death
from bapo_megatron.types import StepBatch

_RESTARTS = 5
"""Deaths in a row, without a batch between them, that are mended; the next one ends the run."""

_SILENT_S = 300.0
"""A process that has a question and gives no sign of life for so long is ended. Signs come from its event
loop every few seconds, whatever engines are doing: loads of weights and long requests are not silence."""

_END_S = 60.0
"""How long a process may take to vanish. One that waits for a file system that hangs cannot be killed."""

_CLOSE_S = 30.0
"""How long it may take to end when it is asked to."""

_SERVICE = "bapo_megatron.rollout.sampler.process"

_ERRORS: dict[str, type[Exception]] = {"ConfigError": ConfigError, "FailingDiskError": StorageFailed}
"""What the process says by name; any other is a RunStopped."""

Event = Callable[[dict[str, Any]], None]
"""Takes note of what has happened: a kind and its fields."""


class SamplerDied(Exception):
    """The process has ended."""


class SamplerClient:
    """A ``Sampler`` (see interfaces.py) in a process beside this one."""

    def __init__(self, setup: Setup, on_event: Event, silent_s: float = _SILENT_S) -> None:
        """``silent_s``: how long it may give no sign of life."""
        self._setup, self._on_event, self._silent_s = setup, on_event, silent_s
        self._begin: tuple[int, dict[str, Any] | None] = (1, None)
        self._weights: tuple[Path, int, int] | None = None
        self._deaths = 0
        self._teller = ThreadPoolExecutor(1, thread_name_prefix="sampler")  # one question at a time
        self._is_set_up = False
        self._process, self._pipe = self._launch()

    def start(self, first_step: int, state: dict[str, Any] | None) -> None:
        """Begin before ``first_step``, at the ``state`` of the checkpoint before it, if there is one."""
        self._begin = (first_step, state)
        self._ask("start", first_step, state)

    def next_batch(self, step: int, wait_s: float) -> StepBatch | Literal["weights"] | None:
        """The groups that ``step`` trains on; None if they do not exist yet after ``wait_s`` seconds."""
        path = self._ask("next_batch", step, wait_s)
        if path is None or path == "weights":
            return path  # type: ignore[no-any-return]
        self._deaths = 0
        self._begin = (step + 1, None)
        return read_step(path.parent, step)

    def evaluated(self, step: int, wait_s: float) -> Path | Literal["weights"] | None:
        """The file of the responses to held-out problems at the weights of ``step``, like ``next_batch``."""
        found: Path | Literal["weights"] | None = self._ask("evaluated", step, wait_s)
        return found

    def load_weights(self, folder: Path, version: int, step: int) -> None:
        """Sample from the weights in ``folder``, which the updates of ``step`` have made."""
        self._weights = (folder, version, step)
        self._ask("load_weights", folder, version, step)

    def tell(self, method: str, *arguments: Any) -> Future[Any]:
        """Begin to tell the engines something of a broadcast. The future fails if one of them does.

        A sampler that dies meanwhile is not started again here, but by the next question.
        """
        if method == "begin":
            self._weights = None  # no folder holds those that the engines will have
        return self._teller.submit(self._exchange, method, *arguments)

    def state(self) -> dict[str, Any]:
        """What a continuation needs if the journal is lost; nothing, if the sampler is."""
        try:
            found: dict[str, Any] = self._ask("state")
        except RunStopped:
            return {}
        return found

    def checkpointed(self, oldest: int) -> None:
        """A checkpoint is durable: the journal may drop what no continuation from ``oldest`` on needs."""
        self._ask("checkpointed", oldest)

    def close(self) -> None:
        """End it; what engines have in hand is kept."""
        try:
            with Heartbeat(self._process, self._pipe, _CLOSE_S):
                self._pipe.send(None)
                while self._pipe.recv() == ALIVE:
                    pass
        except (OSError, EOFError):
            pass  # it is gone already
        self._pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)

    def _ask(self, method: str, *arguments: Any) -> Any:
        """The answer of the process, of the next one if it dies meanwhile."""
        while True:
            try:
                return self._exchange(method, *arguments)
            except SamplerDied as death:
                self._start_again(str(death))
                if method in ("start", "load_weights"):  # they are part of starting again
                    return None

    def _exchange(self, method: str, *arguments: Any) -> Any:
        watch = Heartbeat(self._process, self._pipe, self._silent_s)
        try:
            with watch:
                if not self._is_set_up:
                    self._pipe.send(self._setup)
                    self._is_set_up = True
                self._pipe.send((method, arguments))
                while (reply := self._pipe.recv()) == ALIVE:
                    watch.heard()
        except (EOFError, OSError) as error:
            raise SamplerDied(self._end(watch.verdict)) from error
        kind, *rest, events = reply
        for event in events:
            self._on_event(event)
        if kind == "ok":
            return rest[0]
        name, text = rest
        raise _ERRORS.get(name, RunStopped)(text)

    def _start_again(self, why: str) -> None:
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
                self._exchange("start", *self._begin)
                if self._weights is not None:
                    self._exchange("load_weights", *self._weights)
                return
            except SamplerDied as death:
                why = str(death)

    def _end(self, verdict: str | None) -> str:
        """Why the process has ended. RunStopped if it does not: the journal stays locked then."""
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            try:
                code = self._process.wait(_END_S)
            except subprocess.TimeoutExpired as error:
                raise StorageFailed(
                    f"the sampler's process {self._process.pid} cannot be ended; its file system may hang"
                ) from error
        return verdict or death(code)

    def _launch(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", _SERVICE, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._is_set_up = False
        return process, ours
