"""Which versions are permitted, and which were tested.

The tests' versions are in ``constraints.txt``, those of SGLang's environment in
``rollout/engines/sglang_cpu/requirements.txt``; both are installed with the package, and `make` installs
from them.
What is permitted is in the metadata of this package (``setup.py``).
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
    """Canonical name to version, of the lines ``name==version``."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return {canonical(name): version for name, mark, version in (x.partition("==") for x in lines) if mark}


def canonical(name: str) -> str:
    """The name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True)
class Permitted:
    """Versions that a package may have."""

    specifier: str
    """As in ``setup.py``, e.g. `<6,>=5.0`; empty for any."""

    def holds(self, version: str) -> bool:
        """Whether ``version`` is one of them; True where it cannot be told."""
        try:
            from packaging.specifiers import SpecifierSet

            return SpecifierSet(self.specifier).contains(version, prereleases=True)
        except (ImportError, ValueError):  # packaging has a row of its own
            return True


def permitted(distribution: str = "bapo-megatron") -> dict[str, Permitted]:
    """What this package's metadata requires without extras; empty where it is not installed."""
    try:
        requirements = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return {}
    found = {}
    for requirement in requirements:
        stated, _, marker = requirement.partition(";")
        parts = re.match(r"\s*([\w.-]+)\s*(?:\[[^\]]*\])?\s*\(?([^)]*)\)?", stated)
        if parts and "extra" not in marker:
            found[canonical(parts[1])] = Permitted(parts[2].strip())
    return found
