"""Finder of the sources of Transformer Engine's Python package, for the rehearsal and ``tests/te``.

``te_folder`` returns their folder or raises ConfigError. ``make te-sources`` downloads them to a folder
outside every environment: installed without the compiled part they break the import of megatron-core.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import metadata
from pathlib import Path

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.device import environment_variable

VERSIONS = ("2.11.0", "2.20.2")
"""The latest for megatron-core 0.16.1 (>=2.9, <2.12), and the one tested with 0.19.2, which pins none."""

_REPOSITORY = Path(__file__).parents[1]


def te_version() -> str:
    """Version to rehearse: the one that is tested with the installed megatron-core."""
    before_0_17, newer = VERSIONS
    return before_0_17 if metadata.version("megatron-core").startswith("0.16.") else newer


def te_folder() -> Path:
    """Folder with the sources of ``te_version()``. Raises ConfigError if it is missing."""
    return find_sources(te_version())


def find_sources(version: str) -> Path:
    """Folder that contains the package ``transformer_engine`` of ``version``.

    Searches ``version`` in BAPO_TE_SOURCES (default: ``.te`` in the repository), then the installed package
    if its version matches. Raises ConfigError if neither exists.
    """
    folder = Path(environment_variable("BAPO_TE_SOURCES") or _REPOSITORY / ".te") / version
    if (folder / "transformer_engine/__init__.py").is_file():
        return folder
    with suppress(metadata.PackageNotFoundError):
        installed = metadata.distribution("transformer_engine")
        if installed.version.partition("+")[0] == version:
            return Path(str(installed.locate_file("transformer_engine"))).parent
    raise ConfigError(
        f"no sources of Transformer Engine {version} in {folder}, and it is not installed: run "
        "`make te-sources`, or let BAPO_TE_SOURCES name the folder that holds them"
    )
