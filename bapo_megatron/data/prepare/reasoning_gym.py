"""reasoning-gym dataset source: problems generated from its tasks, without a network.

A child process generates them (generator.py): some tasks iterate over sets of texts, whose order only a new
interpreter with a fixed hash seed can fix. Used by ``options.py`` and ``sources.py``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bapo_megatron.data.rows import Row
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.child_process import AnsweringChild, ChildError, with_import_path

PREFIX = "reasoning-gym:"
"""Prefix of a source of tasks: ``reasoning-gym:chain_sum,products``."""

_LIMIT_S = 24 * 3600.0
_COMMAND = (sys.executable, "-m", "bapo_megatron.data.prepare.generator")


@dataclass(frozen=True)
class GeneratedSource:
    """Source of generated problems: some tasks in equal shares, none with a question twice.

    All are generated at the first call, in a child process, and kept. ConfigError if that fails. Made by
    ``tasks_of`` for ``sources.open_source``.
    """

    tasks: tuple[str, ...]
    size: int
    seed: int
    settings: Mapping[str, Any]
    """Settings of each task by its name, or of all tasks."""

    @property
    def name(self) -> str:
        """Name of the source in the data card."""
        return f"{PREFIX}{','.join(self.tasks)}, {self.size} problems, seed {self.seed}"

    def rows(self) -> Iterator[Row]:
        """Problems, one of each task in turn. ConfigError for an unusable task, or too few problems."""
        yield from self._rows

    def digest(self) -> str:
        """SHA-256 of the rows as JSON, a line each."""
        found = hashlib.sha256()
        for row in self._rows:
            found.update(json.dumps(row, sort_keys=True).encode() + b"\n")
        return found.hexdigest()

    @cached_property
    def _rows(self) -> list[Row]:
        shares = [self.size // len(self.tasks)] * len(self.tasks)
        for number in range(self.size % len(self.tasks)):
            shares[number] += 1
        made = self._made(shares)
        turns = range(max(shares))
        return [rows[turn] for turn in turns for rows in made if turn < len(rows)]

    def _made(self, shares: list[int]) -> list[list[Row]]:
        child = AnsweringChild(_COMMAND, with_import_path({**os.environ, "PYTHONHASHSEED": "0"}))
        try:
            wanted = [
                {"task": task, "count": share, "seed": self.seed, "settings": self._settings_of(task)}
                for task, share in zip(self.tasks, shares, strict=True)
            ]
            problem = child.ask({"check": wanted}, _LIMIT_S)
            answers = [] if problem else [child.ask({"make": one}, _LIMIT_S) for one in wanted]
        except ChildError as error:
            raise ConfigError(f"{self.name}: the process that makes the problems failed: {error}") from error
        finally:
            child.close()
        problem = problem or next((answer["problem"] for answer in answers if "problem" in answer), None)
        if problem:
            raise ConfigError(f"{PREFIX}{','.join(self.tasks)}: {problem}")
        return [answer["rows"] for answer in answers]

    def _settings_of(self, task: str) -> Mapping[str, Any]:
        by_task = bool(self.settings) and all(name in self.tasks for name in self.settings)
        found: Mapping[str, Any] = self.settings.get(task, {}) if by_task else self.settings
        return found


def tasks_of(text: str, size: int | None, seed: int, settings: Mapping[str, Any]) -> GeneratedSource:
    """Source of ``reasoning-gym:TASK,TASK``. ConfigError if its size is missing, or too small."""
    names = tuple(name.strip() for name in text.removeprefix(PREFIX).split(",") if name.strip())
    if not names:
        raise ConfigError(f"source {text}: it names no task; give e.g. {PREFIX}chain_sum,products")
    if len(set(names)) < len(names):
        raise ConfigError(f"source {text}: it names a task twice")
    if size is None:
        raise ConfigError(f"source {text}: how many problems? Give --size, which the tasks share equally")
    if size < len(names):
        raise ConfigError(
            f"source {text}: --size {size} is less than one problem for each of {len(names)} tasks"
        )
    return GeneratedSource(names, size, seed, settings)
