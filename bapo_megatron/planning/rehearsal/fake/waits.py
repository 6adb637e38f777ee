"""Counters of host waits in a rehearsal, by phase and line of the program; and the finder of that line.

At a host wait the CPU blocks until the GPU has finished: at a read of a value, a shape that depends on
values, a copy without ``non_blocking``, a ``synchronize``. ``Meter`` counts them here. ``process_group.py``
and ``planning/rehearsal/rank.py`` take only the functions that name a line of the program. Used by
``process_group.py``, ``meter.py`` and ``planning/rehearsal/rank.py``.
"""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import FrameType

import torch

from bapo_megatron.planning.records import Wait

_OWN = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_ROOT = Path(__file__).parents[4]
_PYTHON = f"/python{sys.version_info.major}.{sys.version_info.minor}/"


class HostWaits:
    """Counters of host waits and guesses (reads of unknown values), by phase and line. Part of ``Meter``."""

    def __init__(self) -> None:
        self.waits: Counter[Wait] = Counter()
        self.guesses: Counter[Wait] = Counter()

    def wait(self, phase: str, what: str) -> None:
        """Count a host wait at the line of the program that causes it."""
        self.waits[Wait(phase, what, program_line())] += 1

    def guess(self, phase: str, what: str) -> None:
        """Count a read of an unknown value."""
        self.guesses[Wait(phase, what, program_line())] += 1


def program_line() -> str:
    """``file:line`` of the innermost running function that is neither torch's nor the rehearsal's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_of_program(frame.f_code.co_filename, frame.f_code.co_name):
            return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@cache
def is_of_program(file: str, function: str) -> bool:
    """Whether a function is the program's or one of its libraries': not torch's, Python's, nor ours."""
    if function in ("__torch_function__", "__torch_dispatch__"):
        return False  # a mode's handler lies between two functions of the program
    return not file.startswith((_TORCH, _OWN, "<")) and ("site-packages" in file or _PYTHON not in file)


def short_path(file: str) -> str:
    """A file's path below the environment's packages, Transformer Engine's sources, or the project."""
    if "site-packages/" in file:
        return file.rpartition("site-packages/")[2]
    if "/transformer_engine/pytorch/" in file:
        return "transformer_engine/pytorch/" + file.rpartition("/transformer_engine/pytorch/")[2]
    return file.removeprefix(f"{_ROOT}/")
