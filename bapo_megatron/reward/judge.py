"""Comparing answers with math-verify in a process of its own.

math-verify limits its time with signals, which work only in a main thread and cannot interrupt one long
operation on big integers (``9^{9^{9}}``, which a policy will write sooner or later). Here it runs as the
main thread of a child process; a comparison that takes too long costs that child, not the run.

``python -m bapo_megatron.reward.judge`` is the child: JSON lines in, JSON lines out.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import subprocess
import sys
import threading
from typing import Any

TIME_LIMIT_S = 8
"""After this the child is killed."""

START_LIMIT_S = 120
"""For the import of sympy on a busy machine."""

SIGNAL_LIMIT_S = 2
"""math-verify's own limit on one parse or comparison, which keeps the child alive."""

MEMORY_LIMIT = 4 << 30
"""Bytes of address space of the child."""


class Judge:
    """The child, started with the first question. Any thread may ask; one question at a time."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self.failures = 0
        """Questions that the child did not survive or answer in time."""

    def equal(self, ground_truth: str, answer: str) -> bool:
        """Whether the answer means the same; False if that cannot be found out."""
        return self._ask({"ground_truth": ground_truth, "answer": answer})

    def parses(self, ground_truth: str) -> bool:
        """Whether math-verify reads it as mathematics."""
        return self._ask({"ground_truth": ground_truth})

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._stop()

    def _ask(self, question: dict[str, str]) -> bool:
        with self._lock:
            if self._child is None or self._owner != os.getpid():  # a fork must not share the pipes
                self._start()
            try:
                return bool(self._answer(question, TIME_LIMIT_S))
            except (TimeoutError, OSError, ValueError):
                self.failures += 1
                self._stop()
                return False

    def _start(self) -> None:
        self._owner = os.getpid()
        self._child = subprocess.Popen(
            [sys.executable, "-m", "bapo_megatron.reward.judge"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the run; the child ends when its input does
        )
        self._answer({}, START_LIMIT_S)

    def _answer(self, question: dict[str, str], limit_s: float) -> Any:
        assert self._child is not None
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps(question).encode() + b"\n")
        answers = select.poll()
        answers.register(self._child.stdout, select.POLLIN)
        if not answers.poll(limit_s * 1000):
            raise TimeoutError
        return json.loads(self._child.stdout.readline())

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None


# --- the child -----------------------------------------------------------------------------------


def _serve() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    logging.disable(logging.CRITICAL)  # math-verify logs every answer that it cannot read
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(_verdict(**question) if question else True), flush=True)


def _verdict(ground_truth: str, answer: str | None = None) -> bool:
    from math_verify import verify

    try:
        expected = _parse(ground_truth)
        if answer is None:
            return any(not isinstance(part, str) for part in expected)
        return bool(verify(expected, _parse(answer), timeout_seconds=SIGNAL_LIMIT_S))
    except Exception:  # sympy raises all kinds on nonsense, RecursionError and MemoryError too
        return False


def _parse(answer: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    config = [LatexExtractionConfig(boxed_match_priority=0)]
    parts: list[Any] = parse(rf"\boxed{{{answer}}}", config, parsing_timeout=SIGNAL_LIMIT_S)
    return parts


if __name__ == "__main__":
    _serve()
