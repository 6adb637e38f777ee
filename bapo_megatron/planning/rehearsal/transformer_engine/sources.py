"""Finder of Transformer Engine's Python sources, in a folder for each tested version.

``make te-sources`` downloads them to a place outside of every environment: without the compiled part they
break the import of megatron-core. Else an installed package of the version is taken; ConfigError if there is
neither. Used by ``planning/rehearsal/layers.py``.
"""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from bapo_megatron.errors import ConfigError

VERSIONS = ("2.11.0", "2.20.2")
"""The last version that megatron-core 0.16.1 asks for (>=2.9, <2.12), and the newest that was tested."""

_REPOSITORY = Path(__file__).parents[4]


def find_sources(version: str) -> Path:
    """The folder that holds the package ``transformer_engine`` of ``version``.

    It is ``VERSION`` in the folder that BAPO_TE_SOURCES names, by default ``.te`` of the repository; else
    that of the package that is installed, if it is of this version. ConfigError if neither is there.
    """
    folder = Path(os.environ.get("BAPO_TE_SOURCES", _REPOSITORY / ".te")) / version
    if (folder / "transformer_engine/__init__.py").is_file():
        return folder
    with suppress(PackageNotFoundError):
        installed = distribution("transformer_engine")
        if installed.version.partition("+")[0] == version:
            return Path(str(installed.locate_file("transformer_engine"))).parent
    raise ConfigError(
        f"no sources of Transformer Engine {version} in {folder}, and it is not installed: run "
        "`make te-sources`, or let BAPO_TE_SOURCES name the folder that holds them"
    )
