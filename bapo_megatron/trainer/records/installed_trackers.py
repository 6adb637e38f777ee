"""Preflight check of ``logging.trackers``: the packages of the chosen trackers must be installed.

ConfigError with the command that installs them. No package is imported, no server asked.
``trainer/preflight.py`` calls it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

from bapo_megatron.config import LoggingConfig
from bapo_megatron.config.validation import raise_problems

_EXTRA = "the extra `trackers` of bapo-megatron"


def check_logging(logging: LoggingConfig) -> None:
    """ConfigError if a chosen tracker is not installed. Call before the run starts."""
    raise_problems(list(_problems(logging)))


def _problems(logging: LoggingConfig) -> Iterator[str]:
    for name in logging.chosen:
        if not _is_installed(name):
            package = "mlflow-skinny" if name == "mlflow" else name
            extra = "" if name == "tensorboard" else f" or {_EXTRA}"
            yield (
                f"logging.trackers has {name}, but {package} is not installed: "
                f"`pip install {package}`{extra}, or take {name} out"
            )
        elif name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI") and not _has_database():
            yield (
                f"logging.trackers has mlflow without MLFLOW_TRACKING_URI, but sqlalchemy and alembic, for a "
                f"database in the run directory, are not installed: `pip install sqlalchemy alembic` or "
                f"{_EXTRA}, or set MLFLOW_TRACKING_URI"
            )


def _has_database() -> bool:
    return _is_installed("sqlalchemy") and _is_installed("alembic")


def _is_installed(module: str) -> bool:
    """Whether ``module`` can be imported; a folder of that name in the present directory is none."""
    found = find_spec(module)
    return found is not None and found.has_location
