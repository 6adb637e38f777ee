"""Code sandbox: runs untrusted programs, one isolated process tree for each source (docs/rewards.md).

Calls block. Layers of isolation (walls) that the kernel does not grant are only noted by a sandbox; code
rewards need every one, and ``checked_sandbox``, a preflight by a trial program, refuses a machine that lacks
some, unless ``reward.allow_weak_sandbox`` is set.

A case's limit counts its processor time and its sleep, not the clock: a busy or paused machine makes no
program slow.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import bapo_megatron
from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.sandbox import child
from bapo_megatron.runtime.child_process import WATCH_S, AnsweringChild, ChildDied, ChildError, ChildTimeout
from bapo_megatron.workers.scratch import remove_tree

START_LIMIT_S = 20.0
"""Seconds for an interpreter and its isolation on a busy machine."""

# The name is taken from the module, so that it is imported here: the sandboxes write no bytecode.
_BEGIN = f"""import sys
sys.path.insert(0, sys.argv[1])
from {child.__name__} import main
del sys.path[0]
main(int(sys.argv[2]))
"""

CLOCK_FACTOR = 10
"""Longest time of a case, or of a response, on the clock, as a multiple of its limit: then the machine gave
it no processor, and nothing is known of the program."""

END_LIMIT_S = 5.0
"""Seconds for the isolated processes to end; then the rest is killed."""

FIX = (
    "in Docker: --security-opt seccomp=unconfined --security-opt apparmor=unconfined; "
    "on Ubuntu 24.04: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0; "
    "elsewhere: sysctl -w user.max_user_namespaces=15000"
)
"""Settings that grant namespaces, for messages."""

_PROBE_S = 20.0

_READABLE: dict[str, list[str]] = {}
"""Cache of `file_system.readable`, by interpreter."""


class SandboxError(Exception):
    """Failure of the sandbox itself: it did not start, was killed, or had no processor.

    That of tested code is an ``Ended`` with its exit code, or None.
    """


@dataclass(frozen=True)
class Ended:
    """Result of one test case that ended, as plain data: exit code, output, value."""

    code: int
    """Exit code; negative for a signal."""
    output: str
    """Standard output, up to `isolation.OUTPUT_BYTES`."""
    value: str | None
    """JSON of the expression's value, see `plain.encoded`; None if it gave none."""
    time_s: float = 0.0
    """What counts against limits: seconds of processor time, of all its threads, and of sleep."""


class Sandbox:
    """Sandbox of one source, a context manager of its isolated processes; each case is a fork of them.

    All cases share a temporary directory. After a case that gave None (out of time) the sandbox takes no
    other.
    """

    def __init__(
        self,
        source: str,
        prelude: str,
        memory_mb: int,
        case_limit_s: float,
        hash_seed: int | None = None,
        recursion_limit: int | None = None,
    ) -> None:
        """Start and isolate it; raises SandboxError. ``prelude`` runs before the source in its namespace.
        ``hash_seed``: of the hashes of texts, so that a program that runs again sees its sets in one order;
        None: others in each sandbox. ``recursion_limit``: None for Python's own."""
        self._box = box = os.path.realpath(tempfile.mkdtemp(prefix="bapo_box_"))
        self._case_limit_s = case_limit_s
        self.used_s = 0.0
        """Sum of the times of its cases so far, see `Ended.time_s`."""
        self._out_of_memory = _out_of_memory_kills()
        job = {
            "source": source,
            "prelude": prelude,
            "box": box,
            "memory_mb": memory_mb,
            "cpu_s": math.ceil(case_limit_s) + 1,
            "recursion_limit": recursion_limit,
            "readable": _READABLE.get(sys.executable),
        }
        root = str(Path(bapo_megatron.__file__).resolve().parents[1])
        variables, isolated = _environment(box), ["-I"]
        if hash_seed is not None:  # a variable, which -I would ignore; its other two parts are kept
            variables, isolated = {**variables, "PYTHONHASHSEED": str(hash_seed)}, ["-P", "-s"]
        command = [sys.executable, *isolated, "-B", "-X", "utf8", "-c", _BEGIN, root]
        try:
            self._child = AnsweringChild(command, variables, Path(box), quiet=True)
        except BaseException:
            remove_tree(self._box)
            raise
        try:
            answer = self._child.ask(job, START_LIMIT_S)
        except ChildError as error:
            self.close()
            raise SandboxError(f"the sandbox did not start: {error!r}") from error
        self.notes: list[str] = answer["notes"]
        _READABLE[sys.executable] = answer["readable"]

    def run(self, stdin: str, limit_s: float) -> Ended | None:
        """Run the source as a script on ``stdin``. None if it took more than ``limit_s``, see `Ended.time_s`.

        SandboxError if nothing is known of the program.
        """
        return self._ask({"stdin": stdin}, limit_s)

    def value(
        self,
        expression: str,
        limit_s: float,
        arguments: Any = None,
        setup: str = "",
        truth: bool = False,
        objects: bool = False,
    ) -> Ended | None:
        """Import the source, run ``setup``, evaluate the expression, in which ARGUMENTS are the arguments.

        ``truth``: the value is whether it is true. ``objects``: see `plain.encoded`. None as for ``run``.
        """
        kinds = {"truth": truth, "objects": objects}
        return self._ask({"expression": expression, "arguments": arguments, "setup": setup, **kinds}, limit_s)

    def judge(self, judgements: list[tuple[str, str]], limit_s: float, setup: str = "") -> Ended | None:
        """Whether all expressions are true where the source never ran.

        ``judgements``: expressions, each with the value of another case, which is its ARGUMENTS.
        """
        return self._ask({"judgements": judgements, "setup": setup}, limit_s)

    def close(self) -> None:
        """End every process of the sandbox and delete its directory."""
        try:
            os.kill(self._child.pid, signal.SIGUSR2)  # it ends and collects those behind the walls
        except ProcessLookupError:
            pass
        except PermissionError:  # root that may signal its own processes alone
            self._child.end_questions()
        self._child.wait_end(END_LIMIT_S)
        self._child.close()
        remove_tree(self._box)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, case: dict[str, Any], limit_s: float) -> Ended | None:
        """Run a case in the child. After None the sandbox is lost, and takes no other case."""
        limit_s = min(limit_s, self._case_limit_s)
        clock = _CaseClock(self._child.pid, limit_s)
        clock_limit_s = CLOCK_FACTOR * limit_s + START_LIMIT_S
        try:
            ended = Ended(**self._child.ask(case, clock_limit_s, clock.watch))
        except _OutOfTime:
            ended = None
        except ChildTimeout:
            raise SandboxError(
                f"nothing is known of the program: in {clock_limit_s:g} s this machine gave it "
                f"{clock.used_s:g} s of processor time, of {limit_s:g} s; {clock.advice}"
            ) from None
        except ChildDied as error:
            raise SandboxError(f"the sandbox was killed while a program ran: {error}") from error
        if ended is not None:
            ended = replace(ended, time_s=max(ended.time_s, clock.used_s) + clock.slept_s)
            if ended.code == -signal.SIGKILL and _out_of_memory_kills() > self._out_of_memory:
                raise SandboxError(
                    "the program was killed while this machine was out of memory; lower reward.workers or "
                    "reward.memory_limit_mb"
                )
        self.used_s += limit_s if ended is None else ended.time_s
        return None if ended is None or ended.time_s > limit_s else ended


