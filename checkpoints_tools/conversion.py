"""Conversion driver of all formats, ``convert``: checks the free space, writes a planned folder atomically.

The caller makes the plan, including files to copy beside the weights, and receives a ``Conversion``. A dry
run returns it without writing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from bapo_megatron.hf.blocks import BlockTensor
from bapo_megatron.hf.config import carried_files
from bapo_megatron.hf.weight_files import INDEX
from checkpoints_tools.core.atomic_output import OutputPlan, atomic_output, check_space
from checkpoints_tools.core.copying import copy_tensors
from checkpoints_tools.core.progress import byte_progress, format_bytes
from checkpoints_tools.formats.torch_dist import OPTIMIZER


@dataclass(frozen=True)
class Settings:
    """Settings of a conversion or verification in any format: overwrite, dry run, threads, progress."""

    overwrite: bool = False
    """Replace an output that is a checkpoint."""
    dry_run: bool = False
    """Check everything, print the plan and the space that it needs, write nothing."""
    threads: int = 0
    """Threads that copy; 0 for one per processor, but 4 to 8."""
    progress: bool = False
    """Show progress on stderr."""

    def thread_count(self) -> int:
        """Return the number of copying threads."""
        return self.threads or min(8, max(4, len(os.sched_getaffinity(0))))  # threads wait for the disk, too


DEFAULTS = Settings()


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion, or in a dry run its plan: source, output, numbers of tensors and files, bytes.
    ``str`` is its text."""

    source: Path
    output: Path
    tensors: int
    """Number of model tensors."""
    parameters: int
    """Number of elements of the model's tensors."""
    states: int
    """Number of tensors of the optimizer's state."""
    nbytes: int
    """Bytes of the output files."""
    files: int

    def __str__(self) -> str:
        optimizer = f", {self.states} tensors of the optimizer" if self.states else ""
        return (
            f"{self.source} -> {self.output}\n"
            f"  {self.tensors} tensors, {self.parameters:,} parameters{optimizer}, in {self.files} data "
            "files\n"
            f"  {format_bytes(self.nbytes)} ({self.nbytes:,} bytes)"
        )


def convert(
    source: Path, tensors: Mapping[str, BlockTensor], plan: OutputPlan, output: Path, settings: Settings
) -> Conversion:
    """Write the folder of an output plan, whose paths are in ``temporary_folder(output)``; return the result.
    A dry run writes nothing. Raises ConfigError, leaving nothing behind, if the disk lacks space before or
    during the copy."""
    check_space(output, plan.nbytes)
    weights = [tensor for name, tensor in plan.tensors.items() if not name.startswith(OPTIMIZER)]
    result = Conversion(
        source,
        output,
        len(weights),
        sum(prod(tensor.shape) for tensor in weights),
        len(plan.tensors) - len(weights),
        plan.nbytes,
        len(plan.sizes),
    )
    if settings.dry_run:
        return result
    total = sum(tensor.nbytes for tensor in plan.tensors.values())
    # The last progress line comes after the output is in place.
    with byte_progress(total, settings.progress) as done, atomic_output(output):
        plan.create()
        copy_tensors(tensors, plan.tensors, settings.thread_count(), done)
        plan.complete()
    return result


def carried_beside(folder: Path, checkpoint: Path) -> dict[Path, Path]:
    """Return ``carried_files`` and a sharded model's index, by their paths in a Megatron checkpoint. The
    index lets a conversion back write the same safetensors files."""
    carried = carried_files(folder)
    if (folder / INDEX).is_file():
        carried[INDEX] = folder / INDEX
    return {checkpoint / "hf" / name: path for name, path in carried.items()}
