"""Pre-forked sampler process of a forked command, which saves five CPU seconds of start-up.

A process cannot be forked safely once it has threads, and the trainer has many when it starts its sampler.
So rank 0 of ``bapo train`` forks a standby first, with one thread, which becomes the first sampler. A sampler
that replaces a dead one is started as a user's is. The parent is rank 0 either way.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from bapo_megatron.commands import train
from bapo_megatron.runtime.processes import die_with_parent

if TYPE_CHECKING:
    from bapo_megatron.checkpoint.fork_record import ForkSource
    from bapo_megatron.config import RunConfig
    from bapo_megatron.rollout.sampler.client import SamplerClient

STANDBY, SAMPLER = "bapo-standby", "bapo-sampler"
"""Names of the process while it waits, and from then on: its command line is the fork server's."""

_IMPORTED = (
    *("bapo_megatron.rollout.sampler.process", "bapo_megatron.rollout.engines.local_engine"),
    "transformers.models.auto.tokenization_auto",
    *(f"transformers.models.qwen2.{part}_qwen2" for part in ("configuration", "modeling", "tokenization")),
    "datasets",
)
"""Modules that a trainer and its sampler import late; half of the CPU time of a run of one step."""
_PR_SET_NAME = 15
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals to a process group. The standby ignores them: a sampler that has not started would not get them."""


class ForkedProcess:
    """A forked child: the part of ``subprocess.Popen[bytes]`` that the trainer uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it lives."""
        if self.returncode is None and select.select([self._ended], [], [], 0)[0]:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._ended)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended; TimeoutExpired after ``timeout`` seconds."""
        if self.returncode is None and not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(SAMPLER, timeout or 0)
        code = self.poll()
        assert code is not None
        return code

    def kill(self) -> None:
        """SIGKILL, unless it is known to have ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Standby:
    """Standby fork of this process, which becomes its sampler on request."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            die_with_parent(parent=parent)
            _wait_and_serve(theirs)
        theirs.close()
        self._process = ForkedProcess(pid)

    def become_sampler(self) -> tuple[ForkedProcess, Connection] | None:
        """The process and its pipe, in this process's directory and environment; None if it has ended."""
        ours, theirs = Pipe()
        request = json.dumps({"directory": str(Path.cwd()), "environment": dict(os.environ)})
        with self._ours, theirs:
            if self._process.poll() is not None:
                return None
            socket.send_fds(self._ours, [request.encode()], [theirs.fileno()])
        return self._process, ours


def fork_first_sampler() -> None:
    """Have ``bapo train`` fork its first sampler, here and in forks; imports what that needs."""
    for module in _IMPORTED:
        importlib.import_module(module)
    if not hasattr(train.train_process, "__wrapped__"):
        train.train_process = _with_standby(train.train_process)
        train.rollout_only_process = _with_standby(train.rollout_only_process)


def _with_standby(process: Callable[..., None]) -> Callable[..., None]:
    """``process``, whose first sampler is forked."""

    @functools.wraps(process)
    def run(config: RunConfig, **more: ForkSource | None) -> None:
        if os.environ["RANK"] == "0":
            _use(Standby())
        process(config, **more)

    return run


def _use(standby: Standby) -> None:
    """The next sampler of this process is ``standby``."""
    from bapo_megatron.rollout.sampler.client import SamplerClient

    launch = SamplerClient._launch

    def first(client: SamplerClient) -> tuple[ForkedProcess | subprocess.Popen[bytes], Connection]:
        SamplerClient._launch = launch  # type: ignore[method-assign]
        found = standby.become_sampler()
        client._is_set_up = False
        return found or launch(client)

    SamplerClient._launch = first  # type: ignore[method-assign, assignment]


def _wait_and_serve(requests: socket.socket) -> None:
    """Main function of the standby; it never returns."""
    code = 1
    try:
        _name(STANDBY)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 1)
        requests.close()
        if message:
            code = _serve(json.loads(message), descriptors[0])
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)


def _serve(request: dict[str, object], pipe: int) -> int:
    """The sampler, as ``python -m`` would run it; returns its exit code."""
    from bapo_megatron.rollout.sampler import process

    _name(SAMPLER)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_DFL)
    os.chdir(str(request["directory"]))
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[arg-type]
    sys.argv = [process.__file__, str(pipe)]
    try:
        process.main()
    except SystemExit as end:
        if not isinstance(end.code, str):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


def _name(name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
