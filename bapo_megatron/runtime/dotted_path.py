"""Loader of a user's function or class: ``load_dotted_path`` imports and returns ``package.module:name``.

Importing the module runs the user's code. Raises ConfigError if module or name is missing. For settings such
as `algorithm.loss`, `reward.function` and `rollout.engine`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import Any

from bapo_megatron.errors import ConfigError

_MOST_NAMES = 8
"""Most names listed in a message."""


def load_dotted_path(field: str, path: str, kind: str, written: str = "") -> Any:
    """Import and return the object ``path``. Raises ConfigError, with the ``field``, on failure.

    Always searches the current directory, too. ``kind``: `function` or `class`, for the message, which lists
    those in the module, the most similar first. ``written``: the path as the user wrote it, if different.
    """
    shown = f"{field}={written or path}"
    module_name, _, name = path.partition(":")
    if module_name.endswith(".py"):
        file = Path(module_name)
        raise ConfigError(
            f"{shown}: {module_name} is a file; name its module, {file.stem}:{name}, and start where the "
            f"file is, or set PYTHONPATH={file.parent.absolute()}"
        )
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module: Any = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything
        raise ConfigError(
            f"{shown}: importing {module_name} failed with {error!r}; mend the module, or "
            f"start where it can be found (the present directory and PYTHONPATH are searched)"
        ) from error
    target = getattr(module, name, None)
    if not callable(target):
        has = _defined(module, kind, name)
        listed = f": {', '.join(has)}" if has else ""
        raise ConfigError(f"{shown}: {module_name} has no {kind} {name}; name one that it has{listed}")
    return target


def _defined(module: Any, kind: str, like: str) -> list[str]:
    """Return a module's own public functions or classes, the names most similar to ``like`` first."""
    is_kind = inspect.isclass if kind == "class" else inspect.isfunction
    names = [
        name
        for name, value in vars(module).items()
        if is_kind(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    likeness = {name: difflib.SequenceMatcher(None, name.lower(), like.lower()).ratio() for name in names}
    return sorted(names, key=lambda name: -likeness[name])[:_MOST_NAMES]
