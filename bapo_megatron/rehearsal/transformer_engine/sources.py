"""The folders with Transformer Engine's Python sources, one for each tested version.

They are kept outside of every environment: megatron-core that sees them without the compiled part does not
import.
"""

from __future__ import annotations

import os
from pathlib import Path

from bapo_megatron.errors import ConfigError

VERSIONS = ("2.11.0", "2.20.2")
"""The last version that megatron-core 0.16.1 asks for (>=2.9, <2.12), and the newest that was tested."""

_REPOSITORY = Path(__file__).parents[3]


def find_sources(version: str) -> Path:
    """The folder that holds the package ``transformer_engine`` of ``version``.

    It is ``VERSION`` in the folder that BAPO_TE_SOURCES names, by default ``.te`` of the repository.
    ConfigError if it is not there.
    """
    folder = Path(os.environ.get("BAPO_TE_SOURCES", _REPOSITORY / ".te")) / version
    if not (folder / "transformer_engine/__init__.py").is_file():
        raise ConfigError(
            f"no sources of Transformer Engine {version} in {folder}: run `make te-sources`, "
            "or let BAPO_TE_SOURCES name the folder that holds them"
        )
    return folder
