"""CHAMP dataset source: competition problems in the package champ-dataset.

Only those of its 270 problems whose answer is a number: the other answers are words, or formulas in plain
text, and the maths reward reads LaTeX. The package's file is read; nothing of it is imported. Used by
``sources.py``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from bapo_megatron.data.rows import Row
from bapo_megatron.errors import ConfigError

NAME = "champ"

_PACKAGE, _FILE = "champ_dataset", "dataset_files/v0.json"
_ALTERNATIVE = re.compile(r",? or (?:equivalently|approximately) |\s*\(i\.e\.")
_NUMBER = re.compile(r"-?\d+(?:\.\d+|/\d+)?")


class ChampSource:
    """Source of the package's problems, in its order; each call reads the file anew.

    Made by ``sources.open_source``.
    """

    name = NAME

    def rows(self) -> Iterator[Row]:
        """Problems whose answer is a number. ConfigError if the package is not installed."""
        for problem in json.loads(self._path.read_text(encoding="utf-8"))["problems"].values():
            if answer := _number(problem["_raw_answer"]):
                yield {
                    "problem": problem["_text"],
                    "answer": answer,
                    "identifier": problem["identifier"],
                    "category": problem["category"],
                    "data_source": NAME,
                }

    def digest(self) -> str:
        """SHA-256 of the package's file."""
        return hashlib.sha256(self._path.read_bytes()).hexdigest()

    @cached_property
    def _path(self) -> Path:
        found = importlib.util.find_spec(_PACKAGE)
        if found is None or found.origin is None:
            raise ConfigError(
                f"source {NAME}: run pip install --no-deps champ-dataset==1.0.0, which holds it"
            )
        return Path(found.origin).parent / _FILE


def _number(answer: str | None) -> str | None:
    """First form of an answer that is a number; None if there is none."""
    forms = _ALTERNATIVE.split((answer or "").replace("@@", ""))
    return next((form.strip() for form in forms if _NUMBER.fullmatch(form.strip())), None)
