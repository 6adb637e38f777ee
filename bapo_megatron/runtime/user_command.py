"""User commands (`checkpoint.after_export`, `logging.on_event`): split, checked, run with a time limit.

A command is split into words as a shell does it, and run without a shell: no value of a run (a folder, an
event) is ever read as shell code. For pipes, variables and `&&`: ``bash -c '...'``. ValueError for one that
cannot be split. Used in ``checkpoint/``, ``config/``, ``runtime/`` and ``trainer/``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bapo_megatron.runtime.child_process import ChildProcess, exit_text
from bapo_megatron.runtime.run_files import open_plain, read_plain

_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Launcher variables, which a command does not get: they would make it a rank that waits for the others."""

_TAIL_BYTES = 4096
_MOST_REASON = 300


def command_words(command: str) -> list[str]:
    """The words of a command. ValueError if it has none, or an open quote."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"it cannot be split into words: {str(error).lower()}") from None
    if not words:
        raise ValueError("it is empty")
    return words


def missing_program(command: str) -> str | None:
    """Problem of a command's program on this machine; None if it can be started."""
    program = command_words(command)[0]
    if shutil.which(program) is not None:
        return None
    if os.sep in program:
        return f"{program} is no program that can be run (chmod +x?)"
    return f"there is no program {program} on PATH"


class UserCommand:
    """Running user command, in a session of its own, with its output in a log.

    The constructor starts it and does not wait; poll or wait with ``wait``, then call ``close``. Its
    descendants end with it, and all end with this process. Made by ``AfterExport``, and by the event sender
    for a target that is a command.
    """

    def __init__(
        self, words: list[str], about: Mapping[str, str], log: Path, stdin: bytes = b"", append: bool = False
    ) -> None:
        """Start it. OSError if it cannot be started. ``about``: more environment variables for it."""
        ours = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS}
        log.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC)
        self._log = log
        with tempfile.TemporaryFile() as given, open(open_plain(log, flags), "ab") as output:
            given.write(stdin)
            given.seek(0)
            self._child = ChildProcess(
                words, {**ours, **about}, True, stdin=given, stdout=output, stderr=output
            )

    def wait(self, limit_s: float) -> int | None:
        """Its exit code; None if it still runs after ``limit_s`` seconds."""
        return self._child.wait_end(limit_s)

    def failure(self, code: int | None, limit: str) -> str:
        """Reason of a failure in one line: its exit (None: no end within ``limit``), and its last output."""
        ended = f"no end within {limit}" if code is None else exit_text(code)
        last = _last_line(self._log)
        return f"{ended}: {last}"[:_MOST_REASON] if last else ended

    def close(self) -> None:
        """Kill it with its descendants, if it still runs."""
        self._child.close()


def _last_line(log: Path) -> str:
    with read_plain(log) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
