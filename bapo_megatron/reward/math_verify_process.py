"""Equality of mathematical answers by math-verify, from any thread of any process: in a child process.

It serves the checks before a run. In a run the workers of the pool (pool.py) call math_verify_compare.py.
"""

from __future__ import annotations

import os
import sys
import threading

from bapo_megatron.runtime.child_process import AnsweringChild, ChildError, with_import_path

COMMAND = (sys.executable, "-m", "bapo_megatron.reward.worker")

START_LIMIT_S = 120.0
"""Seconds for the imports of a child on a busy machine."""

TIME_LIMIT_S = 8.0
"""Seconds for one comparison; then the child is killed."""


class MathVerifyProcess:
    """A child process that compares answers, started with the first question. Any thread may ask."""

    def __init__(self) -> None:
        self._child: AnsweringChild | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self.failures = 0
        """Questions that the child did not survive or answer in time."""

    def equal(self, ground_truth: str, answer: str, allow_operations: bool = False) -> bool:
        """Whether the answer means the same; False if that cannot be found out."""
        return self._ask("equal", ground_truth, answer, allow_operations)

    def parses(self, ground_truth: str) -> bool:
        """Whether math-verify reads it as mathematics."""
        return self._ask("parses", ground_truth)

    def is_operation(self, ground_truth: str) -> bool:
        """Whether it is an operation that nobody carried out."""
        return self._ask("is_operation", ground_truth)

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._stop()

    def _ask(self, function: str, *arguments: str | bool) -> bool:
        with self._lock:
            if self._child is None or self._owner != os.getpid():  # a fork must not share the pipes
                self._owner = os.getpid()
                self._child = AnsweringChild(COMMAND, with_import_path(os.environ))
                self._child.ask(None, START_LIMIT_S)  # it compares, and scores nothing
            try:
                return bool(self._child.ask({function: arguments}, TIME_LIMIT_S))
            except ChildError:
                self.failures += 1
                self._stop()
                return False

    def _stop(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None
