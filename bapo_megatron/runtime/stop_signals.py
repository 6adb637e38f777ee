"""Stop signals: handlers of SIGUSR1 and SIGTERM, as Slurm sends them, and SIGHUP of a closed terminal.

``handling`` is the context manager that installs a handler, in the main thread. Only the standard library is
imported, so that a command handles the signals before it has loaded anything. Used in ``commands/``,
``rollout/sampler/``, ``workers/`` and this folder.
"""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)

Handler = Callable[[int, FrameType | None], None]


@contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Context manager: ``handler`` for each of ``SIGNALS``, instead of the end of this process.

    An ignored SIGHUP stays ignored, as under nohup. After a SIGHUP output goes to /dev/null: the terminal is
    gone.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        handler(number, frame)
        if number == signal.SIGHUP:
            leave_terminal()

    before = {}
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def leave_terminal() -> None:
    """Redirect stdout and stderr to /dev/null, if they are a terminal or a pipe.

    A terminal that has hung up fails every write, and so does a pipe to ``tee``, which ended with it.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        with suppress(OSError):
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
                os.dup2(nowhere, descriptor)
    os.close(nowhere)


def stop_at_once(number: int, _frame: FrameType | None) -> None:
    """Handler before a run has begun: there is nothing to save, so this process exits with 85 at once."""
    name = signal.Signals(number).name
    text = f"stopped: told to stop by {name} before the run began\nthe same command continues the run\n"
    with suppress(OSError):
        os.write(2, text.encode())
    os._exit(85)
