"""Being told to stop: by SIGUSR1 or SIGTERM, as Slurm sends them, or by the clock of the job.

The run finishes the update in hand, saves, and ends with exit code 85: the same command continues it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)

_MARGIN_S = 60.0
"""Of a job's time, for what comes after the save: barriers, closing files, and the requeue."""


class PreemptionSignal:
    """Whether the run is to stop, which all ranks learn at the same moment."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self._ends_at = _job_end()
        self._asked_at: float | None = None
        self._longest_stretch_s = 0.0
        self._longest_save_s = 0.0

    @contextmanager
    def heeding(self) -> Iterator[None]:
        """Signals are taken note of within the block, instead of ending this process."""
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def saved(self, seconds: float) -> None:
        """A save has taken so long: the job's end is planned by the longest."""
        self._longest_save_s = max(self._longest_save_s, seconds)

    def reason(self) -> str | None:
        """Why the run is to stop, None if it is not. Collective; any rank's reason is enough.

        It can stop only where it asks, so the longest stretch between two calls is what must fit once more
        into the job, with a save.
        """
        now = time.time()
        if self._asked_at is not None:
            self._longest_stretch_s = max(self._longest_stretch_s, now - self._asked_at)
        self._asked_at = now
        if self._reason is None and self._is_late(now):
            self._reason = "the job's time would end before the next update is saved"
        told = torch.tensor([self._reason is not None], dtype=torch.int32)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return (self._reason or "another rank was told to stop") if told.item() else None

    def _is_late(self, now: float) -> bool:
        if self._ends_at is None:
            return False
        return now + self._longest_stretch_s + self._longest_save_s + _MARGIN_S > self._ends_at

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._reason = f"told to stop by {signal.Signals(number).name}"


def _job_end() -> float | None:
    """When Slurm ends this job, in seconds since 1970. The job's script knows it in every kind of job."""
    told = os.environ.get("BAPO_END_TIME") or os.environ.get("SLURM_JOB_END_TIME") or ""
    return float(told) if told.isdigit() and told != "0" else None
