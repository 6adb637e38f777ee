"""Child process with math-verify, for comparisons from any thread.

Preflight checks and ``bapo data prepare`` use it. In a run the workers of the pool (pool.py) call
math_verify_compare.py. Used by ``math.py`` and ``pool.py``.
"""

from __future__ import annotations

import os
import sys
import threading

from bapo_megatron.runtime.child_process import AnsweringChild, ChildError, with_import_path
from bapo_megatron.workers.process import START_LIMIT_S

COMMAND = (sys.executable, "-m", "bapo_megatron.reward.worker")
"""The worker program of rewards, which also compares."""

TIME_LIMIT_S = 120.0
"""Seconds on a clock for one comparison; then the child is killed. Long, since a busy machine is slow: what
does not end is ended by the child's own limit of CPU time, ``worker.COMPARISON_CPU_LIMIT_S``."""


class MathVerifyProcess:
    """Child process that compares answers, started at the first request, and again after a failure.

    Any thread may ask, one at a time; a fork starts a child of its own. If the child dies or takes too long
    the answer is False: not equal, not parsed, no operation. Made by ``math.py`` outside reward workers.
    """

    def __init__(self) -> None:
        self._child: AnsweringChild | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self.failures = 0
        """Requests at which the child died or timed out."""

    def equal(self, ground_truth: str, answer: str, allow_operations: bool = False) -> bool:
        """Equality of ground truth and answer; False if it cannot be decided."""
        return self._ask("equal", ground_truth, answer, allow_operations)

    def parses(self, ground_truth: str) -> bool:
        """Whether math-verify can parse the ground truth."""
        return self._ask("parses", ground_truth)

    def is_operation(self, ground_truth: str) -> bool:
        """Whether the ground truth is an unevaluated operation."""
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
                call = {"id": 0, "function": function, "question": arguments}
                return bool(self._child.ask(call, TIME_LIMIT_S)["answer"])
            except ChildError:
                self.failures += 1
                self._stop()
                return False

    def _stop(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None
