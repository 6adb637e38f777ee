"""Hugging Face folders of a run's checkpoints, made while the training goes on.

    exports/step_000120/   config, tokenizer, safetensors: whole or absent

A child process of low priority makes them, one at a time, from the files of the checkpoint; the trainer gives
neither memory nor time. While one is in the making one more may wait; a newer one takes its place. So however
slow the disk, at most two checkpoints are held back from deletion.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

_CLEANING_S = 20.0
"""What a process that is told to end may take to remove what it has half written."""

Note = Callable[[dict[str, Any]], None]
"""Takes an event: its kind and its fields."""


@dataclass(frozen=True)
class _Ended:
    """What became of a process."""

    exit_code: int
    said: str
    """On stderr."""
    seconds: float


class StepExports:
    """The exports of one run. Lives on rank 0; no method waits but ``close``."""

    def __init__(self, run_dir: Path, model: Path, every: int, note: Note) -> None:
        """``model``: the Hugging Face folder that the run started from. ``every``: steps; 0 for none."""
        self.folder = run_dir / "exports"
        self._checkpoints = run_dir / "checkpoints"
        self._model, self._every, self._note = model, every, note
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="export")
        self._process: subprocess.Popen[str] | None = None
        self._ended: Future[_Ended] | None = None
        self._step = 0
        """That is in the making."""
        self._next: int | None = None
        """That waits."""

    def path(self, step: int) -> Path:
        """Where the export of ``step`` is, or will be."""
        return self.folder / f"step_{step:06d}"

    def holds(self, step: int) -> bool:
        """Whether the checkpoint of ``step`` is still needed."""
        return step == self._next or (self._process is not None and step == self._step)

    def is_busy(self) -> bool:
        """Whether one is in the making or waits."""
        return self._process is not None

    def resume(self, steps: Iterable[int]) -> None:
        """Make what a run that ended has left undone: of the newest two of ``steps`` that need an export."""
        for leftover in self.folder.glob(".step_*.bapo-ckpt.tmp"):
            shutil.rmtree(leftover)
        missing = sorted(s for s in steps if self._is_due(s) and not (self.path(s) / "config.json").exists())
        for step in missing[-2:]:
            self.offer(step)

    def offer(self, step: int) -> None:
        """The checkpoint of ``step`` is whole: export it, if it is one of those."""
        if not self._is_due(step):
            return
        if self._process is None:
            self._start(step)
            return
        if self._next is not None:
            self._note({"kind": "export_skipped", "step": self._next, "newer": step})
        self._next = step

    def poll(self) -> None:
        """Note what has ended, and begin what waits for it."""
        if self._ended is None or not self._ended.done():
            return
        ended, step = self._ended.result(), self._step
        self._process = self._ended = None
        fields = {"step": step, "seconds": round(ended.seconds, 3)}
        if ended.exit_code == 0:
            self._note({"kind": "export_done", **fields, "path": str(self.path(step))})
        else:
            said = ended.said.strip() or f"it ended with exit code {ended.exit_code}"
            self._note({"kind": "export_failed", **fields, "message": said.splitlines()[-1]})
            print(f"warning: the export of step {step} has failed: {said}", file=sys.stderr, flush=True)
        if self._next is not None:
            waiting, self._next = self._next, None
            self._start(waiting)

    def close(self) -> None:
        """End what is in the making, and leave nothing of it; a run that continues makes it anew."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_CLEANING_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._waiter.shutdown()

    def _is_due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def _start(self, step: int) -> None:
        checkpoint = self._checkpoints / f"step_{step:06d}"
        arguments = [str(checkpoint), str(self.path(step)), str(self._model), str(os.getpid())]
        # In a session of its own: signals to the run's processes are not meant for it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bapo_megatron.checkpoint.export_process", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._step = step
        self._ended = self._waiter.submit(_wait, self._process, perf_counter())
        self._note({"kind": "export_started", "step": step})


def _wait(process: subprocess.Popen[str], began: float) -> _Ended:
    said = process.communicate()[1]
    return _Ended(process.returncode, said, perf_counter() - began)
