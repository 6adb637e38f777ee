"""The hang watchdog: a rank that makes no progress prints its stacks and ends, and the others end with it."""

from __future__ import annotations

import faulthandler


class Watchdog:
    """A timer that prints the stacks of all threads and ends this process with code 1, unless it is reset.

    It is a thread of C (faulthandler): it works also where C code that hangs holds the interpreter.
    """

    def __init__(self, minutes: float) -> None:
        """``minutes``: the longest time between two calls of ``beat``; 0 for no watchdog."""
        self._limit_s = 60 * minutes
        self.beat()

    def beat(self) -> None:
        """Reset the timer: this rank makes progress."""
        if self._limit_s:
            faulthandler.dump_traceback_later(self._limit_s, exit=True, file=2)

    def close(self) -> None:
        """Stop the timer."""
        if self._limit_s:
            faulthandler.cancel_dump_traceback_later()
