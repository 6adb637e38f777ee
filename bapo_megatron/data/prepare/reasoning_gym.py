"""reasoning-gym dataset source: problems generated from its tasks, without a network.

``generated_rows`` returns the rows of a text ``reasoning-gym:TASK,TASK``. A child process generates them,
``python -m bapo_megatron.data.prepare.reasoning_gym``, because some tasks iterate over sets of strings, whose
order only a new interpreter with a fixed hash seed makes reproducible. It reads a list of (task, count, seed,
settings) as JSON, and prints one row per line. Equal lists give equal rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from bapo_megatron.data.prepare.normal_form import key
from bapo_megatron.data.rows import Row
from bapo_megatron.errors import ConfigError, printable
from bapo_megatron.reward.reasoning_gym import (
    NO_ANSWER,
    check_extra_info,
    check_task,
    extra_info_of_entry,
    score,
    tasks,
)
from bapo_megatron.runtime.child_process import with_import_path
from bapo_megatron.runtime.processes import die_with_parent

PREFIX = "reasoning-gym:"
"""Prefix of a task source: ``reasoning-gym:chain_sum,products``."""

_COMMAND = (sys.executable, "-m", "bapo_megatron.data.prepare.reasoning_gym")

_DRAW = 1000
"""Problems drawn from a task with one seed; if none is new, the task has no more."""


def generated_rows(text: str, size: int | None, seed: int, settings: Mapping[str, Any]) -> list[Row]:
    """Return ``size`` problems for ``reasoning-gym:TASK,TASK``, one of each task in turn, no question twice
    within a task. ``settings``: by task name, or of all tasks. Raises ConfigError if ``size`` is missing or
    below the number of tasks, or if a task is unusable or runs out."""
    names = [name.strip() for name in text.removeprefix(PREFIX).split(",") if name.strip()]
    if size is None:
        raise ConfigError(f"source {text}: how many problems? Give --size, which the tasks share equally")
    if size < len(names):
        raise ConfigError(
            f"source {text}: --size {size} is less than one problem for each of {len(names)} tasks"
        )
    by_task = bool(settings) and all(name in names for name in settings)
    share, rest = divmod(size, len(names))
    wanted = [
        (task, share + (number < rest), seed, settings.get(task, {}) if by_task else dict(settings))
        for number, task in enumerate(names)
    ]
    environment = with_import_path({**os.environ, "PYTHONHASHSEED": "0"})
    done = subprocess.run(
        (*_COMMAND, str(os.getpid())),
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        problem = printable(done.stderr.strip().rpartition("\n")[2])
        raise ConfigError(f"source {text}: {problem or f'its process ended with {done.returncode}'}")
    return [json.loads(line) for line in done.stdout.splitlines()]


# --- the child process ---------------------------------------------------------------------------


def main() -> None:
    """Print the rows that standard input asks for, one of each task in turn."""
    die_with_parent(parent=int(sys.argv[1]))
    wanted = json.load(sys.stdin)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # some generators print
            for task, *_ in wanted:
                check_task(task, generates=True)
            made = [_made(*entry) for entry in wanted]
    except ConfigError as error:
        sys.exit(str(error))
    for turn in zip_longest(*made):
        for row in filter(None, turn):
            print(json.dumps(row))


def _made(task: str, count: int, seed: int, settings: dict[str, Any]) -> list[Row]:
    """Return ``count`` rows with distinct questions. Raises ConfigError if there are fewer."""
    rows: dict[bytes, Row] = {}
    vain = 0
    for entry in _entries(task, seed, settings):
        question = key(entry["question"])
        vain += 1
        if question not in rows and (row := _row(task, settings, entry)):
            vain = 0
            rows[question] = row
        if len(rows) == count:
            break
        if vain == _DRAW:
            raise ConfigError(
                f"{task} has no more than {len(rows)} different questions with these settings, and {count} "
                "are asked for: lower --size, or widen its --task-settings"
            )
    return [*rows.values()]


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
