"""Background exports of checkpoints to Hugging Face folders during training, and a user's command after each.

    exports/step_000120/   config, tokenizer, safetensors: complete or absent

The training loop's rank 0 offers each checkpoint to ``StepExports`` and polls it. With
``checkpoint.export_every`` a low-priority process converts one checkpoint at a time from file to file; the
trainer does not wait. At most one more is queued; a newer one replaces it, so at most two checkpoints are
protected from deletion, however slow the disk is. The process is

    python -m bapo_megatron.checkpoint.exports CHECKPOINT OUTPUT MODEL PARENT [COMMAND]

with PARENT the trainer's process id. It imports no torch, needs tens of megabytes for any model size, and
ends with the trainer. COMMAND is ``checkpoint.after_export``, the user's command for the export, such as an
upload: the process runs it once the folder is whole, and its failure is that of the export.
RUN/after_export.json lists the exports with a successful command.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from bapo_megatron.errors import ConfigError, printable
from bapo_megatron.runtime.child_process import UserCommand, command_words, start_module
from bapo_megatron.runtime.event_kinds import OnEvent
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.processes import die_with_parent
from bapo_megatron.runtime.run_paths import RunPaths, step_entries, step_leftovers, step_name
from bapo_megatron.runtime.written_folders import move_foreign_aside
from checkpoints_tools import Settings, to_hf
from checkpoints_tools.core.atomic_output import WRITER

_CLEANING_S = 20.0
"""Seconds for a terminated process to remove its partial output."""
_NICENESS = 19
"""Lowest CPU priority; the kernel derives the disk priority from it."""
_THREADS = 2


class AfterExport(NamedTuple):
    """The user's command for each export (``checkpoint.after_export``), and what it is told of the run."""

    command: str
    limit_minutes: float
    run_name: str
    last_step: int
    """The run's last step; its command gets `RUN/export` instead of exports/step_NNNNNN."""


