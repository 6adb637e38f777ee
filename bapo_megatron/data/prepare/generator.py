"""Generator process for reasoning-gym's tasks: ``python -m bapo_megatron.data.prepare.generator LIFELINE``.

``GeneratedSource`` starts it; it dies with its parent (LIFELINE is a file descriptor). Its hashes of texts
are fixed (PYTHONHASHSEED), so that equal requests have equal replies. Requests are lines of JSON: first
whether the tasks can be used, then the problems of one task after the other.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

from bapo_megatron.data.prepare.normal_form import key
from bapo_megatron.data.rows import Row
from bapo_megatron.errors import ConfigError, printable
from bapo_megatron.reward.reasoning_gym.library import check_task, tasks
from bapo_megatron.reward.reasoning_gym.reward import NO_ANSWER, check_extra_info, extra_info_of_entry, score
from bapo_megatron.runtime.processes import die_with_parent

_DRAW = 1000
"""Problems of a task that are drawn with one seed. If none of them is new, the task has no more."""


def main() -> None:
    """Entry point: answer requests until the input ends."""
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
    """Error of a task or its settings, or None."""
    for one in wanted:
        try:
            check_task(one["task"], generates=True)
            _checked_settings(one["task"], one["settings"])
        except ConfigError as error:
            return str(error)
    return None


def _checked_settings(task: str, settings: object) -> None:
    problems, options = tasks()[task]
    known = sorted({field.name for field in dataclasses.fields(options)} - {"seed", "size"})
    if not isinstance(settings, dict):
        raise ConfigError(f"--task-settings: those of {task} are {settings!r:.80}; they must be an object")
    if wrong := sorted(settings.keys() - set(known)):
        raise ConfigError(f"--task-settings: {task} has no setting {wrong[0]}; it has {', '.join(known)}")
    try:
        problems(config=options(seed=0, **settings))
    except Exception as error:  # each task checks its own settings, most by assert
        told = printable(str(error).partition("\n")[0]) or type(error).__name__
        raise ConfigError(f"--task-settings: {task} refuses {json.dumps(settings)}: {told}") from error


def _made(task: str, count: int, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """``count`` rows with distinct questions; or the error that there are fewer."""
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
    """Endless problems of a task.

    A task seeds its n-th problem with seed + n: nearby seeds would give the same problems, so ours is hashed.
    """
    import numpy as np

    problems, options = tasks()[task]
    draw = 0
    while True:
        name = hashlib.sha256(f"{task} {seed} {draw}".encode()).digest()
        first = int.from_bytes(name[:4], "big") >> 1
        dataset = problems(config=options(seed=first, size=_DRAW, **settings))
        for number in range(_DRAW):
            random.seed(first + number)  # a few tasks draw from the interpreter's generators
            np.random.seed(first + number)
            entry: dict[str, Any] = dataset[number]  # type: ignore[index]
            yield entry
        draw += 1


def _row(task: str, settings: dict[str, Any], entry: dict[str, Any]) -> Row | None:
    """The problem as a chat row; None if the task's verifier does not accept the task's own answer."""
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
