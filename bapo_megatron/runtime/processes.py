"""Parent-death handling: child processes end with their parent, even after ``kill -9`` (no orphans).

This package's own programs first call ``die_with_parent``. A foreign program (SGLang, a user's command) runs
under a guardian process, ``guard``, which kills all descendants when the program or the parent ends: ``python
-I -S processes.py LIFELINE COMMAND...``. Linux only. Imports only the standard library: sandboxes and
guardians start from this file alone.

A *lifeline* is the read end of a pipe whose write end only the parent has; the kernel closes it when the
parent ends. child_process.py creates lifelines.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

_UNKILLABLE_S = 10.0
"""Wait limit for killed processes, seconds; one in an uninterruptible call (disk, driver) is left behind."""

_MOST_FILES = 1 << 20
"""Largest soft limit on open files to set: some programs loop over all numbers up to it."""


def allow_open_files() -> None:
    """Raise the soft limit on open files to the hard one, for this process and its children.

    Login shells and their jobs have a soft limit of 1024. A sampler needs a connection per request in flight,
    a rank one to each peer in each process group.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def die_with_parent(lifeline: int | None = None, parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends, even within C code.

    With a ``lifeline`` (file descriptor): SIGKILL to this process's group, which it must lead, at the end of
    the parent *process*. For children that any thread may start.

    Without one (PR_SET_PDEATHSIG): SIGKILL to this process alone, at the end of the *thread* that started it.
    For forks, and children of the parent's main thread. ``parent``: the process that must still exist.
    """
    if lifeline is not None:
        _signal_when_closed(lifeline, -os.getpgrp(), signal.SIGKILL)
        if _is_closed(lifeline):  # closed before the signal was set up
            os.killpg(0, signal.SIGKILL)
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def guard(lifeline: int, command: Sequence[str]) -> int:
    """Run a command as its guardian (subreaper): when the command or the parent ends, kill all descendants.

    Returns its exit code, negative for a signal. SIGTERM and SIGUSR1 do not end the guardian: sent to the
    process group they reach the command. If the guardian is killed, the command dies, too, but perhaps not
    its children.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # before the fork: orphans become children of this process
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # children inherit SIG_IGN but not a handler
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited SIG_IGN would suppress it
    changes = {signal.SIGCHLD, signal.SIGIO}
    # Blocked before the lifeline is armed and the command forked, so sigwait below misses neither end.
    signal.pthread_sigmask(signal.SIG_BLOCK, changes)
    _signal_when_closed(lifeline, os.getpid(), signal.SIGIO)
    guardian = os.getpid()
    guarded = os.fork()
    if guarded == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, changes)
        die_with_parent(parent=guardian)
        try:
            os.execvp(command[0], list(command))
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)
    while (code := _collect(guarded)) is None and not _is_closed(lifeline):
        signal.sigwait(changes)
    kill_descendants(guardian)
    last = _collect(guarded)  # reaps all others, too, as some containers' init does not
    code = last if code is None else code
    return -signal.SIGKILL if code is None else code


def kill_descendants(pid: int, limit_s: float = _UNKILLABLE_S) -> None:
    """SIGKILL the descendants of ``pid`` until none is left or ``limit_s`` seconds have passed."""
    deadline = time.monotonic() + limit_s
    while (alive := descendants(pid)) and time.monotonic() < deadline:
        for process in alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def descendants(pid: int) -> list[int]:
    """Return the process ids of all descendants of ``pid``, without zombies."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", errors="replace") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]  # a process name may contain ")"
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(name))
    pids = [pid]
    for process in pids:  # the list grows meanwhile
        pids += children.get(process, [])
    return pids[1:]


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def _signal_when_closed(lifeline: int, receiver: int, number: signal.Signals) -> None:
    """Set up signal-driven I/O (O_ASYNC) on a never-written pipe: one signal, when it closes."""
    os.set_inheritable(lifeline, False)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, receiver)
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, int(number))
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _is_closed(lifeline: int) -> bool:
    closed = select.poll()
    closed.register(lifeline, select.POLLIN)
    return bool(closed.poll(0))


def _collect(wanted: int) -> int | None:
    """Reap all ended children; return the exit code of ``wanted`` if it is among them."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == wanted:
                return os.waitstatus_to_exitcode(ended[1])
    return None


def _exit_like(code: int) -> None:
    """End this process as the command ended: by exit code or signal."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    _exit_like(guard(int(sys.argv[1]), sys.argv[2:]))
