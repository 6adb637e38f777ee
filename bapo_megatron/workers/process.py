"""A worker subprocess, as a ``WorkerPool`` uses it: non-blocking JSON lines in both directions.

``WorkerProcess.start(program, answered)`` starts one and returns it, ready for ``send``; ``answered`` is
called with each message, in the pool's event loop. A process has its own temporary directory, and ends with
its parent, even after ``kill -9``.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.child_process import (
    MAX_ANSWER_BYTES,
    ChildDied,
    ChildProcess,
    ChildTimeout,
    exit_text,
    with_import_path,
)
from bapo_megatron.workers.scratch import Scratch

START_LIMIT_S = 600.0
"""Seconds for a worker's imports, which took more than 120 s at a load of 50."""

_READS = 64  # maximum successive reads of a pipe, so that an endless writer does not block the event loop


@dataclass(frozen=True)
class WorkerProgram:
    """Command, settings and environment of a worker program, whose ``main`` calls ``serving.serve``."""

    command: tuple[str, ...]
    """Command without its last argument, the lifeline's descriptor."""
    settings: Any
    """JSON value that the program's ``prepare`` takes."""
    environment: Mapping[str, str] = field(default_factory=lambda: with_import_path(os.environ))
    """By default this process's environment and import path."""


class WorkerProcess:
    """A running worker process, returned by ``start``: ``send`` calls, finally ``close`` it. When no more
    answers can come, because the process ended or ``end`` killed it, the future ``ended`` gets the reason."""

    def __init__(
        self, child: ChildProcess, scratch: Scratch, heard: Callable[[dict[str, Any]], None]
    ) -> None:
        """``heard``: called with each message until ``ended`` is set."""
        assert child.process.stdin is not None
        assert child.process.stdout is not None
        self._loop = asyncio.get_running_loop()
        self._child, self._scratch, self._heard = child, scratch, heard
        self._input, self._output = child.process.stdin.fileno(), child.process.stdout.fileno()
        self._unsent: deque[memoryview] = deque()
        self._parts: list[bytes] = []
        self._exit: asyncio.Task[None] | None = None
        self._removal: asyncio.Future[None] | None = None
        self.pid = child.pid
        self.is_async = False  # whether it takes concurrent calls
        self.notes: list[str] = []
        self.ended: asyncio.Future[str] = self._loop.create_future()
        for descriptor in (self._input, self._output):
            os.set_blocking(descriptor, False)
        self._loop.add_reader(self._output, self._read)
        # The process is watched too, because a forked grandchild may hold the pipe open.
        self._pid_descriptor: int | None = None
        with suppress(OSError):  # a system call filter may reject pidfd_open
            self._pid_descriptor = os.pidfd_open(self.pid)
            self._loop.add_reader(self._pid_descriptor, self._note_exit)

    @classmethod
    async def start(cls, program: WorkerProgram, answered: Callable[[dict[str, Any]], None]) -> WorkerProcess:
        """Start a process and return it when it is ready for calls. ``answered``: called with each answer.
        Raises ChildError, OSError, or ConfigError of ``prepare``."""
        ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

        def hear(message: dict[str, Any]) -> None:
            if ready.done():
                answered(message)
            else:
                ready.set_result(message)

        process = cls(*await asyncio.to_thread(_make, program), hear)
        try:
            process.send(json.dumps(program.settings).encode())
            first = await process._first(ready)
        except BaseException:
            await process.close()
            raise
        process.is_async, process.notes = first["is_async"], first["notes"]
        return process

    async def _first(self, ready: asyncio.Future[dict[str, Any]]) -> dict[str, Any]:
        either: list[asyncio.Future[Any]] = [ready, self.ended]
        await asyncio.wait(either, timeout=START_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            if self.ended.done():
                raise ChildDied(self.ended.result())
            raise ChildTimeout(f"it was not ready within {START_LIMIT_S:g} s")
        if "problem" in ready.result():
            raise ConfigError(ready.result()["problem"])
        return ready.result()

    def send(self, line: bytes) -> None:
        """Send a line now, or once the pipe has room; do nothing if the process has ended."""
        if self.ended.done():
            return
        self._unsent.append(memoryview(line + b"\n"))
        if len(self._unsent) == 1:
            self._write()

    def end(self, reason: str) -> None:
        """Kill the process and set ``ended``; drops unread answers."""
        if self.ended.done():  # killed and perhaps reaped: the PID may have been reused
            return
        self.ended.set_result(reason)
        self._unwatch()
        self._child.kill()

    async def close(self) -> None:
        self.end("it was closed")
        if self._removal is None:
            self._removal = asyncio.ensure_future(asyncio.to_thread(_remove, self._child, self._scratch))
        await asyncio.shield(self._removal)

    def _unwatch(self) -> None:
        self._unsent.clear()
        self._loop.remove_reader(self._output)
        self._loop.remove_writer(self._input)
        if self._pid_descriptor is not None:
            self._loop.remove_reader(self._pid_descriptor)
            os.close(self._pid_descriptor)

    def _write(self) -> None:
        while self._unsent:
            try:
                sent = os.write(self._input, self._unsent[0])
            except BlockingIOError:  # the pipe is full; the event loop resumes the writes
                self._loop.add_writer(self._input, self._write)
                return
            except BrokenPipeError:  # it ended, which is handled elsewhere
                self._unsent.clear()
                break
            self._unsent[0] = self._unsent[0][sent:]
            if not self._unsent[0]:
                self._unsent.popleft()
        self._loop.remove_writer(self._input)

    def _read(self) -> None:
        for _ in range(_READS):
            try:
                part = os.read(self._output, 1 << 20)
            except BlockingIOError:
                return
            if not part:
                self._loop.remove_reader(self._output)
                self._exit = self._loop.create_task(self._note_closed_pipe())
                return
            self._take(part)
            if self.ended.done():
                return

    def _take(self, part: bytes) -> None:
        self._parts.append(part)
        if b"\n" not in part:
            if sum(map(len, self._parts)) > MAX_ANSWER_BYTES:
                self.end(f"it answered more than {MAX_ANSWER_BYTES} bytes")
            return
        *lines, rest = b"".join(self._parts).split(b"\n")
        self._parts = [rest] if rest else []
        for line in lines:
            message = _message(line)
            if message is None:
                self.end(f"it answered no JSON: {line[:200]!r}")
            if message is None or self.ended.done():
                return
            self._heard(message)

    def _note_exit(self) -> None:
        self._read()  # the pipe holds its last answers
        self._end_with(self._child.wait_end(0.0))

    async def _note_closed_pipe(self) -> None:
        with suppress(ChildProcessError):  # closed in the meantime
            self._end_with(await asyncio.to_thread(self._child.wait_end, 1.0))

    def _end_with(self, code: int | None) -> None:
        self.end("it closed its pipe" if code is None else exit_text(code))


def _message(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def _make(program: WorkerProgram) -> tuple[ChildProcess, Scratch]:
    scratch = Scratch()
    variables, pipe = {**program.environment, "TMPDIR": scratch.path}, subprocess.PIPE
    return ChildProcess(program.command, variables, False, stdin=pipe, stdout=pipe, bufsize=0), scratch


def _remove(child: ChildProcess, scratch: Scratch) -> None:
    child.close()
    scratch.remove()
