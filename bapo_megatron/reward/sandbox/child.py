"""Program of a sandbox's processes: ``main`` isolates them, then runs test cases.

``sandbox.Sandbox`` starts it, without the run's environment variables, and sends a job and its cases as JSON
lines. The first process enters the namespaces and forks the server, process 1 inside them, which completes
the isolation and returns results, but runs no tested code: a fork of the server runs each case. The
interpreter is isolated (``python -I`` or its equivalent) and loads few modules of this package.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import types
from json import dumps
from typing import Any

from bapo_megatron.reward.sandbox import file_system, isolation, plain
from bapo_megatron.runtime.processes import die_with_parent

STANDARD_OUTPUT, VALUE = 1, 3

_COMMON_MODULES = (
    *("bisect", "collections", "copy", "datetime", "heapq", "io", "itertools", "math", "operator", "random"),
    *("re", "statistics", "string", "typing"),
)


def main(lifeline: int) -> None:
    """Entry point: isolate this process, then serve the cases of one source."""
    die_with_parent(lifeline)
    for number in (signal.SIGUSR1, signal.SIGTERM):  # sent to all processes of a job, for the trainer
        signal.signal(number, lambda *_: None)
    job: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    first = os.getpid()
    walls = isolation.enter_namespaces(job["box"], first)
    die_with_parent(lifeline)  # again: a change of user resets it
    server = os.fork()
    if server:
        isolation.be_untraceable()
        signal.signal(signal.SIGUSR2, lambda *_: _end(server))
        for descriptor in (sys.stdin.fileno(), sys.stdout.fileno()):  # so the server's end shows
            os.close(descriptor)
        os.waitpid(server, 0)
        os._exit(0)
    os.close(lifeline)
    readable = job["readable"] or file_system.readable()
    isolation.confine_sandbox(walls, job["box"], readable, first)
    die_with_parent()  # last: a change of user resets it
    os.chdir(job["box"])
    for name in _COMMON_MODULES if job["prelude"] else ():
        __import__(name)  # once for all cases
    _answer({"hold": walls.hold, "notes": walls.notes, "readable": readable})
    for line in iter(sys.stdin.buffer.readline, b""):
        _answer(_run(walls, job, json.loads(line)))
    os._exit(0)


def _end(server: int) -> None:
    """Kill the server and its programs; if root may not kill another user's processes, exit to end them."""
    try:
        os.kill(server, signal.SIGKILL)
    except PermissionError:
        os._exit(1)


def _answer(answer: object) -> None:
    sys.stdout.write(dumps(answer) + "\n")
    sys.stdout.flush()


def _run(walls: isolation.Walls, job: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    stdin, printed, told = files = [os.memfd_create(name) for name in ("stdin", "stdout", "value")]
    with open(stdin, "wb", closefd=False) as file:
        file.write(case.get("stdin", "").encode(errors="replace"))
    os.lseek(stdin, 0, os.SEEK_SET)
    token = os.urandom(16).hex()
    running = os.fork()
    if not running:
        _be_alone(stdin, printed, told)
        _be_the_case(walls, job, case, token)  # never returns
    _, status, used = os.wait4(running, 0)
    value = _content(told)
    result = {
        "code": os.waitstatus_to_exitcode(status),
        "output": _content(printed),
        "value": value[len(token) :] if value.startswith(token) else None,
        "time_s": used.ru_utime + used.ru_stime,
    }
    for descriptor in files:
        os.close(descriptor)
    return result


def _content(descriptor: int) -> str:
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        return file.read(isolation.OUTPUT_BYTES).decode(errors="replace")


# --- the fork of a case --------------------------------------------------------------------------


def _be_alone(stdin: int, printed: int, told: int) -> None:
    """Redirect standard streams, close the server's descriptors, and unload this package's modules."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number, descriptor in enumerate((stdin, printed, nowhere, told)):
        os.dup2(descriptor, number)
    os.closerange(VALUE + 1, 4096)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="replace")  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(STANDARD_OUTPUT, "w", encoding="utf-8", errors="replace")  # type: ignore[misc]  # noqa: SIM115
    for name in [name for name in sys.modules if name.startswith("bapo_megatron")]:
        del sys.modules[name]


def _be_the_case(walls: isolation.Walls, job: dict[str, Any], case: dict[str, Any], token: str) -> None:
    """Run the source, then end like a script or write the value of the case's expression. Never returns."""
    isolation.confine_program(walls, job["memory_mb"], job["cpu_s"])
    is_script = "stdin" in case
    module = types.ModuleType("__main__" if is_script else "solution")
    sys.modules["__main__"] = sys.modules[module.__name__] = module
    space = module.__dict__
    if job["recursion_limit"]:
        sys.setrecursionlimit(job["recursion_limit"])
    if is_script:
        for source in (job["prelude"], job["source"]):
            plain.execute(source, "<solution>", space)
        _end_script(space)
    _write_value(token + plain.told(case, job["prelude"], job["source"], space))


def _end_script(space: dict[str, Any], leave: Any = os._exit) -> None:
    """Exit like the interpreter but without its teardown, which is five times as fast."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    printed = sys.stdout
    space.clear()  # closes its files
    for stream in (printed, sys.__stdout__):
        if stream is not None and not stream.closed:
            stream.flush()
    leave(0)


def _write_value(text: str, write: Any = os.write, leave: Any = os._exit) -> None:
    """Write the value and exit. Defaults bind the functions: tested code may replace those in modules."""
    data = text.encode()
    while data:
        data = data[write(VALUE, data) :]
    leave(0)
