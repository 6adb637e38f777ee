"""Export hook (`checkpoint.after_export`): runs the user's command for each export, such as an upload.

One command runs at a time, in a process of its own, while training continues; rank 0 polls it. A failure is
an event and a warning, and does not fail the run. RUN/after_export.json lists the exports for which the
command has succeeded; for every other one the next start runs it again. Delivery is at least once: a kill may
come between the end of a command and the note of it. Used by ``step_exports.py`` and ``trainer/build.py``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.run_paths import RunPaths, step_entries, step_name
from bapo_megatron.runtime.user_command import UserCommand, command_words

OnEvent = Callable[[dict[str, Any]], None]
"""Records an event: its kind and its fields."""


@dataclass(frozen=True)
class _Exported:
    """A complete export, as plain data: its step and its folder."""

    step: int
    folder: Path
    """exports/step_NNNNNN, or export/ of the last step."""

    @property
    def name(self) -> str:
        """The name in messages, in RUN/after_export.json and of the log."""
        return step_name(self.step)


class AfterExport:
    """Queue of export hooks of one run, on rank 0. No method waits for a command.

    ``exported`` and ``exported_last`` queue; ``poll`` starts the next command and records the end of one (an
    event; RUN/after_export.json); ``close`` kills the one that runs. ``StepExports`` polls and closes it. A
    failed command is tried again by the next start of the run, not by this one. Made by ``trainer/build.py``
    if the setting is there.
    """

    def __init__(
        self,
        run_dir: Path,
        run_name: str,
        last_step: int,
        command: str,
        limit_minutes: float,
        on_event: OnEvent,
    ) -> None:
        """``last_step``: the run's last step, whose hook gets `RUN/export` and not exports/step_NNNNNN."""
        self._paths, self._run_name, self._on_event = RunPaths(run_dir), run_name, on_event
        self._last_step = last_step
        self._words, self._limit_minutes = command_words(command), limit_minutes
        self._done = _stored(self._paths.after_export)
        self._waiting: list[_Exported] = []
        self._running: UserCommand | None = None
        self._export: _Exported | None = None
        """The export of the running command."""
        self._began = 0.0

    def is_busy(self) -> bool:
        """Whether a command runs or is queued."""
        return self._running is not None or bool(self._waiting)

    def resume(self) -> None:
        """Queue the exports of earlier starts whose command has not succeeded, oldest first."""
        for (step, updates), folder in sorted(step_entries(self._paths.step_exports)):
            is_due = not updates and step != self._last_step and step_name(step) not in self._done
            if is_due and (folder / "config.json").exists():
                self._add(_Exported(step, folder))

    def exported(self, step: int) -> None:
        """Queue the new export of ``step``, and start its command if none runs; not for the last step."""
        if step != self._last_step:
            self._again(_Exported(step, self._paths.step_export(step)))

    def exported_last(self, is_new: bool) -> None:
        """Queue the final export, if its command has not succeeded yet.

        ``is_new``: the export was just written, so the command runs again even if it has succeeded for this
        step.
        """
        last = _Exported(self._last_step, self._paths.export)
        if is_new:
            self._again(last)
        elif last.name not in self._done:
            self._add(last)

    def poll(self) -> None:
        """Record the end of a command, or kill it at its time limit; then start the next one."""
        if self._running and self._export:
            code = self._running.wait(0)
            seconds = time.monotonic() - self._began
            if code is None and seconds < 60 * self._limit_minutes:
                return
            self._end(self._running, self._export, code, seconds)
        if self._waiting:
            self._start(self._waiting.pop(0))

    def close(self) -> None:
        """Kill the running command with its descendants, and empty the queue; the next start runs them."""
        if self._running:
            self._running.close()
            self._running = None
        self._waiting.clear()

    def _again(self, export: _Exported) -> None:
        # The note goes first: a kill before the command's end must not leave the export as done.
        if export.name in self._done:
            self._note(self._done - {export.name})
        self._add(export)

    def _add(self, export: _Exported) -> None:
        self._waiting = [*(one for one in self._waiting if one != export), export]
        if self._running is None:
            self.poll()

    def _start(self, export: _Exported) -> None:
        folder = str(export.folder.absolute())
        values = {"{folder}": folder, "{step}": str(export.step), "{name}": self._run_name}
        about = {
            "BAPO_RUN_DIR": str(self._paths.root.absolute()),
            "BAPO_EXPORT": folder,
            "BAPO_EXPORT_STEP": str(export.step),
        }
        words = [_filled(word, values) for word in self._words]
        self._export, self._began = export, time.monotonic()
        try:
            self._running = UserCommand(words, about, self._paths.after_export_log(export.name))
        except OSError as error:
            self._failed(export, 0.0, f"it cannot be started: {error}")
            return
        self._on_event({"kind": "after_export_started", "export": export.name, "step": export.step})

    def _end(self, running: UserCommand, export: _Exported, code: int | None, seconds: float) -> None:
        running.close()
        self._running = None
        if code != 0:
            self._failed(export, seconds, running.failure(code, f"{self._limit_minutes:g} min"))
            return
        self._note(self._done | {export.name})  # durable before the event says done
        self._on_event({"kind": "after_export_done", **_fields(export, seconds)})

    def _failed(self, export: _Exported, seconds: float, reason: str) -> None:
        log = self._paths.after_export_log(export.name)
        self._on_event({"kind": "after_export_failed", **_fields(export, seconds), "reason": reason})
        with suppress(OSError):
            print(
                f"warning: checkpoint.after_export has failed for {export.name}: {reason}; the run goes on, "
                f"and the next start tries it again ({log})",
                file=sys.stderr,
                flush=True,
            )

    def _note(self, done: set[str]) -> None:
        self._done = done
        write_atomically(self._paths.after_export, json.dumps({"done": sorted(done)}, indent=2) + "\n")


def _filled(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def _fields(export: _Exported, seconds: float) -> dict[str, Any]:
    return {"export": export.name, "step": export.step, "seconds": round(seconds, 3)}


def _stored(path: Path) -> set[str]:
    """Stored names of exports that are done; none if the file is missing or unreadable, so all run again."""
    try:
        return set(map(str, json.loads(path.read_text())["done"]))
    except (OSError, ValueError, KeyError, TypeError):
        return set()
