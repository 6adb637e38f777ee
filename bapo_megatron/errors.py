"""Exceptions that the command line reports as one message without a traceback, each with an exit code.

Raise ConfigError for wrong input (2), Preempted for a requested stop (85), RunStopped for a run that cannot
continue (3), StorageFailed for a failing file system (4); ``runtime/exit_codes.py`` prints them.
``printable`` escapes control characters in text from elsewhere.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Sequence
from typing import NoReturn


class ConfigError(Exception):
    """Wrong input (a recipe, flag or file); exit code 2. The message names the mistake and the fix."""


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
    """Print ``usage`` and exit 0 if the arguments ask for help; otherwise raise ConfigError with it."""
    if {"-h", "--help"} & set(arguments):
        print(usage)
        sys.exit(0)
    raise ConfigError(usage)


NO_REQUEST = "sent no request to OPENAI_BASE_URL or ANTHROPIC_BASE_URL"
"""What a ``ProgramError`` says of an agent program that asked the model nothing: it fails always."""


class ProgramError(Exception):
    """A user's program failed: the message says all, and is shown without a traceback of this package."""


class GapError(ConfigError):
    """Engine mismatch: log-probs of engine and trainer differ too much. Raised on every rank; no retry
    helps."""


class CheckpointError(ConfigError):
    """Incomplete or damaged checkpoint, or unsafe file in a checkpoint or model folder."""


class ResumeError(ConfigError):
    """Failed resume check: the loaded state differs from the saved state. No step has run."""


class Preempted(Exception):
    """Requested stop of a run, which is saved; exit code 85. Raised on every rank."""


class RunStopped(Exception):
    """Stop of a run that cannot continue (full disk, lost engines); exit code 3. The same command resumes it
    from its last checkpoint."""


class StorageFailed(RunStopped):
    """Failing or hanging file system of a run; exit code 4, which requeues the job."""
