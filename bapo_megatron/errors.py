"""Exceptions of the command line: each is reported as one message without a traceback, with an exit code.

``runtime/exit_codes.py`` prints them. Any other exception is a traceback and exit code 1.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Sequence
from typing import NoReturn


class ConfigError(Exception):
    """Wrong input: a recipe, flag or file; exit code 2. The message names what is wrong and the fix."""


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
    """Engine mismatch: log-probs of engine and trainer differ by more than a limit; no restart helps.

    Raised on every rank.
    """


class CheckpointError(ConfigError):
    """Incomplete or damaged checkpoint, or unsafe file of a checkpoint or model folder."""


class ResumeError(ConfigError):
    """Failed resume check: the loaded state differs from the saved state. No step was made."""


class Preempted(Exception):
    """Preemption: the run was told to stop, and is saved; exit code 85. Raised on every rank."""


class RunStopped(Exception):
    """Stop of a run that cannot continue now (full disk, lost engines); exit code 3.

    The same command continues the run from its last checkpoint.
    """


class StorageFailed(RunStopped):
    """Storage failure: the run's file system fails or hangs; exit code 4, at which a job is requeued."""
