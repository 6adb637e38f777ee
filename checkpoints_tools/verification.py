"""Verification: compares two checkpoints of any formats bit for bit, or a run's files with their manifest.

``verify`` returns a ``Verification``; the optimizer's state is compared only if both have it in whole
tensors. ``verify_files`` returns a ``FileCheck``: it finds changed bits without a second copy, for example
after a transfer.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.blocks import BlockTensor
from bapo_megatron.runtime.files import file_below, sha256_of
from bapo_megatron.runtime.run_paths import MANIFEST, POLICY
from bapo_megatron.runtime.text_table import text_table
from checkpoints_tools.conversion import DEFAULTS, Settings
from checkpoints_tools.core.comparing import Difference, compare_tensors
from checkpoints_tools.core.progress import byte_progress
from checkpoints_tools.formats.locate import (
    LATEST,
    Format,
    OpenedCheckpoint,
    hf_reference,
    locate,
    manifest_files,
    newest_named,
    open_located,
)

_SHOWN = 10


@dataclass
class Verification:
    """Result of ``verify``, filled tensor by tensor: both paths, tensors and bytes compared, differences,
    digests. ``str`` is the text to print."""

    first: Path
    second: Path
    tensors: int = 0
    nbytes: int = 0
    """Bytes of the compared tensors: weights, and optimizer state if both have it."""
    differences: list[Difference] = field(default_factory=list)
    digests: dict[str, tuple[str, str]] = field(default_factory=dict)
    """SHA-256 of each tensor's elements, in the first and the second; only on request."""
    optimizer: str = ""
    """Whether the optimizer's state was compared, or why not."""

    @property
    def equal(self) -> bool:
        """Whether both have the same tensors, with equal types, shapes and bits."""
        return not self.differences

    def as_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        fields = asdict(self)
        paths = {"first": str(self.first), "second": str(self.second)}
        return {**fields, **paths, "bytes": fields.pop("nbytes"), "equal": self.equal}

    def __str__(self) -> str:
        parts = ("first", str(self.first)), ("second", str(self.second)), ("optimizer", self.optimizer)
        lines = text_table(parts)
        for name, (here, there) in self.digests.items():
            lines.append(f"{here}  {name}" if here == there else f"{here} != {there}  {name}")
        if self.equal:
            lines.append(f"equal: {self.tensors} tensors, {self.nbytes:,} bytes, every bit")
        else:
            lines += [f"{difference.tensor} {difference.message}" for difference in self.differences[:_SHOWN]]
            if len(self.differences) > _SHOWN:
                lines.append(f"... and {len(self.differences) - _SHOWN} more")
            lines.append(f"different: {len(self.differences)} of {self.tensors} tensors")
        return "\n".join(lines)


def verify(
    first: Path,
    second: Path,
    reference: Path | None = None,
    step: str = LATEST,
    digests: bool = False,
    weights_only: bool = False,
    settings: Settings = DEFAULTS,
) -> Verification:
    """Compare the checkpoints at two paths, tensor by tensor under their Hugging Face names.

    ``reference``: folder of config.json for a checkpoint without one; by default the other's. Vocabulary
    padding and copies of tied tensors do not count. Optimizer states are compared if both have one, unless
    ``weights_only``. Raises CheckpointError if one of them cannot be read.
    """
    here, there = _open(first, second, reference, step)
    pairs = {"": (_comparable(here, there), _comparable(there, here))}
    result = Verification(here.location.folder, there.location.folder)
    result.optimizer = "not compared, as asked" if weights_only else _optimizer_not_compared(here, there)
    if not result.optimizer:
        others = there.optimizer()
        pairs |= {f"optimizer {state} ": (t, others[state]) for state, t in here.optimizer().items()}
        result.optimizer = "compared: fp32 weights and both moments of Adam"
    total = sum(tensor.nbytes for tensors, _ in pairs.values() for tensor in tensors.values())
    with byte_progress(total, settings.progress) as done:
        for prefix, (ours, theirs) in pairs.items():
            for report in compare_tensors(ours, theirs, settings.thread_count(), digests, done):
                name = prefix + report.name
                result.tensors += 1
                result.nbytes += ours[report.name].nbytes if report.name in ours else 0
                if report.difference is not None:
                    result.differences.append(replace(report.difference, tensor=name))
                if report.digests is not None:
                    result.digests[name] = report.digests
    return result


