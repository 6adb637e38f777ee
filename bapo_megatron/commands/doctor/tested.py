"""Version pins and ranges of packages that ``bapo doctor`` compares with.

The tested versions are pinned in ``constraints.txt``, and for SGLang's environment in
``rollout/engines/sglang_cpu/requirements.txt``; both files are installed with the package, and `make`
installs from them. The permitted ranges are in the metadata of this package (``setup.py``). Used by
``packages.py``, ``servers.py`` and ``sglang.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_PACKAGE = Path(__file__).parents[2]
TRAINING = _PACKAGE / "constraints.txt"
SGLANG = _PACKAGE / "rollout/engines/sglang_cpu/requirements.txt"


def pins(path: Path) -> dict[str, str]:
    """Tested versions in ``path``, by canonical name, from lines ``name==version``."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return {canonical(name): version for name, mark, version in (x.partition("==") for x in lines) if mark}


def canonical(name: str) -> str:
    """The canonical name of a package (PEP 503): lower case, hyphens."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True)
class Permitted:
    """The permitted versions of one package, as a version specifier (PEP 440).

    Made by ``permitted``, which reads the metadata.
    """

    specifier: str
    """The specifier in ``setup.py``, e.g. `<6,>=5.0`; empty for any version."""

    def holds(self, version: str) -> bool:
        """Whether ``version`` is permitted; True if the packaging library is missing or cannot parse it."""
        try:
            from packaging.specifiers import SpecifierSet

            return SpecifierSet(self.specifier).contains(version, prereleases=True)
        except (ImportError, ValueError):  # packaging has a row of its own
            return True


def permitted(distribution: str = "bapo-megatron") -> dict[str, Permitted]:
    """Permitted versions by package, from the requirements of ``distribution`` without extras; empty if it is
    not installed, or the packaging library is not."""
    try:
        from packaging.requirements import Requirement

        requirements = [Requirement(text) for text in metadata.requires(distribution) or []]
    except (ImportError, metadata.PackageNotFoundError):  # packaging has a row of its own
        return {}
    return {
        canonical(requirement.name): Permitted(str(requirement.specifier))
        for requirement in requirements
        if "extra" not in str(requirement.marker)
    }
