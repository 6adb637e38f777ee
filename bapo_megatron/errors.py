"""Errors that a user can fix; each is reported as one message, without a traceback."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Sequence
from typing import NoReturn


class ConfigError(Exception):
    """A recipe, flag or input file is wrong. The command line prints the message and exits with code 2."""


def printable(text: str) -> str:
    """``text`` with its control characters as escapes, but line ends and tabs.

    Texts of files and models could move the cursor, change the window's title, or hide what stands beside."""
    return "".join(
        char.encode("unicode_escape").decode()
        if char not in "\n\t" and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else char
        for char in text
    )


def refuse_arguments(arguments: Sequence[str], usage: str) -> NoReturn:
    """Print ``usage`` and exit if help is asked for; else ConfigError with it."""
    if {"-h", "--help"} & set(arguments):
        print(usage)
        sys.exit(0)
    raise ConfigError(usage)


class GapError(ConfigError):
    """Engine and trainer disagree more than the run allows. To start again unchanged would not help."""


class CheckpointError(ConfigError):
    """A checkpoint is incomplete or damaged."""


class ResumeError(ConfigError):
    """Error of the resume check: the loaded state differs from the state that was saved. No step was made."""


class Preempted(Exception):
    """The run was told to stop and is saved. The command line says so and exits with code 85."""


class RunStopped(Exception):
    """The run cannot go on now; its steps are saved. The command line prints why and exits with code 3."""


class StorageFailed(RunStopped):
    """The run's file system fails or hangs, perhaps for now. Exit code 4: a job is started again."""
