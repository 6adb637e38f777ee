"""How an error that a user can mend ends a command: one message and an exit code."""

from __future__ import annotations

import multiprocessing
import os
import sys
from contextlib import suppress

from bapo_megatron.errors import ConfigError, RunStopped


def end_helpers() -> None:
    """End the processes with which megatron writes checkpoints.

    After a failure they may wait for ever to tell their results, and this process would wait for them; or
    they would outlive it.
    """
    for child in multiprocessing.active_children():
        child.kill()


def end_with(error: ConfigError | RunStopped, say: bool = True) -> int:
    """Print the message, if this process is to ``say`` it; the exit code, 2 or 3.

    A log on a full disk takes no message, and what is left in a buffer would change the exit code.
    """
    end_helpers()
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
    return 2 if wrong else 3
