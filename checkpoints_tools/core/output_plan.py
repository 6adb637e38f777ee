"""Output plan of a conversion: the files, their sizes, each tensor's place in them, and their headers.

It also creates and commits the files; the caller (``conversion.py``) copies the tensors' bytes in between.
Used by ``checkpoints_tools/conversion.py``, ``checkpoints_tools/formats/safetensors_folder.py`` and
``checkpoints_tools/formats/torch_dist_writer.py``.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from bapo_megatron.runtime.files import sync_file, sync_folder
from checkpoints_tools.core.blocks import BlockTensor

PARTIAL = ".partial"
"""Ending of a data file's name until all data files of the output are whole."""


@dataclass
class OutputPlan:
    """Planned files of an output folder, by their paths in its temporary folder.

    The writer of a format fills it. Then ``create``, the caller's copy of the tensors, and ``complete``;
    OSError if the disk does not take them.
    """

    tensors: dict[str, BlockTensor] = field(default_factory=dict)
    """Tensors by Hugging Face name; their blocks lie in files whose names end in ``PARTIAL``."""
    sizes: dict[Path, int] = field(default_factory=dict)
    """Bytes of each data file."""
    around: dict[Path, list[tuple[int, bytes]]] = field(default_factory=lambda: defaultdict(list))
    """Bytes around each file's tensors, such as headers: position, content."""
    copied: dict[Path, Path] = field(default_factory=dict)
    """Files that are copied as they are, with their source."""
    last: dict[Path, bytes] = field(default_factory=dict)
    """Commit files: small, written in this order after all others are whole. Without them a folder is no
    checkpoint."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        carried = sum(source.stat().st_size for source in self.copied.values())
        return sum(self.sizes.values()) + carried + sum(len(data) for data in self.last.values())

    def create(self) -> None:
        """Create the folders, and the data files at full size, with zeros in place of the tensors."""
        for folder in {path.parent for path in (*self.sizes, *self.copied, *self.last)}:
            folder.mkdir(parents=True, exist_ok=True)
        for path, size in self.sizes.items():
            with path.open("xb", buffering=0) as file:
                file.truncate(size)
                for position, data in self.around[path]:
                    _write_all(file.fileno(), data, position)
        for path, source in self.copied.items():
            with source.open("rb") as read, path.open("xb") as written:
                shutil.copyfileobj(read, written, 1 << 20)

    def complete(self) -> None:
        """Sync the data files, give them their names, and write the commit files."""
        # The order makes a torn output recognizable: data on disk, then final names, then the files that a
        # reader looks for, each whole before it has its name; folders last, since they hold the names.
        for path in (*self.sizes, *self.copied):
            sync_file(path)
        for path in self.sizes:
            path.rename(path.with_name(path.name.removesuffix(PARTIAL)))
        for path, data in self.last.items():
            temporary = path.with_name(path.name + PARTIAL)
            temporary.write_bytes(data)
            sync_file(temporary)
            temporary.rename(path)
        for folder in sorted({path.parent for path in (*self.sizes, *self.copied, *self.last)}):
            sync_folder(folder)


def _write_all(descriptor: int, data: bytes, position: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, position)
        view, position = view[count:], position + count
