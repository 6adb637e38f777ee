"""Exceptions that the command line reports as one message without a traceback, each with an exit code.

Raise ConfigError for wrong input (2), Preempted for a requested stop (85), RunStopped for a run that cannot
continue (3), StorageFailed for a failing file system (4); ``runtime/exit_codes.py`` prints them. ProgramError
ends no run: a worker process reports it. ``printable`` escapes control characters in text from elsewhere.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Sequence
from typing import NoReturn


class ConfigError(Exception):
    """Wrong input (a recipe, flag or file); the message names the mistake and the fix. Exit code 2, or 4 if
    a failing file system is the cause."""


def printable(text: str) -> str:
    """Return ``text`` with every control character escaped except line ends and tabs. Text from files and
    models could otherwise move the cursor, set the window title or hide other output."""
    return "".join(
        char.encode("unicode_escape").decode()
        if char not in "\n\t" and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else char
        for char in text
    )


def refuse_arguments(arguments: Sequence[str], usage: str) -> NoReturn:
    """Print ``usage`` and exit with 0 if the arguments ask for help; otherwise raise ConfigError(usage)."""
    if {"-h", "--help"} & set(arguments):
        print(usage)
        sys.exit(0)
    raise ConfigError(usage)


NO_REQUEST = "sent no request to OPENAI_BASE_URL or ANTHROPIC_BASE_URL"
"""Text in the ``ProgramError`` of an agent program that never called the model: no episode will work."""


class ProgramError(Exception):
    """Failure of an environment's agent program, raised in a worker process, which reports the message."""


class GapError(ConfigError):
    """Engine mismatch: log-probs of engine and trainer differ too much. Raised on every rank after a step."""


class CheckpointError(ConfigError):
    """Damaged or incomplete checkpoint or model folder, or an unsafe file in one."""


class ResumeError(ConfigError):
    """Failed resume check: loaded and saved state differ. Raised on every rank, before any step."""


class Preempted(Exception):
    """Requested stop of a run (signal, end of the job). Raised on every rank, after a save; exit code 85."""


class RunStopped(Exception):
    """Stop of a run that cannot continue (full disk, lost engines); exit code 3. The same command resumes it
    from its last checkpoint."""


class StorageFailed(RunStopped):
    """Failing or hanging file system, perhaps on one rank only; exit code 4, which requeues the job."""
