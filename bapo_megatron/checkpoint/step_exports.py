"""Background exports of checkpoints to Hugging Face folders, in a child process while training continues.

    exports/step_000120/   config, tokenizer, safetensors: whole or absent

With ``checkpoint.export_every``, on rank 0. The process has a low priority, and converts one checkpoint at a
time from file to file, in little memory; the trainer does not wait for it. One more checkpoint waits, and a
newer one replaces it. So at most two checkpoints are kept from deletion, however slow the disk is. Used by
``trainer/build.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from bapo_megatron.checkpoint.after_export import AfterExport
from bapo_megatron.checkpoint.writer import delete_hidden
from bapo_megatron.errors import printable
from bapo_megatron.runtime.run_paths import RunPaths, step_leftovers

_CLEANING_S = 20.0
"""Seconds that a terminated process may take to remove its half-written output."""

OnEvent = Callable[[dict[str, Any]], None]
"""Records an event: its kind and its fields."""


@dataclass(frozen=True)
class _Ended:
    """Result of an export process, as plain data."""

    exit_code: int
    stderr: str
    seconds: float


class StepExports:
    """Background exports of one run, one at a time, on rank 0: one more waits, and a newer one replaces it.

    ``poll`` records the end of an export and starts the next; a failed one is an event and a warning, and
    does not end the run. ``close`` terminates a running one, and kills it after 20 s. Only ``close`` waits.
    Made by ``trainer/build.py``; the training loop polls it.
    """

    def __init__(
        self, run_dir: Path, model: Path, every: int, on_event: OnEvent, after: AfterExport | None = None
    ) -> None:
        """``model``: the Hugging Face folder that the run started from. ``every``: steps; 0 for none.
        ``after``: the export hook; closed with this."""
        self._paths = RunPaths(run_dir)
        self.folder = self._paths.step_exports
        self._model, self._every, self._on_event = model, every, on_event
        self.after = after
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="export")
        self._process: subprocess.Popen[str] | None = None
        self._ended: Future[_Ended] | None = None
        self._step = 0
        """The step in the process."""
        self._next: int | None = None
        """The queued step."""

    def path(self, step: int) -> Path:
        """The folder of the export of ``step``."""
        return self._paths.step_export(step)

    def is_using(self, step: int) -> bool:
        """Whether the checkpoint of ``step`` is being exported or queued, and must not be deleted."""
        return step == self._next or (self._process is not None and step == self._step)

    def is_busy(self) -> bool:
        """Whether an export or its hook runs or is queued."""
        return self._process is not None or (self.after is not None and self.after.is_busy())

    def resume(self, steps: Iterable[int]) -> None:
        """Queue the missing exports: the newest two of ``steps``, which have checkpoints; and their hooks.

        Called once, at a start of the run. Deletes half-written exports of a killed process.
        """
        for leftover in step_leftovers(self.folder, ".bapo-ckpt.tmp"):
            delete_hidden(leftover)
        missing = sorted(s for s in steps if self._is_due(s) and not (self.path(s) / "config.json").exists())
        for step in missing[-2:]:
            self.offer(step)
        if self.after:
            self.after.resume()

    def offer(self, step: int) -> None:
        """Begin or queue the export of the complete checkpoint of ``step``, if ``every`` asks for it."""
        if not self._is_due(step):
            return
        if self._process is None:
            self._start(step)
            return
        if self._next is not None:
            self._on_event({"kind": "export_skipped", "step": self._next, "newer": step})
        self._next = step

    def poll(self) -> None:
        """Record the end of an export or hook, and start the queued ones."""
        self._poll_export()
        if self.after:
            self.after.poll()

    def _poll_export(self) -> None:
        if self._ended is None or not self._ended.done():
            return
        ended, step = self._ended.result(), self._step
        self._process = self._ended = None
        fields = {"step": step, "seconds": round(ended.seconds, 3)}
        if ended.exit_code == 0:
            self._on_event({"kind": "export_done", **fields, "path": str(self.path(step))})
            if self.after:
                self.after.exported(step)
        else:
            why = ended.stderr.strip() or f"it ended with exit code {ended.exit_code}"
            self._on_event({"kind": "export_failed", **fields, "message": why.splitlines()[-1]})
            text = printable(f"warning: the export of step {step} has failed: {why}")
            print(text, file=sys.stderr, flush=True)
        if self._next is not None:
            waiting, self._next = self._next, None
            self._start(waiting)

    def close(self) -> None:
        """Terminate the running export (after 20 s: kill it) and its hook; a resumed run starts both."""
        if self.after:
            self.after.close()
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
        checkpoint = self._paths.checkpoint(step)
        arguments = [str(checkpoint), str(self.path(step)), str(self._model), str(os.getpid())]
        # Its own session: signals to the run's process group do not reach it, `close` ends it.
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
        self._on_event({"kind": "export_started", "step": step})


def _wait(process: subprocess.Popen[str], began: float) -> _Ended:
    stderr = process.communicate()[1]
    return _Ended(process.returncode, stderr, perf_counter() - began)
