"""Code sandbox: runs an untrusted program on test cases, in an isolated process tree (docs/rewards.md).

``Sandbox(source, ...)`` starts one; its ``run``, ``value`` and ``judge`` block for one case, and return an
``Ended``, or None if the case exceeds its limit. The limit counts CPU time and sleep, not wall-clock time: a
busy or paused machine makes no program slow. Raises SandboxError if the sandbox itself fails.

A sandbox starts even if the kernel refuses some isolation layers (walls), and lists those in ``notes``. Code
rewards need all walls: ``checked_sandbox`` runs a trial program before a run and in each worker, and raises
ConfigError for missing walls unless ``reward.allow_weak_sandbox`` is set.
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
"""Seconds for an interpreter and its isolation to start on a busy machine."""

# Uses the module's name, so that it is imported here: sandboxes write no bytecode.
_BEGIN = f"""import sys
sys.path.insert(0, sys.argv[1])
from {child.__name__} import main
del sys.path[0]
main(int(sys.argv[2]))
"""

CLOCK_FACTOR = 10
"""Clock limit, as a multiple of a time limit. Beyond it the machine gave no CPU: the result is unknown."""

END_LIMIT_S = 5.0
"""Seconds for the isolated processes to end before the rest is killed."""

FIX = (
    "in Docker: --security-opt seccomp=unconfined --security-opt apparmor=unconfined; "
    "on Ubuntu 24.04: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0; "
    "elsewhere: sysctl -w user.max_user_namespaces=15000"
)
"""Settings that grant namespaces, for messages."""

_PROBE_S = 20.0

_READABLE: dict[str, list[str]] = {}
"""Cache of `file_system.readable` by interpreter."""


class SandboxError(Exception):
    """Raised if the sandbox, not the tested code, fails: it did not start, was killed, or got no CPU."""


@dataclass(frozen=True)
class Ended:
    """Result of a test case that ended in time: exit code, output, value of an expression, seconds."""

    code: int
    """Exit code; negative for a signal."""
    output: str
    """Standard output, up to `isolation.OUTPUT_BYTES`."""
    value: str | None
    """JSON of the expression's value, see `plain.encoded`; None without one."""
    time_s: float = 0.0
    """Seconds that count against limits: CPU time of all threads, and sleep."""


class Sandbox:
    """Isolated processes for one program (``source``), as a context manager; each test case (``run``,
    ``value``, ``judge``) runs in a fork. Cases share a temporary directory. After a call that returned None
    (out of time) there may be no other."""

    def __init__(
        self,
        source: str,
        prelude: str,
        memory_mb: int,
        case_limit_s: float,
        hash_seed: int | None = None,
        recursion_limit: int | None = None,
    ) -> None:
        """Start and isolate the sandbox. Raises SandboxError. ``prelude`` runs before the source in its
        namespace. ``hash_seed`` fixes text hashes, so that a repeated program sees its sets in the same
        order; None: random. ``recursion_limit``: None for Python's own."""
        self._box = box = os.path.realpath(tempfile.mkdtemp(prefix="bapo_box_"))
        self._case_limit_s = case_limit_s
        self.used_s = 0.0
        """Total time of all cases so far, see `Ended.time_s`."""
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
        if hash_seed is not None:  # -I would ignore the variable; -P and -s are its other parts
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
        if not answer["hold"]:
            self.close()
            raise SandboxError(f"nothing would hold programs on this machine: {'; '.join(self.notes)}")
        _READABLE[sys.executable] = answer["readable"]

    def run(self, stdin: str, limit_s: float) -> Ended | None:
        """Run the source as a script on ``stdin``. Returns None if it exceeds ``limit_s``, see
        `Ended.time_s`. Raises SandboxError if the program's result is unknown."""
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
        """Import the source, run ``setup``, and evaluate the expression with ``arguments`` as ARGUMENTS.
        ``truth``: to true or false. ``objects``: see `plain.encoded`. Returns and raises as ``run`` does."""
        kinds = {"truth": truth, "objects": objects}
        return self._ask({"expression": expression, "arguments": arguments, "setup": setup, **kinds}, limit_s)

    def judge(self, judgements: list[tuple[str, str]], limit_s: float, setup: str = "") -> Ended | None:
        """Evaluate judgements in a process that never ran the source; the value is whether all are true.
        ``judgements``: expressions, each with the JSON value of another case as its ARGUMENTS."""
        return self._ask({"judgements": judgements, "setup": setup}, limit_s)

    def close(self) -> None:
        """End every process of the sandbox and delete its directory."""
        try:
            os.kill(self._child.pid, signal.SIGUSR2)  # it ends and reaps the isolated processes
        except ProcessLookupError:
            pass
        except PermissionError:  # root that may only signal its own processes
            self._child.end_questions()
        self._child.wait_end(END_LIMIT_S)
        self._child.close()
        remove_tree(self._box)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, case: dict[str, Any], limit_s: float) -> Ended | None:
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
                f"{clock.used_s:g} s of processor time, of {limit_s:g} s; lower reward.workers, or run "
                "fewer other programs beside; /proc must not be mounted with hidepid"
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
    """Clock of a running case, read from /proc: its CPU time, and the time in which all its threads slept;
    ``watch`` raises past the limit. Includes processes that the case may have started where a wall is
    missing. Waiting for a CPU or a disk, or being stopped, does not count. A pause of this process counts as
    sleep for at most 2 ``WATCH_S``."""

    def __init__(self, first: int, limit_s: float) -> None:
        """``first``: the sandbox's first process, the case's grandparent."""
        self._first, self._limit_s = first, limit_s
        self._looked = time.monotonic()
        self.used_s = self.slept_s = 0.0

    def watch(self) -> None:
        """Update the times. Raises _OutOfTime if the case has exceeded its limit."""
        looked, self._looked = self._looked, time.monotonic()
        with suppress(OSError, ValueError):  # just ended, or /proc is not readable
            [server] = _children_of(self._first)
            processes = list(_descendants_of(server))
            states = {_stat(thread)[0] for process in processes for thread in _threads_of(process)}
            self.slept_s += min(self._looked - looked, 2 * WATCH_S) if {"S"} <= states <= {"S", "Z"} else 0.0
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
    """Return the fields of a process or thread after its name, which may have any characters."""
    with open(f"{folder}/stat", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def _out_of_memory_kills() -> int:
    """Return the number of out-of-memory kills in any cgroup since boot."""
    with suppress(OSError), open("/proc/vmstat") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    return 0


def _environment(box: str) -> dict[str, str]:
    """Return the sandbox's environment variables: none of the run's, which may hold keys."""
    return {
        "HOME": box,
        "TMPDIR": box,
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def sandbox_notes() -> list[str]:
    """Return the walls missing on this machine, found by a trial program. Raises SandboxError if it fails."""
    with Sandbox("print(input())", "", memory_mb=1024, case_limit_s=_PROBE_S) as sandbox:
        ended = sandbox.run("seen", limit_s=_PROBE_S)
        if ended is None or ended.output != "seen\n":
            raise SandboxError(f"the sandbox for code rewards does not work on this machine: {ended}")
        return sandbox.notes


def checked_sandbox(allow_weak: bool) -> list[str]:
    """Return ``sandbox_notes``. Raises ConfigError on failure, or for missing walls unless ``allow_weak``."""
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
