"""File check of a run's checkpoint: each file against the size and SHA-256 that its manifest gives.

``bapo-ckpt verify RUN``, with one path: it finds a changed bit without a second copy, for example after a
transfer to another cluster, or before a conversion. The trainer does the same at a start (``checkpoint/``).
Used by ``checkpoints_tools/`` and ``commands.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bapo_megatron.errors import CheckpointError
from bapo_megatron.runtime.files import file_below
from bapo_megatron.runtime.run_paths import MANIFEST, POLICY
from checkpoints_tools.conversion import DEFAULTS, Settings
from checkpoints_tools.core.progress import byte_progress
from checkpoints_tools.formats.locate import LATEST, locate, manifest_files, newest_named

_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class FileCheck:
    """The result of a file check, as plain data and text.

    Made by ``verify_files``.
    """

    folder: Path
    """The checkpoint: the folder of the manifest."""
    files: int
    nbytes: int
    damaged: tuple[str, ...]
    """Names of files that are not what the manifest says."""

    def as_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {**asdict(self), "folder": str(self.folder), "whole": not self.damaged}

    def __str__(self) -> str:
        lines = [f"{self.folder / name} is not what {MANIFEST} says: it is damaged" for name in self.damaged]
        if lines:
            return "\n".join([*lines, f"damaged: {len(lines)} of {self.files} files"])
        return f"{self.folder}\nwhole: {self.files} files, {self.nbytes:,} bytes, every bit as it was written"


def verify_files(path: Path, step: str = LATEST, settings: Settings = DEFAULTS) -> FileCheck:
    """Check every file of the run's checkpoint that ``path`` and ``step`` name. It reads all of them.

    CheckpointError if it is no run's, which has no manifest, or if a file is missing or of another size: a
    newest checkpoint that is not whole is not passed over.
    """
    settings.check()
    folder = locate(newest_named(path) if step == LATEST else path, step).folder
    if folder.name != POLICY or not (folder.parent / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder} has no {MANIFEST} beside it, as checkpoints of runs have: give a second checkpoint to "
            "compare it with"
        )
    entries = manifest_files(folder.parent)
    if without := [name for name, entry in entries.items() if "sha256" not in entry]:
        raise CheckpointError(f"{folder.parent / MANIFEST} gives the size of {without[0]} alone, no SHA-256")
    total = sum(entry["bytes"] for entry in entries.values())
    with byte_progress(total, settings.progress) as done, ThreadPoolExecutor(settings.thread_count()) as pool:
        found = pool.map(lambda name: _sha256(file_below(folder.parent, name), done), entries)
        pairs = list(zip(entries.items(), found, strict=True))
    damaged = [name for (name, entry), digest in pairs if digest != entry["sha256"]]
    return FileCheck(folder.parent, len(entries), total, tuple(sorted(damaged)))


def _sha256(path: Path, done: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
            done(len(data))
    return digest.hexdigest()
