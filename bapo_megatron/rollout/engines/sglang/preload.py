"""LD_LIBRARY_PATH of colocated SGLang servers, for torch_memory_saver's LD_PRELOAD (sglang issue 36533).

torch_memory_saver needs one CUDA runtime (``libcudart.so.13``), without a path to it. torch finds it in its
own wheels; the dynamic loader, which runs first, does not, and each scheduler ends with code 127. So the
wheels' folder comes first in LD_LIBRARY_PATH. `bapo doctor` tries it. Used by ``commands/doctor/sglang.py``
and ``server_process.py``.
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
"""The preload as SGLang makes it before it starts a scheduler, here with an empty program."""
_ASK_S = 60.0


def library_path(python: Path, current: str | None) -> str | None:
    """LD_LIBRARY_PATH for a colocated server: folders of the interpreter's CUDA runtime, then ``current``.

    None if both are empty.
    """
    return os.pathsep.join([*_runtime_folders(python), *([current] if current else [])]) or None


def tried_preload(python: Path, environment: Mapping[str, str], deadline_s: float) -> CommandResult:
    """The result of an empty program of SGLang's interpreter, started with the preload as a scheduler is."""
    return run_command([str(python), "-c", _TRY], deadline_s, environment)


@lru_cache
def _runtime_folders(python: Path) -> tuple[str, ...]:
    """The folders of the interpreter's wheels that hold a CUDA runtime."""
    # Without PYTHONPATH, as servers run. Importing torch there would take seconds.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    child = run_command([str(python), "-I", "-c", _ASK], _ASK_S, environment)
    packages = [] if child.ended else [Path(line) for line in child.output.splitlines()]
    found = [path.parent for package in packages for path in package.glob("*/lib/libcudart.so.*")]
    return tuple(dict.fromkeys(map(str, sorted(found))))
