"""Exit codes of the command line: how an error that a user can mend becomes one message and a number."""

from __future__ import annotations

import multiprocessing
import os
import sys
from contextlib import suppress

from bapo_megatron.errors import ConfigError, Preempted, RunStopped, StorageFailed


def end_with(error: ConfigError | Preempted | RunStopped, say: bool = True) -> int:
    """The exit code of an error: 2 wrong input, 3 full disk or stopped run, 4 failing storage, 85 preempted.

    Prints the message on stderr, unless ``say`` is False (another rank says it).

    A log on a full disk takes no message, and what is left in a buffer would change the exit code. Processes
    that write a checkpoint may wait for ever to tell their results, and this one would wait for them.
    """
    for child in multiprocessing.active_children():
        child.kill()
    wrong = isinstance(error, ConfigError)
    text = f"error: {error}" if wrong else f"stopped: {error}\nthe same command continues the run"
    with suppress(OSError):
        if say:
            print(text, file=sys.stderr, flush=True)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if wrong:
        return 2
    if isinstance(error, Preempted):
        return 85
    return 4 if isinstance(error, StorageFailed) else 3