class StepExports:
    """Background exports of one run, on rank 0: ``offer`` a checkpoint, then ``poll``. One export runs, one
    is queued; a newer one replaces the queued one (event `export_skipped`). A failed export, or a failed
    command of the user, is an event and a warning. Only ``close`` waits; it terminates a running export."""

    def __init__(
        self, paths: RunPaths, model: Path, every: int, on_event: OnEvent, after: AfterExport | None = None
    ) -> None:
        """``model``: Hugging Face folder that the run started from. ``every``: interval in steps; 0 for no
        exports. ``after``: the user's command."""
        self._paths, self._model, self._every, self._on_event = paths, model, every, on_event
        self._after = after
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        """Standard error of the running export."""
        self._step, self._output, self._began = 0, paths.export, 0.0
        """Step, folder and start of the running export."""
        self._next: int | None = None
        self._again: list[int] = []
        """Steps whose export an earlier start has written, without success of the command."""

    def is_using(self, step: int) -> bool:
        """Return whether the checkpoint of ``step`` is being exported or queued and must not be deleted."""
        return step == self._next or (self._process is not None and step == self._step)

    def is_busy(self) -> bool:
        """Return whether an export or its command is running or queued."""
        return self._process is not None or bool(self._again)

    def resume(self, steps: Iterable[int]) -> None:
        """Queue missing exports of the newest two of ``steps``, which have checkpoints, and the command for
        each export for which it has not succeeded. Call once, at a start of the run. Deletes partial exports
        of a killed process."""
        from bapo_megatron.checkpoint.store import delete_hidden  # imports torch

        for leftover in step_leftovers(self._paths.step_exports):
            delete_hidden(leftover)
        whole = {
            step: folder
            for (step, updates), folder in sorted(step_entries(self._paths.step_exports))
            if not updates and (folder / "config.json").exists()
        }
        for step in [step for step in sorted(steps) if self._is_due(step) and step not in whole][-2:]:
            self.offer(step)
        done = self._done()
        told = [step for step, folder in whole.items() if self._has_command(step, folder)]
        self._again = [step for step in told if step_name(step) not in done]

    def finish(self, is_new: bool) -> None:
        """Begin the user's command for the final export, if it has not succeeded yet; no export may be
        running. ``is_new``: the export was just written, so the command runs even after a success."""
        if self._after and (is_new or step_name(self._after.last_step) not in self._done()):
            self._start(self._after.last_step, self._paths.export)

    def offer(self, step: int) -> None:
        """Begin or queue the export of the complete checkpoint of ``step``, if ``every`` selects it."""
        if not self._is_due(step):
            return
        if self._process is None:
            self._start(step, self._paths.step_export(step), self._paths.checkpoint(step))
            return
        if self._next is not None:
            self._on_event({"kind": "export_skipped", "step": self._next, "newer": step})
        self._next = step

    def poll(self) -> None:
        """Record the end of an export, and start a queued one, else the command for an earlier export."""
        if self._process is not None:
            if (code := self._process.poll()) is None:
                return
            self._record_end(code)
        if self._next is not None:
            waiting, self._next = self._next, None
            self.offer(waiting)
        elif self._again:
            step = self._again.pop(0)
            self._start(step, self._paths.step_export(step))

    def _record_end(self, code: int) -> None:
        self._process, step, seconds = None, self._step, time.perf_counter() - self._began
        if code == 0:
            if self._has_command(step, self._output):
                self._note(self._done() | {step_name(step)})  # durable before the event
            fields = {"step": step, "seconds": round(seconds, 3), "path": str(self._output)}
            self._on_event({"kind": "export_done", **fields})
        else:
            self._errors.seek(0)
            told = self._errors.read().decode(errors="replace").strip()
            self._failed(step, told or f"it ended with exit code {code}", seconds)

    def _failed(self, step: int, why: str, seconds: float = 0.0) -> None:
        fields = {"step": step, "seconds": round(seconds, 3), "message": why.splitlines()[-1]}
        self._on_event({"kind": "export_failed", **fields})
        text = printable(f"warning: the export of step {step} has failed: {why}")
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Terminate the running export (kill it after 20 s); a resumed run starts it again."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_CLEANING_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._errors.close()

    def _is_due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def _start(self, step: int, output: Path, checkpoint: Path | None = None) -> None:
        """Start the process that exports ``checkpoint``, if given, and then runs the user's command."""
        arguments = [str(checkpoint or ""), str(output), str(self._model), str(os.getpid())]
        if self._has_command(step, output):
            # Remove the record first: a kill before the command's end must not leave the export as done.
            self._note(self._done() - {step_name(step)})
            arguments.append(json.dumps(self._command(step, output)))
        self._errors.seek(0)
        self._errors.truncate()
        nothing, module = subprocess.DEVNULL, "bapo_megatron.checkpoint.exports"
        try:
            self._process = start_module(
                module, *arguments, stdin=nothing, stdout=nothing, stderr=self._errors
            )
        except OSError as error:  # a limit on processes or memory, as in a container
            self._failed(step, f"its process cannot be started: {error}")
            return
        self._step, self._output, self._began = step, output, time.perf_counter()
        self._on_event({"kind": "export_started", "step": step})

    def _has_command(self, step: int, output: Path) -> bool:
        return self._after is not None and (step == self._after.last_step) == (output == self._paths.export)

    def _command(self, step: int, output: Path) -> dict[str, Any]:
        """Return the arguments of ``_run_command``."""
        assert self._after is not None
        folder, log = str(output.absolute()), self._paths.after_export_log(step_name(step))
        values = {"{folder}": folder, "{step}": str(step), "{name}": self._after.run_name}
        about = {
            "BAPO_RUN_DIR": str(self._paths.root.absolute()),
            "BAPO_EXPORT": folder,
            "BAPO_EXPORT_STEP": str(step),
        }
        words = [_filled(word, values) for word in command_words(self._after.command)]
        return {"words": words, "about": about, "log": str(log), "minutes": self._after.limit_minutes}

    def _done(self) -> set[str]:
        path = self._paths.after_export
        return set(json.loads(path.read_text())["done"]) if path.exists() else set()

    def _note(self, done: set[str]) -> None:
        write_atomically(self._paths.after_export, json.dumps({"done": sorted(done)}, indent=2) + "\n")


def _filled(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word


# --- the process ---


def main(checkpoint: str, output: str, model: str, parent: str, command: str = "") -> int:
    """Convert ``checkpoint``, unless empty, to the HF folder ``output``, with config and tokenizer of
    ``model``; then run the user's ``command``, if given. Return the exit code. ``parent``: the trainer's
    process id; this process ends with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes the partial output on exit
    die_with_parent(parent=int(parent))  # otherwise a restarted trainer could export to the same folder
    os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)  # os.nice would add to the trainer's niceness
    try:
        if checkpoint:
            # Rename and keep outputs with foreign files, or of an earlier version without a mark.
            move_foreign_aside(Path(output), WRITER)
            settings = Settings(overwrite=True, threads=_THREADS)
            to_hf(Path(checkpoint), Path(output), Path(model), settings=settings)
        if command:
            _run_command(**json.loads(command))
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _run_command(words: list[str], about: dict[str, str], log: str, minutes: float) -> None:
    """Run the user's command to its end, or until its limit. Raises ConfigError or OSError if it fails."""
    running = UserCommand(words, about, Path(log))
    try:
        if (code := running.wait(60 * minutes)) != 0:
            reason = running.failure(code, f"{minutes:g} min")
            raise ConfigError(f"checkpoint.after_export: {reason} ({log})")
    finally:
        running.close()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