class _OutOfTime(Exception):
    pass


class _CaseClock:
    """Clock of a running case, read from /proc: its processor time, and the time in which all of it slept.

    Processes that it may have started where a wall is missing count, too. Waiting for a processor or a disk,
    or being stopped, counts for nothing. A pause of this process counts as two looks at most.
    """

    def __init__(self, first: int, limit_s: float) -> None:
        """``first``: the sandbox's first process, the case's grandparent."""
        self._first, self._limit_s = first, limit_s
        self._looked = time.monotonic()
        self.used_s = self.slept_s = 0.0
        self.advice = "it slept, if /proc does not show it: mount that without hidepid"
        """What to do where nothing is known of the case."""

    def watch(self) -> None:
        """Look at the case. _OutOfTime if it has had its time."""
        looked, self._looked = self._looked, time.monotonic()
        with suppress(OSError, ValueError):  # it has just ended, or /proc is not readable
            [server] = _children_of(self._first)
            processes = list(_descendants_of(server))
            states = {_stat(thread)[0] for process in processes for thread in _threads_of(process)}
            self.slept_s += min(self._looked - looked, 2 * WATCH_S) if {"S"} <= states <= {"S", "Z"} else 0.0
            self.advice = "lower reward.workers, or run fewer other programs beside"
            ticks = sum(int(ticks) for process in processes for ticks in _stat(f"/proc/{process}")[11:15])
            self.used_s = max(self.used_s, ticks / os.sysconf("SC_CLK_TCK"))
        if self.used_s + self.slept_s > self._limit_s:
            raise _OutOfTime


def _threads_of(pid: int) -> list[str]:
    return [f"/proc/{pid}/task/{thread}" for thread in os.listdir(f"/proc/{pid}/task")]


def _children_of(pid: int) -> list[int]:
    children: list[int] = []
    for thread in _threads_of(pid):
        with open(f"{thread}/children") as file:
            children += map(int, file.read().split())
    return children


def _descendants_of(pid: int) -> Iterator[int]:
    for process in _children_of(pid):
        yield process
        yield from _descendants_of(process)


def _stat(folder: str) -> list[str]:
    """Fields of a process or thread behind its name, which may have any characters."""
    with open(f"{folder}/stat", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def _out_of_memory_kills() -> int:
    """Number of processes that the kernel has killed since its start for want of memory, in any cgroup."""
    with suppress(OSError), open("/proc/vmstat") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    return 0


def _environment(box: str) -> dict[str, str]:
    """Environment variables of the sandbox: none of the run's, which may hold keys."""
    return {
        "HOME": box,
        "TMPDIR": box,
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def sandbox_notes() -> list[str]:
    """Missing walls on this machine, found by a trial program; SandboxError if the sandbox does not work."""
    with Sandbox("print(input())", "", memory_mb=1024, case_limit_s=_PROBE_S) as sandbox:
        ended = sandbox.run("seen", limit_s=_PROBE_S)
        if ended is None or ended.output != "seen\n":
            raise SandboxError(f"the sandbox for code rewards does not work on this machine: {ended}")
        return sandbox.notes


def checked_sandbox(allow_weak: bool) -> list[str]:
    """``sandbox_notes``. ConfigError if the sandbox does not work, or lacks walls without ``allow_weak``."""
    try:
        notes = sandbox_notes()
    except SandboxError as error:
        raise ConfigError(str(error)) from error
    if notes and not allow_weak:
        raise ConfigError(
            f"the sandbox for code rewards lacks walls on this machine: {'; '.join(notes)}. Grant namespaces "
            f"({FIX}), or run without these walls by reward.allow_weak_sandbox=True "
            "(docs/rewards.md#the-sandbox)"
        )
    return notes
