"""Examples for ``bapo eval compare --examples``: problems of a suite with the responses of two evaluations.

The suite's file must be as it was; ConfigError if it has changed. Used by ``command.py``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from bapo_megatron.data.fields import messages_of
from bapo_megatron.data.rows import read_rows
from bapo_megatron.errors import ConfigError
from bapo_megatron.evaluation.comparison import suites_of_both
from bapo_megatron.evaluation.responses import RESPONSES, Response, first_responses, read_summary


@dataclass(frozen=True)
class Example:
    """Example: one problem, with the first response of each evaluation, as plain data.

    Made by ``examples``, printed by ``command.py``.
    """

    suite: str
    problem: int
    question: str
    """The last message of the prompt."""
    a: Response
    b: Response


def examples(a: Path, b: Path, count: int) -> list[Example]:
    """The first ``count`` problems of every suite that both evaluations have: the choice is not by outcome.

    ``a`` and ``b``: as for `compare`. ConfigError if the suite's file is not what it was when A asked it.
    """
    found = []
    for suite, (folder_a, folder_b) in suites_of_both(a, b).items():
        questions = _questions(suite, folder_a, count)
        answers_a, answers_b = (
            first_responses(folder / RESPONSES, len(questions)) for folder in (folder_a, folder_b)
        )
        found += [
            Example(suite, problem, question, answers_a[problem], answers_b[problem])
            for problem, question in enumerate(questions)
        ]
    return found


def _questions(suite: str, folder: Path, count: int) -> list[str]:
    about = read_summary(folder)["suite"]
    if "path" not in about:
        raise ConfigError(
            f"suite {suite}: {folder} does not say where the suite's file is, because an earlier version "
            "wrote it; run `bapo eval` again with its flags, which only writes the summary anew"
        )
    path = Path(about["path"])
    if not path.is_file():
        raise ConfigError(f"suite {suite}: {path}, which {folder} was asked from, is gone; bring it back")
    if hashlib.sha256(path.read_bytes()).hexdigest() != about["sha256"]:
        raise ConfigError(
            f"suite {suite}: {path} has changed since {folder} was asked from it; bring it back"
        )
    return [messages_of(row)[-1]["content"] for row in read_rows(path)[:count]]
