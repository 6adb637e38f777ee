"""Start script of the environment worker (worker.py) under a separate interpreter, ``environment.python``.

    PYTHON own_interpreter.py LIFELINE      (LIFELINE: fd of a pipe that closes when the parent ends)

The environment pool starts it. It makes this package importable beside the interpreter's own packages, but
nothing else in the folder that contains it: packages there may be for another Python version.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def import_package() -> None:
    """Import ``bapo_megatron`` by its path, and take this script's folder off the import path."""
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != PACKAGE / "environment"]
    spec = importlib.util.spec_from_file_location(
        "bapo_megatron", PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bapo_megatron"] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    import_package()
    from bapo_megatron.environment.worker import main

    main()
