"""reasoning-gym dataset source: problems generated from its tasks, without a network.

``tasks_of`` returns the ``GeneratedSource`` for a text ``reasoning-gym:TASK,TASK``. A child process generates
the problems, ``python -m bapo_megatron.data.prepare.reasoning_gym LIFELINE``, because some tasks iterate over
sets of strings, whose order only a new interpreter with a fixed hash seed makes reproducible. LIFELINE is the
file descriptor of a pipe that closes when the parent ends. Requests and replies are lines of JSON: first
whether the tasks are usable, then each task's problems. Equal requests get equal replies.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bapo_megatron.data.prepare.normal_form import key
from bapo_megatron.data.rows import Row, digest_of_rows
from bapo_megatron.errors import ConfigError, printable
from bapo_megatron.reward.reasoning_gym import (
    NO_ANSWER,
    check_extra_info,
    check_task,
    extra_info_of_entry,
    score,
    tasks,
)
from bapo_megatron.runtime.child_process import AnsweringChild, ChildError, with_import_path
from bapo_megatron.runtime.processes import die_with_parent

PREFIX = "reasoning-gym:"
"""Prefix of a task source: ``reasoning-gym:chain_sum,products``."""

_LIMIT_S = 24 * 3600.0
_COMMAND = (sys.executable, "-m", "bapo_megatron.data.prepare.reasoning_gym")

_DRAW = 1000
"""Problems drawn from a task with one seed; if none is new, the task has no more."""


@dataclass(frozen=True)
class GeneratedSource:
    """Dataset source of generated problems: several tasks in equal shares, no question twice within a task.
    The first call of ``rows`` or ``digest`` generates all in a child process, blocking, and caches them;
    raises ConfigError if that fails."""

    tasks: tuple[str, ...]
    size: int
    seed: int
    settings: Mapping[str, Any]
    """Settings by task name, or of all tasks."""

    @property
    def name(self) -> str:
        return f"{PREFIX}{','.join(self.tasks)}, {self.size} problems, seed {self.seed}"

    def rows(self) -> Iterator[Row]:
        """Yield problems, one of each task in turn. Raises ConfigError if a task is unusable or runs out."""
        yield from self._rows

    def digest(self) -> str:
        return digest_of_rows(self._rows)

    @cached_property
    def _rows(self) -> list[Row]:
        share, rest = divmod(self.size, len(self.tasks))
        shares = [share + (number < rest) for number in range(len(self.tasks))]
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
            answers = [] if problem else [child.ask({"make": entry}, _LIMIT_S) for entry in wanted]
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
        settings: Mapping[str, Any] = self.settings.get(task, {}) if by_task else self.settings
        return settings


def tasks_of(text: str, size: int | None, seed: int, settings: Mapping[str, Any]) -> GeneratedSource:
    """Return the source for ``reasoning-gym:TASK,TASK``; generates nothing yet. Raises ConfigError if
    ``size`` is missing or below the number of tasks."""
    names = tuple(name.strip() for name in text.removeprefix(PREFIX).split(",") if name.strip())
    if size is None:
        raise ConfigError(f"source {text}: how many problems? Give --size, which the tasks share equally")
    if size < len(names):
        raise ConfigError(
            f"source {text}: --size {size} is less than one problem for each of {len(names)} tasks"
        )
    return GeneratedSource(names, size, seed, settings)


# --- the child process ---------------------------------------------------------------------------


def main() -> None:
    """Answer requests until the input ends."""
    die_with_parent(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some generators print
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for line in sys.stdin:
        question = json.loads(line)
        answer: object = _problem(question["check"]) if "check" in question else _made(**question["make"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _problem(wanted: list[dict[str, Any]]) -> str | None:
    for entry in wanted:
        try:
            check_task(entry["task"], generates=True)
            _check_settings(entry["task"], entry["settings"])
        except ConfigError as error:
            return str(error)
    return None


def _check_settings(task: str, settings: dict[str, Any]) -> None:
    problems, options = tasks()[task]
    try:
        problems(config=options(seed=0, **settings))
    except Exception as error:  # an unknown one, or what a task asserts
        told = printable(str(error).partition("\n")[0]) or type(error).__name__
        raise ConfigError(f"--task-settings: {task} refuses {json.dumps(settings)}: {told}") from error


def _made(task: str, count: int, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Return ``count`` rows with distinct questions, or the problem that there are fewer."""
    rows: list[Row] = []
    seen: set[bytes] = set()
    vain = 0
    for entry in _entries(task, seed, settings):
        question = key(entry["question"])
        vain += 1
        if question not in seen and (row := _row(task, settings, entry)):
            vain = 0
            seen.add(question)
            rows.append(row)
        if len(rows) == count:
            return {"rows": rows}
        if vain == _DRAW:
            return {
                "problem": f"{task} has no more than {len(rows)} different questions with these settings, "
                f"and {count} are asked for: lower --size, or widen its --task-settings"
            }
    raise AssertionError("entries have no end")


def _entries(task: str, seed: int, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a task's problems endlessly. A task seeds its n-th problem with seed + n, so nearby seeds would
    repeat problems: our seed is hashed."""
    import numpy as np

    problems, options = tasks()[task]
    draw = 0
    while True:
        name = hashlib.sha256(f"{task} {seed} {draw}".encode()).digest()
        first = int.from_bytes(name[:4], "big") >> 1
        dataset = problems(config=options(seed=first, size=_DRAW, **settings))
        for number in range(_DRAW):
            random.seed(first + number)  # a few tasks use global generators
            np.random.seed(first + number)
            entry: dict[str, Any] = dataset[number]  # type: ignore[index]
            yield entry
        draw += 1


def _row(task: str, settings: dict[str, Any], entry: dict[str, Any]) -> Row | None:
    """Return the problem as a chat row; None if the task's verifier rejects the task's own answer."""
    answer = entry["answer"]
    info = extra_info_of_entry(task, settings, entry)
    if check_extra_info(info) is not None or not entry["question"].strip():
        return None
    if answer is not None and score(info, f"<answer>{answer}</answer>") < 1:
        return None
    return {
        "prompt": entry["question"],
        "reward_model": {"ground_truth": answer or NO_ANSWER},
        "data_source": f"reasoning_gym/{task}",
        "extra_info": info,
    }


if __name__ == "__main__":
    main()
