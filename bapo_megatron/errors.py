"""Exceptions of the command line: each is reported as one message without a traceback, with an exit code."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Sequence
from typing import NoReturn


class ConfigError(Exception):
    """Wrong input: a recipe, flag or file. The command line prints the message and exits with code 2."""


def printable(text: str) -> str:
    """Terminal-safe text: ``text`` with every control character escaped, except line ends and tabs.

    Texts of files and models could otherwise move the cursor, set the window's title or hide other output.
    """
    return "".join(
        char.encode("unicode_escape").decode()
        if char not in "\n\t" and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else char
        for char in text
    )


def refuse_arguments(arguments: Sequence[str], usage: str) -> NoReturn:
    """Usage error: print ``usage`` and exit 0 if help is asked for, else raise ConfigError with it."""
    if {"-h", "--help"} & set(arguments):
        print(usage)
        sys.exit(0)
    raise ConfigError(usage)


class GapError(ConfigError):
    """Engine mismatch: log-probs of engine and trainer differ by more than a limit; no restart helps."""


class CheckpointError(ConfigError):
    """Incomplete or damaged checkpoint."""


class ResumeError(ConfigError):
    """Failed resume check: the loaded state differs from the saved state. No step was made."""


class Preempted(Exception):
    """Preemption: the run was told to stop, and is saved. Exit code 85."""


class RunStopped(Exception):
    """Stop of a run that cannot go on now (full disk, lost engines). Its steps are saved. Exit code 3."""


class StorageFailed(RunStopped):
    """Storage failure: the run's file system fails or hangs. Exit code 4, at which a job is requeued."""
