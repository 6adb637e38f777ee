"""Loader of the function or class that a setting names, such as `algorithm.loss` or `reward.function`.

``load_dotted_path`` imports ``package.module`` and returns ``name`` of a path ``package.module:name``, which
runs the user's code. Raises ConfigError if the import fails or the module has no such callable.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from bapo_megatron.errors import ConfigError


def load_dotted_path(field: str, path: str, kind: str, written: str = "") -> Any:
    """Import and return the object ``path``. Raises ConfigError, with the ``field``, on failure.

    Adds the current directory to ``sys.path``. ``kind``: `function` or `class`, for the message. ``written``:
    the path as the user wrote it, if different.
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
        raise ConfigError(f"{shown}: {module_name} has no {kind} {name}")
    return target
