"""Hang watchdog: a rank without progress prints the stacks of its threads and exits; the others follow.

Each rank of a run has one; the loop resets it before each update, and whenever it checks for preemption
(``trainer/flow_control.py``): within a step with the trainer's pi_old it does not check. Used by
``trainer/build.py`` and ``trainer/rollout_only.py``.
"""

from __future__ import annotations

import faulthandler


class Watchdog:
    """Watchdog timer: unless it is reset in time, it prints the stacks of all threads and exits with code 1.

    It starts when it is made, and a process can have one. It is a thread of C (faulthandler), so it works
    also where C code that hangs holds the interpreter. Made by ``trainer/build.py`` and
    ``trainer/rollout_only.py``; each reset is a ``beat``.
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
