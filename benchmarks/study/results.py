"""Results file of a study (JSON lines) beside its document: one line for each finished arm.

    {"design": ..., "steps": 32, "base": {...}}
    {"arm": "grpo-8x-seed0", "method": "grpo", ..., "command": [...], "figures": {...}, "curves": {...}}

It is small enough to publish, and all that the document says is computed from it: whoever has the file needs
none of the runs to check a number, to judge in another way, or to add arms. Numbers have ``_DIGITS`` digits;
null is NaN.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import open_lock, write_atomically
from benchmarks.study.measures import ArmRecord, read_arm
from benchmarks.study.plan import Arm, StudyPlan, check_same_settings, place_in_checkout

_DIGITS = 5
_OF_A_PLACE = ("--run-dir=", "--name=")
"""Flags that say where an arm lay, not what it was."""

Line = dict[str, Any]
"""A line of the file: a JSON object."""


def stored_arms(plan: StudyPlan) -> dict[str, Line]:
    """Lines of the plan's results file by the arm's name; none if there is no file.

    ConfigError if one of the plan's arms was made with other settings, or if the file is not whole.
    """
    return _stored(plan)[1]


def _stored(plan: StudyPlan) -> tuple[Line, dict[str, Line]]:
    """The head of the results file, and its other lines by arm; both empty if there is no file."""
    path = plan.options.results
    if not path.exists():
        return {}, {}
    try:
        head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
        arms = {line["arm"]: line for line in lines}
        stored = {**head, "arms": {name: line["command"] for name, line in arms.items()}}
        check_same_settings(stored, plan.describe(), f"in {path}", any_place=True)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not a study's results ({error!r}): restore it, or move it away"
        ) from error
    return head, arms


def store_results(plan: StudyPlan) -> list[ArmRecord]:
    """Add the plan's arms that are done to its results file; then all of the plan's arms, read from there.

    An arm with a run directory is read from it, though the file may have it, too. Arms of other plans stay,
    and so does the head, which has the settings of the first arm: fields that came since are no part of it.
    Without such an arm the file is not touched.
    """
    done = {arm.name: _line(arm, read_arm(arm)) for arm in plan.arms if arm.is_done()}
    with _one_at_a_time(plan.options.folder):
        head, stored = _stored(plan)
        arms = stored | done
        if done:
            lines = [head or _head(plan), *sorted(arms.values(), key=_order)]
            text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
            write_atomically(plan.options.results, text)
    return read_results(plan)


def _head(plan: StudyPlan) -> Line:
    """The first line of a new file."""
    described = plan.describe()
    base = {name: place_in_checkout(value) for name, value in described["base"].items()}
    return {"design": described["design"], "steps": described["steps"], "base": base}


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """The lock of a study's results: one at work and its ``--analyse`` write in turns, and lose no line.

    None where there is no folder, and so no study at work.
    """
    if not folder.is_dir():
        yield
        return
    with open_lock(folder / ".results.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def read_results(plan: StudyPlan) -> list[ArmRecord]:
    """The records of the plan's arms that its results file has."""
    arms = stored_arms(plan)
    return [_record(arms[arm.name]) for arm in plan.arms if arm.name in arms]


def _order(line: Line) -> tuple[int, int, str]:
    return line["seed"], line["passes"], line["method"]


def _line(arm: Arm, record: ArmRecord) -> Line:
    train, recipe, *flags = arm.command
    return {
        "arm": arm.name,
        "method": record.method,
        "passes": record.passes,
        "seed": record.seed,
        "command": [train, Path(recipe).name, *(flag for flag in flags if not flag.startswith(_OF_A_PLACE))],
        "figures": dict(zip(record.figures, _numbers(record.figures.values()), strict=True)),
        "curves": {name: _numbers(curve) for name, curve in record.curves.items()},
    }


def _numbers(values: Iterable[float]) -> list[float | None]:
    return [float(f"{value:.{_DIGITS}g}") if np.isfinite(value) else None for value in values]


def _record(line: Line) -> ArmRecord:
    return ArmRecord(
        method=line["method"],
        passes=line["passes"],
        seed=line["seed"],
        figures=_with_nan(line["figures"]),
        curves={name: np.array(curve, float) for name, curve in line["curves"].items()},
    )


def _with_nan(figures: Mapping[str, float | None]) -> dict[str, float]:
    return {name: np.nan if value is None else value for name, value in figures.items()}
