"""Parent-death handling: child processes end with their parent, also after ``kill -9`` (no orphans).

Our own programs call ``die_with_parent`` first thing. A foreign program (SGLang, a user's command) runs under
a guardian process, ``guard``: ``python -I -S processes.py LIFELINE COMMAND...``. Linux only, and only the
standard library is imported: sandboxes and guardians start from this file alone.

A *lifeline* is the reading end of a pipe whose writing end only the parent has: the kernel closes that when
the parent ends. child_process.py makes them.
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
"""Limit of the wait for killed processes; one in an uninterruptible call (disk, driver) is left behind."""

_MOST_FILES = 1 << 20
"""Largest soft limit on open files that is set: where there is no limit, some programs loop up to it."""


def allow_open_files() -> None:
    """Raise the soft limit on open files to the hard one, for this process and its children.

    Login shells, and the jobs that they submit, have a soft limit of 1024. A sampler needs a connection for
    each request in flight, a rank one to each peer of each process group.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def die_with_parent(
    lifeline: int | None = None, parent: int | None = None, number: signal.Signals = signal.SIGKILL
) -> None:
    """Parent-death signal: the kernel signals this process when its parent ends, also within C code.

    With a ``lifeline`` (a file descriptor): SIGKILL to this process and all of its process group, which must
    be its own, at the end of the parent *process*. For children that any thread may start.

    Without (PR_SET_PDEATHSIG): ``number`` to this process alone, at the end of the *thread* that started it.
    For forks, and children of the parent's main thread. ``parent``: the process that must still be there.
    """
    if lifeline is not None:
        _signal_when_closed(lifeline, -os.getpgrp(), signal.SIGKILL)
        if _is_closed(lifeline):  # before the signal was ordered
            os.killpg(0, signal.SIGKILL)
        return
    _prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)


def guard(lifeline: int, command: Sequence[str]) -> int:
    """Guardian (subreaper) of a command: when it or the parent ends, kill all of its descendants.

    Returns its exit code, negative for a signal. SIGTERM and SIGUSR1 do not end the guardian: sent to the
    process group they reach the command. If the guardian is killed, the command dies with it; its children
    may not.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # before the fork: orphans become children of this process
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # a handler, unlike SIG_IGN, is not inherited
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, which is inherited, none would come
    changes = {signal.SIGCHLD, signal.SIGIO}
    # Blocked before the lifeline is armed and the command is forked: sigwait below then misses neither end.
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
    last = _collect(guarded)  # reaps all others too: not every container's init does
    code = last if code is None else code
    return -signal.SIGKILL if code is None else code


def kill_descendants(pid: int, limit_s: float = _UNKILLABLE_S) -> None:
    """SIGKILL the descendants of ``pid`` until none is left, or ``limit_s`` seconds are over."""
    deadline = time.monotonic() + limit_s
    while (alive := descendants(pid)) and time.monotonic() < deadline:
        for process in alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def descendants(pid: int) -> list[int]:
    """Process ids of the children of ``pid``, their children, and so on, without zombies."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", errors="replace") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]  # a process's name may hold ")"
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(name))
    pids = [pid]
    for process in pids:  # which grows
        pids += children.get(process, [])
    return pids[1:]


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def _signal_when_closed(lifeline: int, receiver: int, number: signal.Signals) -> None:
    """Signal-driven I/O (O_ASYNC) on a pipe that is never written to: one signal, when it closes."""
    os.set_inheritable(lifeline, False)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, receiver)
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, int(number))
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _is_closed(lifeline: int) -> bool:
    closed = select.poll()
    closed.register(lifeline, select.POLLIN)
    return bool(closed.poll(0))


def _collect(wanted: int) -> int | None:
    """Reap all children that have ended; the exit code of ``wanted`` if it is one of them."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == wanted:
                return os.waitstatus_to_exitcode(ended[1])
    return None


def _exit_like(code: int) -> None:
    """End this process as the command ended: with its exit code, or by its signal."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    _exit_like(guard(int(sys.argv[1]), sys.argv[2:]))
