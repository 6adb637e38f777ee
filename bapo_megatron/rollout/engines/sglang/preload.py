"""The library that SGLang preloads into schedulers of colocated servers, and the libraries that it needs.

torch_memory_saver is built for one CUDA runtime (``libcudart.so.13``), and says nowhere where that is. torch
finds it in its own wheels; the loader, which comes first, does not: each scheduler ends with code 127. So the
wheels' folder comes first in LD_LIBRARY_PATH (sglang issue 36533).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from bapo_megatron.runtime.child_process import CommandResult, run_command

VARIABLE = "LD_LIBRARY_PATH"
_ASK = """
import importlib.util
spec = importlib.util.find_spec("nvidia")
print("\\n".join(spec.submodule_search_locations or () if spec else ()))
"""
_TRY = """
import subprocess, sys, torch_memory_saver
with torch_memory_saver.configure_subprocess():
    sys.exit(subprocess.run([sys.executable, "-I", "-c", ""]).returncode)
"""
"""What SGLang does before it starts a scheduler; the program in the scheduler's place does nothing."""
_ASK_S = 60.0


def library_path(python: Path, current: str | None) -> str | None:
    """LD_LIBRARY_PATH for a colocated server of that interpreter: the folders of its CUDA runtime first, then
    ``current``. None: neither has any."""
    return os.pathsep.join([*_runtime_folders(python), *([current] if current else [])]) or None


def tried_preload(python: Path, environment: Mapping[str, str], deadline_s: float) -> CommandResult:
    """The end of a program of SGLang's interpreter that has the library preloaded, as a scheduler has."""
    return run_command([str(python), "-c", _TRY], deadline_s, environment)


@lru_cache
def _runtime_folders(python: Path) -> tuple[str, ...]:
    """The folders of wheels in the interpreter's environment that hold a CUDA runtime."""
    # Without PYTHONPATH, as servers run. Importing torch there would take seconds.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    child = run_command([str(python), "-I", "-c", _ASK], _ASK_S, environment)
    packages = [] if child.ended else [Path(line) for line in child.output.splitlines()]
    found = [path.parent for package in packages for path in package.glob("*/lib/libcudart.so.*")]
    return tuple(dict.fromkeys(map(str, sorted(found))))
