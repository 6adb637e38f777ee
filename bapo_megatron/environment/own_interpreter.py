"""Start of the worker program in another interpreter: ``PYTHON own_interpreter.py LIFELINE``.

It makes this package importable there, and nothing else of the run's environment: the folder that holds the
package may be one of site-packages, whose other packages belong to another version of Python.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def import_package() -> None:
    """Import ``bapo_megatron`` from its folder, whose parent stays off the import path."""
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
