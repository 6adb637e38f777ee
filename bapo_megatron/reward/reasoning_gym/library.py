"""Lazy import of the package reasoning-gym, and the registry of its tasks.

The import takes seconds and loads all tasks at once; one of them, zebra_puzzles, needs pycosat to generate
problems, and that a C compiler. The other tasks work without it. ConfigError without the package. Used by
``data/prepare/generator.py``, ``reward/functions.py`` and ``reward.py``.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

from bapo_megatron.errors import ConfigError

Verifier = Callable[[str, dict[str, Any]], Any]
"""Verifier of a task, its ``score_answer``: from an answer and the problem's entry to a score."""

INSTALL = "pip install 'bapo-megatron[real]'"

UNUSABLE = {
    "composite": "it mixes other tasks: name those",
    "game_of_life_halting": "its verifier calls every answer right",
}
"""Unusable tasks, with the reason."""

_COMPILED = "pycosat"
_NEED_COMPILED = "zebra_puzzles"


class _Absent(ModuleType):
    """A stand-in for pycosat while reasoning-gym is imported."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.__name__}.{name}: {self.__name__} is not installed")


@cache
def tasks() -> Mapping[str, tuple[type, type]]:
    """Usable tasks by name, with their classes of problems and settings. ConfigError if not installed."""
    absent = importlib.util.find_spec(_COMPILED) is None
    if absent:
        sys.modules[_COMPILED] = _Absent(_COMPILED)
    try:
        import reasoning_gym.factory
    except ImportError as error:
        raise ConfigError(f"reasoning-gym cannot be imported ({error}): {INSTALL}") from error
    finally:
        if absent:
            del sys.modules[_COMPILED]
    found = reasoning_gym.factory.DATASETS
    return {name: found[name] for name in sorted(found) if name not in UNUSABLE}


def check_task(name: str, generates: bool = False) -> None:
    """Check of a task: ConfigError if ``name`` is unusable. ``generates``: also for generating problems."""
    if name in UNUSABLE:
        raise ConfigError(f"reasoning-gym's task {name} cannot be used: {UNUSABLE[name]}")
    if name not in tasks():
        near = difflib.get_close_matches(name, tasks(), 3, 0.5)
        told = f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(tasks())}"
        raise ConfigError(f"reasoning-gym has no task {name!r}; {told}")
    if generates and name == _NEED_COMPILED and importlib.util.find_spec(_COMPILED) is None:
        raise ConfigError(
            f"the task {name} needs {_COMPILED}, which is compiled: with a C compiler and Python.h "
            f"(python3-dev) run pip install {_COMPILED}==0.6.6; its other tasks do without"
        )


@cache
def verifier(task: str, settings: str) -> Verifier:
    """Verifier of a task, for problems that were generated with ``settings``, a JSON object."""
    check_task(task)
    problems, options = tasks()[task]
    found: Verifier = problems(config=options(**json.loads(settings))).score_answer  # type: ignore[attr-defined]
    return found
