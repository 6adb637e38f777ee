"""Recipe loader: ``load_recipe`` runs a Python file and returns the configuration of its ``recipe()``.

The file's code runs in this process; what it prints goes to standard error. Any failure in it raises
ConfigError. Does not check the configuration's fields.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from typing import TypeVar

from bapo_megatron.config.removed import removed_settings
from bapo_megatron.errors import ConfigError

C = TypeVar("C")


def load_recipe(path: Path, kind: type[C]) -> C:
    """Return the configuration from ``recipe()`` in ``path``; ConfigError if it fails or is no ``kind``."""
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"recipe {path} is not a Python file, or does not exist")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up annotations
    try:
        with redirect_stdout(sys.stderr):  # on standard output a script expects a job's id, or JSON
            spec.loader.exec_module(module)
            function = getattr(module, "recipe", None)
            if not callable(function):
                raise ConfigError(f"recipe {path} defines no function recipe()")
            config = function()
    except ConfigError:
        raise
    except SystemExit as error:  # its exit code is not the command's: 0 would be a run that is done
        raise ConfigError(f"recipe {path} ends the program by sys.exit({error.code!r})") from error
    except Exception as error:  # of a syntax error the message, as its place follows
        told = f"SyntaxError({error.msg!r})" if isinstance(error, SyntaxError) else repr(error)
        gone = removed_settings(re.findall(r"unexpected keyword argument '(\w+)'", str(error)))
        raise ConfigError(
            ". ".join([f"recipe {path}: {told} {_place(error, spec.origin)}", *gone])
        ) from error
    if not isinstance(config, kind):
        raise ConfigError(
            f"recipe {path}: recipe() returned {type(config).__name__}, expected {kind.__name__}"
        )
    return config


def _place(error: BaseException, recipe: str | None) -> str:
    """Return file and line of an error: the recipe's last line in the traceback."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"in {error.filename}, line {error.lineno}"  # the traceback ends in the importer
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename == recipe), frames[-1])
    return f"in {frame.filename}, line {frame.lineno}"
