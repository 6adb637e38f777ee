"""The fork server: ``bapo`` commands in processes forked from one that has imported everything.

To import torch, Megatron and transformers takes ten seconds of a core, and a test starts several commands.
``python -m tests.support.fork_server FD shared`` listens at the socket FD, and forks a server for each test
process that connects (forked_commands.py): the workers of a session share its imports. It ends with the
session, by the guardian; ``own`` instead of ``shared``: with the process that has started it.
A request is a message of JSON with the arguments, the directory, the environment and the source (the folder
of another copy of the project, or empty), and two descriptors: the command's output, and a socket that is
told its process id and, when it has ended, its exit code. Commands have sessions of their own, and end with
their server, which ends with the test process. The arguments ``-c CODE`` are a program instead of a command.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress

from bapo_megatron.runtime.processes import die_with_parent
from tests.support.at_start import sitecustomize  # noqa: F401  # its hook, for what is forked
from tests.support.forked_sampler import fork_first_sampler

_LONGEST = 1 << 20
"""Bytes of a request."""

_IMPORTED = (
    *("bapo_megatron.train", "bapo_megatron.trainer.build", "bapo_megatron.trainer.preflight"),
    *(
        "torch.utils.tensorboard",
        "bapo_megatron.commands.report.data",
        "bapo_megatron.trainer.flow_control",
    ),
)
"""What commands import late, with all that these import."""
_OURS = {
    "bapo_megatron",
    "bapo_rehearsal",
    "benchmarks",
    "checkpoints_tools",
    "recipes",
    "slurm",
    "studies",
    "tests",
}


class ForkServer:
    """Forks a process for each request of a test process, and tells how it has ended."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._running: dict[int, tuple[int, socket.socket]] = {}
        """By a descriptor that is readable when the process has ended: its id, and whom to tell."""

    def next_command(self) -> list[str] | None:
        """In each forked process the arguments of its command; in the server None, when tests have ended."""
        while True:
            ready, _, _ = select.select([self._requests, *self._running], [], [])
            for ended in ready:
                if ended is not self._requests:
                    self._collect(ended)
            if self._requests in ready:
                message, descriptors, _, _ = socket.recv_fds(self._requests, _LONGEST, 2)
                if not message:
                    return None
                if (arguments := self._fork(json.loads(message), *descriptors)) is not None:
                    return arguments

    def kill_all(self) -> None:
        """End every command and its session."""
        for pid, _ in self._running.values():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _fork(self, request: dict[str, object], output: int, told: int) -> list[str] | None:
        parent, teller = os.getpid(), socket.socket(fileno=told)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            die_with_parent(parent=parent)
            with teller:
                teller.send(str(os.getpid()).encode())  # not before it leads its session
            self._become(request, output)
            return request["arguments"]  # type: ignore[return-value]
        os.close(output)
        self._running[os.pidfd_open(pid)] = (pid, teller)
        return None

    def _become(self, request: dict[str, object], output: int) -> None:
        """What distinguishes the command's process from the server's."""
        self._requests.close()
        for ended, (_, teller) in self._running.items():
            os.close(ended)
            teller.close()
        for number in (1, 2):
            os.dup2(output, number)
        os.close(output)
        os.chdir(str(request["directory"]))
        os.environ.clear()
        os.environ.update(request["environment"])  # type: ignore[arg-type]
        own = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))  # an interpreter reads it once
        sys.path[1:1] = [folder for folder in own if folder not in sys.path]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
        if request["source"]:
            import_from(str(request["source"]))

    def _collect(self, ended: int) -> None:
        pid, teller = self._running.pop(ended)
        os.close(ended)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with teller, suppress(OSError):  # the test may be over
            teller.send(str(code).encode())


def import_all() -> None:
    """What commands import, before they are asked for."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_WAIT_POLICY="PASSIVE")
    gc.disable()
    for module in _IMPORTED:
        importlib.import_module(module)
    fork_first_sampler()
    gc.enable()
    gc.collect()
    gc.freeze()


def import_from(source: str) -> None:
    """Forget the project's modules: what is imported from now on is that of the folder ``source``."""
    for name in [name for name in sys.modules if name.partition(".")[0] in _OURS]:
        del sys.modules[name]
    sys.path.insert(0, source)
    importlib.import_module("tests.support.forked_sampler").fork_first_sampler()


def next_test_process(listener: socket.socket) -> socket.socket:
    """In each forked process the connection of one test process; the first process forks on."""
    own = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that nobody has to wait for them
    while True:
        connection, _ = listener.accept()
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user == os.getuid() and os.fork() == 0:  # the name has no permissions: whoever knows it connects
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent(parent=own)
            listener.close()
            return connection
        connection.close()


def main() -> int:
    """See the top of the file. In a forked process: its command."""
    if sys.argv[2] == "own":
        die_with_parent()
    import_all()
    server = ForkServer(next_test_process(socket.socket(fileno=int(sys.argv[1]))))
    arguments = server.next_command()
    if arguments is None:
        server.kill_all()
        return 0
    from bapo_megatron import cli

    sys.argv = ["bapo", *arguments]
    if arguments[0] != "-c":
        return cli.run(arguments)
    exec(arguments[1], {"__name__": "__main__"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
