"""Forked process of one arm of a study, so that the imports are paid once for all arms."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from bapo_megatron.runtime.processes import die_with_parent

Main = Callable[[Sequence[str]], int]
"""The ``bapo`` command as a function: arguments to exit code."""

_CRASHED = 70


class Life:
    """A forked process that runs ``main(command)``, writes to ``log`` and dies with this one.

    This process must not have computed anything yet: a fork does not take the threads of torch along.
    """

    def __init__(self, main: Main, command: Sequence[str], log: Path, threads: int) -> None:
        self._code: int | None = None
        study = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _live(main, command, log, threads, study)

    def code(self) -> int | None:
        """The exit code, negative for a signal; None while it lives."""
        if self._code is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if found else None
        return self._code

    def tell(self, number: signal.Signals) -> None:
        """Send the process a signal, if it lives."""
        if self.code() is None:
            os.kill(self.pid, number)


def _live(main: Main, command: Sequence[str], log: Path, threads: int, study: int) -> None:
    """Main function of the forked process; it never returns."""
    code = _CRASHED
    try:
        os.setsid()  # Ctrl-C is for the study, which signals its arms
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        die_with_parent(parent=study, number=signal.SIGTERM)
        _write_to(log)
        _limit_threads(threads)
        code = main(command)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _write_to(log: Path) -> None:
    """Output of this process, and of those that it starts, goes to the end of ``log``, a line at a time."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # New streams: the old ones may hold what the study has not yet written.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _limit_threads(threads: int) -> None:
    """Limit the threads of this process and of those that it starts."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(threads)