def _open(
    first: Path, second: Path, given: Path | None, step: str
) -> tuple[OpenedCheckpoint, OpenedCheckpoint]:
    """Open both checkpoints; one without a config.json is read with ``given``, or the other's."""
    locations = [locate(path, step) for path in (first, second)]
    references: list[Path | None] = []
    for location in locations:
        try:
            # A checkpoint's own config.json comes first: another could hide a difference in shape.
            references.append(hf_reference(location, None))
        except CheckpointError:
            references.append(given)
    here, there = references
    return open_located(locations[0], here or there), open_located(locations[1], there or here)


def _comparable(own: OpenedCheckpoint, other: OpenedCheckpoint) -> dict[str, BlockTensor]:
    """Return a checkpoint's tensors, without untrained ones if the other is Megatron's."""
    if other.content is None or not own.shape.untrained:
        return own.tensors
    return {name: tensor for name, tensor in own.tensors.items() if not name.startswith(own.shape.untrained)}


def _optimizer_not_compared(here: OpenedCheckpoint, there: OpenedCheckpoint) -> str:
    """Return why the optimizers cannot be compared; "" if they can."""
    for name, checkpoint in (("first", here), ("second", there)):
        if checkpoint.location.format is Format.HF:
            return f"not compared, the {name} is a Hugging Face folder"
        if not checkpoint.has_whole_optimizer:
            return f"not compared, the {name} holds no optimizer state in whole tensors"
    return ""


@dataclass(frozen=True)
class FileCheck:
    """Result of ``verify_files``: the checkpoint's folder, files and bytes read, and names of damaged files.
    ``str`` is its text."""

    folder: Path
    """Checkpoint folder, with the manifest."""
    files: int
    nbytes: int
    damaged: tuple[str, ...]
    """Names of files that differ from the manifest."""

    def as_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {**asdict(self), "folder": str(self.folder), "whole": not self.damaged}

    def __str__(self) -> str:
        lines = [f"{self.folder / name} is not what {MANIFEST} says: it is damaged" for name in self.damaged]
        if lines:
            return "\n".join([*lines, f"damaged: {len(lines)} of {self.files} files"])
        return f"{self.folder}\nwhole: {self.files} files, {self.nbytes:,} bytes, every bit as it was written"


def verify_files(path: Path, step: str = LATEST, settings: Settings = DEFAULTS) -> FileCheck:
    """Read every file of the run's checkpoint at ``path`` and ``step``, and compare it with the manifest.
    Raises CheckpointError for another kind of checkpoint, which has no manifest, or if a file is missing or
    of another size: an incomplete newest checkpoint is not skipped."""
    folder = locate(newest_named(path) if step == LATEST else path, step).folder
    if folder.name != POLICY or not (folder.parent / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder} has no {MANIFEST} beside it, as checkpoints of runs have: give a second checkpoint to "
            "compare it with"
        )
    entries = manifest_files(folder.parent)
    total = sum(entry["bytes"] for entry in entries.values())
    with byte_progress(total, settings.progress) as done, ThreadPoolExecutor(settings.thread_count()) as pool:
        digests = pool.map(lambda name: sha256_of(file_below(folder.parent, name), done), entries)
        pairs = list(zip(entries.items(), digests, strict=True))
    damaged = [name for (name, entry), digest in pairs if digest != entry.get("sha256")]
    return FileCheck(folder.parent, len(entries), total, tuple(sorted(damaged)))
