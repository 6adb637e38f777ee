"""A process that hangs says where, and ends: the others end with it, and the job can be started again."""

from __future__ import annotations

import faulthandler


class Watchdog:
    """Prints the stacks of all threads to stderr and ends this process with exit code 1 after a silence.

    It is a thread of C: it works also where Python's interpreter is held by what hangs.
    """

    def __init__(self, minutes: float) -> None:
        """``minutes`` between two signs of life; 0 for no watchdog."""
        self._limit_s = 60 * minutes
        self.beat()

    def beat(self) -> None:
        """A sign of life."""
        if self._limit_s:
            faulthandler.dump_traceback_later(self._limit_s, exit=True, file=2)

    def close(self) -> None:
        """Nobody is watched any more."""
        if self._limit_s:
            faulthandler.cancel_dump_traceback_later()
