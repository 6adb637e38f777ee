"""Loader of a user's function or class by its dotted path, ``package.module:name``.

It imports the module, so the user's code runs. ConfigError if there is no such module or name. For
`algorithm.loss`, `reward.function` and `rollout.engine`. Used in ``algo/``, ``environment/``, ``reward/`` and
``rollout/``.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from bapo_megatron.errors import ConfigError


def load_dotted_path(field: str, path: str, kind: str) -> Any:
    """The object that ``path`` names. ConfigError, with the ``field``, if it cannot be imported.

    Modules in the present directory are found, however the program was started. ``kind``: `function` or
    `class`, for the message.
    """
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module: Any = importlib.import_module(module_name)
    except Exception as error:  # a module raises what it likes
        raise ConfigError(
            f"{field}={path}: importing {module_name} failed with {error!r}; mend the module, or "
            f"start where it can be found (the present directory and PYTHONPATH are searched)"
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{field}={path}: {module_name} has no {kind} {name}; name one that it has")
    return found
