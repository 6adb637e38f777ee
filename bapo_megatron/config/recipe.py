"""Recipe loader: runs a Python file that defines ``recipe()``, and returns its configuration.

The file's code runs in this process. ConfigError for any failure; the fields themselves are not checked here.
Every command that takes a recipe calls it. Used in ``commands/`` and this folder.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from bapo_megatron.algo.papo_schedule import PapoConfig
from bapo_megatron.errors import ConfigError

C = TypeVar("C")


def load_recipe(path: Path, kind: type[C]) -> C:
    """Configuration that ``recipe()`` in ``path`` returns. ConfigError if it fails or returns no ``kind``."""
    if not path.is_file():
        raise ConfigError(f"recipe {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"recipe {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    _serve_former_paths()
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


def _serve_former_paths() -> None:
    """Backward compatibility: the import paths of version 0.1, for recipes (tests/fixtures has one)."""
    former_modules: dict[str, dict[str, Any]] = {
        "bapo_megatron.recipe": {"load_recipe": load_recipe},
        "bapo_megatron.algo.polarity_control": {"PolarityConfig": PapoConfig},
    }
    for former, names in former_modules.items():
        module = ModuleType(former, "A module of version 0.1, for recipes that import it.")
        vars(module).update(names)
        if former not in sys.modules:
            sys.modules[former] = module
            package, _, name = former.rpartition(".")
            setattr(importlib.import_module(package), name, module)
