"""Loads a recipe file: Python that defines ``recipe()`` and returns a complete configuration."""

from __future__ import annotations

import importlib.util
import traceback
from pathlib import Path
from typing import TypeVar

from bapo_megatron.errors import ConfigError

C = TypeVar("C")


def load_recipe(path: Path, kind: type[C]) -> C:
    """What ``recipe()`` of the file at ``path`` returns; it must be a ``kind``."""
    if not path.is_file():
        raise ConfigError(f"recipe {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"recipe {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        function = getattr(module, "recipe", None)
        if not callable(function):
            raise ConfigError(f"recipe {path} defines no function recipe()")
        config = function()
    except ConfigError:
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(f"recipe {path}: {error!r} in {where.filename}, line {where.lineno}") from error
    if not isinstance(config, kind):
        raise ConfigError(
            f"recipe {path}: recipe() returned {type(config).__name__}, expected {kind.__name__}"
        )
    return config
