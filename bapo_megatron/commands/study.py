"""``bapo study staleness [flags]``: starts the study of ``benchmarks/study``, which needs a checkout.

ConfigError without one. The study makes its runs by the commands of ``cli.run``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from bapo_megatron.cli import run
from bapo_megatron.errors import ConfigError

_CHECKOUT = Path(__file__).parents[2]


def study_command(arguments: Sequence[str]) -> int:
    """Run the study in ``benchmarks/study``. ConfigError if the package is installed without a checkout."""
    if not (_CHECKOUT / "benchmarks/study/command.py").is_file():
        raise ConfigError(
            f"bapo study runs from a checkout of the repository, and {_CHECKOUT} is none: clone it and "
            "install the package from there, `pip install -e .`"
        )
    sys.path.insert(0, str(_CHECKOUT))  # before any other package called benchmarks
    code: int = importlib.import_module("benchmarks.study.command").study_command(arguments, run)
    return code
