"""Start script of the environment worker (worker.py) in the interpreter ``environment.python``.

    PYTHON own_interpreter.py LIFELINE      (LIFELINE: number of the pipe that closes when the parent ends)

Makes only this package importable: its neighbours in site-packages may belong to another Python version.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def import_package() -> None:
    """Import ``bapo_megatron`` from its folder without its parent on the import path."""
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
