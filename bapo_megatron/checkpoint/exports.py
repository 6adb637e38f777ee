"""Background exports of checkpoints to Hugging Face folders during training, and a user's command after each.

    exports/step_000120/   config, tokenizer, safetensors: complete or absent

The training loop's rank 0 offers each checkpoint to ``StepExports`` and polls it; ``AfterExport`` runs the
command. With ``checkpoint.export_every`` a low-priority process converts one checkpoint at a time from file
to file; the trainer does not wait. At most one more is queued; a newer one replaces it, so at most two
checkpoints are protected from deletion, however slow the disk is. The process is

    python -m bapo_megatron.checkpoint.exports CHECKPOINT OUTPUT MODEL PARENT

with PARENT the trainer's process id. It imports no torch, needs tens of megabytes for any model size, and
ends with the trainer.

``checkpoint.after_export`` is the user's command for each export, such as an upload. One runs at a time in
its own process; a failure is an event and a warning, and does not fail the run. RUN/after_export.json lists
the exports with a successful command; for the others the next start runs it. Delivery is at least once: a
kill may come between a command's end and its record.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from bapo_megatron.errors import ConfigError, printable
from bapo_megatron.runtime.child_process import UserCommand, command_words, start_module
from bapo_megatron.runtime.event_kinds import OnEvent
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.processes import die_with_parent
from bapo_megatron.runtime.run_paths import RunPaths, step_entries, step_leftovers, step_name
from bapo_megatron.runtime.written_folders import move_foreign_aside
from checkpoints_tools import Settings, to_hf
from checkpoints_tools.core.atomic_output import foreign

_CLEANING_S = 20.0
"""Seconds for a terminated process to remove its partial output."""
_NICENESS = 19
"""Lowest CPU priority; the kernel derives the disk priority from it."""
_THREADS = 2


class StepExports:
    """Background exports of one run, on rank 0: ``offer`` a checkpoint, then ``poll``. One export runs, one
    is queued; a newer one replaces the queued one (event `export_skipped`). A failed export is an event and a
    warning. Only ``close`` waits; it terminates a running export, which the next start repeats."""

    def __init__(
        self, paths: RunPaths, model: Path, every: int, on_event: OnEvent, after: AfterExport | None = None
    ) -> None:
        """``model``: Hugging Face folder that the run started from. ``every``: interval in steps; 0 for no
        exports. ``after``: export hook, closed with this object."""
        self._paths, self._model, self._every, self._on_event = paths, model, every, on_event
        self.after = after
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="export")
        self._process: subprocess.Popen[str] | None = None
        self._ended: Future[tuple[int, str, float]] | None = None
        self._step = 0
        self._next: int | None = None

    def is_using(self, step: int) -> bool:
        """Return whether the checkpoint of ``step`` is being exported or queued and must not be deleted."""
        return step == self._next or (self._process is not None and step == self._step)

    def is_busy(self) -> bool:
        """Return whether an export or its hook is running or queued."""
        return self._process is not None or (self.after is not None and self.after.is_busy())

    def resume(self, steps: Iterable[int]) -> None:
        """Queue missing exports of the newest two of ``steps``, which have checkpoints, and missing hooks.
        Call once, at a start of the run. Deletes partial exports of a killed process."""
        from bapo_megatron.checkpoint.store import delete_hidden  # imports torch

        for leftover in step_leftovers(self._paths.step_exports, ".bapo-ckpt.tmp"):
            delete_hidden(leftover)
        for lock in self._paths.step_exports.glob(".step_*.bapo-ckpt.lock"):
            lock.unlink(missing_ok=True)
        due = sorted(filter(self._is_due, steps))
        missing = [step for step in due if not (self._paths.step_export(step) / "config.json").exists()]
        for step in missing[-2:]:
            self.offer(step)
        if self.after:
            self.after.resume()

    def offer(self, step: int) -> None:
        """Begin or queue the export of the complete checkpoint of ``step``, if ``every`` selects it."""
        if not self._is_due(step):
            return
        if self._process is None:
            self._start(step)
            return
        if self._next is not None:
            self._on_event({"kind": "export_skipped", "step": self._next, "newer": step})
        self._next = step

    def poll(self) -> None:
        """Record the end of an export or hook, and start queued ones."""
        self._poll_export()
        if self.after:
            self.after.poll()

    def _poll_export(self) -> None:
        if self._ended is None or not self._ended.done():
            return
        (code, stderr, seconds), step = self._ended.result(), self._step
        self._process = self._ended = None
        if code == 0:
            path = str(self._paths.step_export(step))
            self._on_event({"kind": "export_done", "step": step, "seconds": round(seconds, 3), "path": path})
            if self.after:
                self.after.exported(step)
        else:
            self._failed(step, stderr.strip() or f"it ended with exit code {code}", seconds)
        if self._next is not None:
            waiting, self._next = self._next, None
            self._start(waiting)

    def _failed(self, step: int, why: str, seconds: float = 0.0) -> None:
        fields = {"step": step, "seconds": round(seconds, 3), "message": why.splitlines()[-1]}
        self._on_event({"kind": "export_failed", **fields})
        text = printable(f"warning: the export of step {step} has failed: {why}")
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Terminate the running export (kill it after 20 s) and its hook; a resumed run starts both again."""
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
        folders = self._paths.checkpoint(step), self._paths.step_export(step), self._model
        arguments = [*map(str, folders), str(os.getpid())]
        try:
            self._process = start_module(
                "bapo_megatron.checkpoint.exports",
                *arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        except OSError as error:  # a limit on processes or memory, as in a container
            self._failed(step, f"its process cannot be started: {error}")
            return
        self._step = step
        self._ended = self._waiter.submit(_wait, self._process, time.perf_counter())
        self._on_event({"kind": "export_started", "step": step})


def _wait(process: subprocess.Popen[str], began: float) -> tuple[int, str, float]:
    stderr = process.communicate()[1]
    return process.returncode, stderr, time.perf_counter() - began


# --- the hook ---


class AfterExport:
    """Queue of the user's command (``checkpoint.after_export``) for each export, on rank 0. No method waits:
    ``exported`` and ``exported_last`` queue the command; ``poll`` starts it, kills it at its time limit, and
    records its end as an event and a success in RUN/after_export.json. The next start retries the rest."""

    def __init__(
        self,
        paths: RunPaths,
        run_name: str,
        last_step: int,
        command: str,
        limit_minutes: float,
        on_event: OnEvent,
    ) -> None:
        """``last_step``: the run's last step; its hook gets `RUN/export` instead of exports/step_NNNNNN."""
        self._paths, self._run_name, self._on_event = paths, run_name, on_event
        self._last_step = last_step
        self._words, self._limit_minutes = command_words(command), limit_minutes
        self._done = _stored(self._paths.after_export)
        self._waiting: list[int] = []
        self._running: UserCommand | None = None
        self._step, self._began = 0, 0.0
        """Step and start of the running command."""

    def is_busy(self) -> bool:
        """Return whether a command is running or queued."""
        return self._running is not None or bool(self._waiting)

    def resume(self) -> None:
        """Queue the command for exports of earlier starts for which it has not succeeded, oldest first."""
        for (step, updates), folder in sorted(step_entries(self._paths.step_exports)):
            is_due = not updates and step != self._last_step and step_name(step) not in self._done
            if is_due and (folder / "config.json").exists():
                self._add(step)

    def exported(self, step: int) -> None:
        """Queue the command for the new export of ``step``, unless that is the last; start it if idle."""
        if step != self._last_step:
            self._again(step)

    def exported_last(self, is_new: bool) -> None:
        """Queue the command for the final export, if it has not succeeded yet. ``is_new``: the export was
        just written, so the command runs even after an earlier success."""
        if is_new:
            self._again(self._last_step)
        elif step_name(self._last_step) not in self._done:
            self._add(self._last_step)

    def poll(self) -> None:
        """Record the end of a command, or kill it at its time limit; then start the next one."""
        if self._running:
            code = self._running.wait(0)
            seconds = time.monotonic() - self._began
            if code is None and seconds < 60 * self._limit_minutes:
                return
            self._end(self._running, code, seconds)
        if self._waiting:
            self._start(self._waiting.pop(0))

    def close(self) -> None:
        """Kill the running command with its descendants and empty the queue; the next start runs them."""
        if self._running:
            self._running.close()
            self._running = None
        self._waiting.clear()

    def _again(self, step: int) -> None:
        # Remove the record first: a kill before the command's end must not leave the export as done.
        if step_name(step) in self._done:
            self._note(self._done - {step_name(step)})
        self._add(step)

    def _add(self, step: int) -> None:
        self._waiting = [*(waiting for waiting in self._waiting if waiting != step), step]
        if self._running is None:
            self.poll()

    def _start(self, step: int) -> None:
        export = self._paths.export if step == self._last_step else self._paths.step_export(step)
        folder = str(export.absolute())
        values = {"{folder}": folder, "{step}": str(step), "{name}": self._run_name}
        about = {
            "BAPO_RUN_DIR": str(self._paths.root.absolute()),
            "BAPO_EXPORT": folder,
            "BAPO_EXPORT_STEP": str(step),
        }
        words = [_filled(word, values) for word in self._words]
        self._step, self._began = step, time.monotonic()
        try:
            self._running = UserCommand(words, about, self._paths.after_export_log(step_name(step)))
        except OSError as error:
            self._failed(0.0, f"it cannot be started: {error}")
            return
        self._on_event({"kind": "after_export_started", **self._about()})

    def _end(self, running: UserCommand, code: int | None, seconds: float) -> None:
        running.close()
        self._running = None
        if code != 0:
            self._failed(seconds, running.failure(code, f"{self._limit_minutes:g} min"))
            return
        self._note(self._done | {step_name(self._step)})  # durable before the event
        self._on_event({"kind": "after_export_done", **self._about(seconds=round(seconds, 3))})

    def _failed(self, seconds: float, reason: str) -> None:
        about = self._about(seconds=round(seconds, 3), reason=reason)
        self._on_event({"kind": "after_export_failed", **about})
        name = step_name(self._step)
        with suppress(OSError):
            print(
                f"warning: checkpoint.after_export has failed for {name}: {reason}; the run continues, "
                f"and the next start tries it again ({self._paths.after_export_log(name)})",
                file=sys.stderr,
                flush=True,
            )

    def _about(self, **more: Any) -> dict[str, Any]:
        """Return event fields of the running command, or of the one that just ended."""
        return {"export": step_name(self._step), "step": self._step, **more}

    def _note(self, done: set[str]) -> None:
        self._done = done
        write_atomically(self._paths.after_export, json.dumps({"done": sorted(done)}, indent=2) + "\n")


def _filled(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def _stored(path: Path) -> set[str]:
    return set(json.loads(path.read_text())["done"]) if path.exists() else set()


# --- the process ---


def main(checkpoint: str, output: str, model: str, parent: str) -> int:
    """Convert ``checkpoint`` to the HF folder ``output``, with config and tokenizer of ``model``; return the
    exit code. ``parent``: the trainer's process id; this process ends with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes the partial output on exit
    die_with_parent(parent=int(parent))  # otherwise a restarted trainer could export to the same folder
    os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)  # os.nice would add to the trainer's niceness
    try:
        # Rename and keep outputs with foreign files, or of an earlier version without a mark.
        move_foreign_aside(Path(output), foreign)
        to_hf(
            Path(checkpoint), Path(output), Path(model), settings=Settings(overwrite=True, threads=_THREADS)
        )
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
