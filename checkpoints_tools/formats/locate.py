"""Checkpoint lookup: finds the checkpoint that a path names, its format and its config.json, and opens it.

    HF folder            config.json  *.safetensors
    torch_dist           .metadata  __R_N.distcp  common.pt
    legacy               mp_rank_00/model_optim_rng.pt ...
    Megatron's layout    latest_checkpointed_iteration.txt  iter_0000100/ or release/ (either of the above)
    a run directory      checkpoints/step_000120/{manifest.json, policy/ (torch_dist)}

``locate`` returns the ``Location``; ``open_checkpoint`` returns the tensors, too, as blocks of files. Both
raise CheckpointError without a checkpoint or for an incomplete one; of a run they take the newest complete
one and report incomplete newer ones on stderr.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from bapo_megatron.errors import CheckpointError, ConfigError
from bapo_megatron.hf.blocks import BlockTensor
from bapo_megatron.hf.config import ModelShape, read_model_shape
from bapo_megatron.hf.parameter_map import embedding_name
from bapo_megatron.hf.safetensors_folder import read_safetensors_folder
from bapo_megatron.runtime.files import file_below, read_file_inside
from bapo_megatron.runtime.run_paths import CHECKPOINTS, MANIFEST, POLICY, Moment, moment_of
from checkpoints_tools.formats.distcp import METADATA
from checkpoints_tools.formats.mp_rank import MpRank
from checkpoints_tools.formats.safetensors_folder import without_tied_copy
from checkpoints_tools.formats.torch_dist import OPTIMIZER_STATES, RESHARDABLE, TorchDist

LATEST = "latest"
"""Step name of the newest complete checkpoint."""

TRACKER = "latest_checkpointed_iteration.txt"
_CONFIG = "config.json"
_ITERATION = re.compile(r"iter_(\d{1,18})")
_MOST_TRACKER_BYTES = 1000


class Format(StrEnum):
    """Format of a checkpoint: a Hugging Face folder, torch_dist, or Megatron-LM's legacy rank files."""

    HF = "HF"
    TORCH_DIST = "torch_dist"
    MP_RANK = "mp_rank"


@dataclass(frozen=True)
class Location:
    """Location of one checkpoint on disk: its folder, its format, and its iteration or step."""

    folder: Path
    """Folder that directly contains the weight files."""
    format: Format
    iteration: int | None
    """Megatron iteration or run step, by the folder's name or tracker file."""


@dataclass(frozen=True)
class OpenedCheckpoint:
    """Opened checkpoint: location, model shape, and tensors by Hugging Face name, as blocks of files."""

    location: Location
    reference: Path
    """Folder with the model's config.json."""
    shape: ModelShape
    content: TorchDist | MpRank | None
    """The format reader's checkpoint; None for a Hugging Face folder."""
    tensors: dict[str, BlockTensor]
    """Weights, without a tied model's output layer, even if stored as a copy."""

    @property
    def has_whole_optimizer(self) -> bool:
        """Whether the checkpoint holds Adam's state as whole tensors."""
        return isinstance(self.content, TorchDist) and self.content.optimizer_format == RESHARDABLE

    def optimizer(self) -> dict[str, dict[str, BlockTensor]]:
        """Return Adam's fp32 weights and moments, by OPTIMIZER_STATES; {} without ``has_whole_optimizer``."""
        if not isinstance(self.content, TorchDist) or not self.has_whole_optimizer:
            return {}
        return {state: self.content.optimizer_tensors(state) for state in OPTIMIZER_STATES}


def locate(path: Path, step: str = LATEST) -> Location:
    """Return the location of the checkpoint that ``path`` names. ``step`` chooses among several: ``latest``
    or a number. Raises CheckpointError if there is none, or the chosen one is incomplete."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; give a checkpoint's, a model's or a run's")
    number = _number(step)
    if path.name == POLICY and moment_of(path.parent.name):
        return _of_run(path.parent)
    if (weights := _weights(path)) is not None:
        return Location(path, weights, _iteration(path))
    if os.path.lexists(path / TRACKER) or any(_ITERATION.fullmatch(name.name) for name in _folders(path)):
        return _megatron(path, number)
    if os.path.lexists(path / MANIFEST) or moment_of(path.name):
        return _of_run(path)
    if (path / CHECKPOINTS).is_dir():
        path = path / CHECKPOINTS
    if any(moment_of(child.name) for child in _folders(path)):
        return _newest_of_run(path, number)
    raise CheckpointError(
        f"{path} holds no checkpoint: neither *.safetensors, {METADATA} of torch_dist, mp_rank_* folders, "
        f"{TRACKER}, nor checkpoints/ of a run"
    )


def open_checkpoint(path: Path, step: str = LATEST, reference: Path | None = None) -> OpenedCheckpoint:
    """Open the checkpoint that ``path`` names, checking that it has all its tensors. ``reference``: folder of
    config.json for a checkpoint without one."""
    return open_located(locate(path, step), reference)


def open_located(location: Location, reference: Path | None = None) -> OpenedCheckpoint:
    """Open the checkpoint at ``location``, as ``open_checkpoint``."""
    model = hf_reference(location, reference)
    shape = read_model_shape(model)
    content: TorchDist | MpRank | None = None
    if location.format is Format.HF:
        tensors = read_safetensors_folder(location.folder)
        if shape.tied:
            tensors = without_tied_copy(tensors, location.folder, embedding_name(shape))
    else:
        reader = TorchDist if location.format is Format.TORCH_DIST else MpRank
        content = reader(location.folder, shape)
        tensors = content.tensors
    return OpenedCheckpoint(location, model, shape, content, tensors)


def hf_reference(location: Location, given: Path | None) -> Path:
    """Return the folder with config.json (and tokenizer) of the checkpoint's model: ``given``, or ``hf/`` in
    the checkpoint or beside it (verl: ``huggingface/``), or for a run's checkpoint the model that the run
    started from. Raises CheckpointError if there is none, ConfigError if ``given`` has none."""
    if given is not None:
        if not (given / _CONFIG).is_file():
            raise ConfigError(f"--hf-reference {given}: no {_CONFIG} there; give a Hugging Face model folder")
        return given
    folder = location.folder
    if location.format is Format.HF:
        return folder
    for candidate in (folder / "hf", folder.parent / "hf", folder.parent / "huggingface", folder):
        if (candidate / _CONFIG).is_file():
            return candidate
    for parent in folder.resolve().parents[:3]:
        if (model := _model_of_run(parent / _CONFIG)) is not None:
            return model
    raise CheckpointError(
        f"{folder} carries no {_CONFIG} of its model; name the model's folder with --hf-reference"
    )


def _weights(path: Path) -> Format | None:
    if (path / METADATA).is_file():
        return Format.TORCH_DIST
    if any(child.name.startswith("mp_rank_") for child in _folders(path)):
        return Format.MP_RANK
    if any(path.glob("*.safetensors")):
        return Format.HF
    if list(path.glob("*.distcp")):
        raise CheckpointError(f"{path} has no {METADATA}: the checkpoint was not written to its end")
    return None


def _folders(path: Path) -> Iterator[Path]:
    return (child for child in sorted(path.iterdir()) if child.is_dir())


def _number(step: str) -> int | None:
    if step == LATEST:
        return None
    if not step.isdecimal():
        raise ConfigError(f"--step {step[:40]}: give {LATEST} or a number")
    return int(step)


def _iteration(folder: Path) -> int | None:
    for name in (folder, folder.parent):
        if match := _ITERATION.fullmatch(name.name):
            return int(match[1])
        if moment := moment_of(name.name):
            return moment[0]
    return None


def _megatron(path: Path, number: int | None) -> Location:
    name = f"iter_{number:07d}" if number is not None else _tracked(path)
    folder = path / name
    if not folder.is_dir():
        have = ", ".join(child.name for child in _folders(path)) or "nothing"
        raise CheckpointError(f"{path} has no {name}; it has {have}")
    weights = _weights(folder)
    if weights is None:
        raise CheckpointError(f"{folder} holds no weights: the checkpoint was not written to its end")
    return Location(folder, weights, _iteration(folder))


def _tracked(path: Path) -> str:
    tracker = path / TRACKER
    try:
        text = read_file_inside(path, TRACKER, _MOST_TRACKER_BYTES).decode().strip()
    except (CheckpointError, OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{tracker}: {error}; choose one with --step") from None
    if text == "release":
        return text
    if not text.isdecimal():
        raise CheckpointError(
            f"{tracker} holds {text[:40]!r}, which is not an iteration; choose one with --step"
        )
    return f"iter_{int(text):07d}"


def newest_named(path: Path) -> Path:
    """Return the folder of a run's newest checkpoint, complete or not, or ``path`` if it is not a run's. For
    ``verify_files``, which must not skip an incomplete one."""
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    steps = _steps(folder) if folder.is_dir() else {}
    return steps[max(steps)] if steps else path


def _steps(checkpoints: Path) -> dict[Moment, Path]:
    return {moment: child for child in _folders(checkpoints) if (moment := moment_of(child.name))}


def _newest_of_run(checkpoints: Path, number: int | None) -> Location:
    steps = _steps(checkpoints)
    if number is not None:
        if (number, 0) not in steps:
            have = sorted(step for step, updates in steps if not updates)
            raise CheckpointError(f"{checkpoints} has no step {number}; it has {have}")
        return _of_run(steps[number, 0])
    problems = []
    for step in sorted(steps, reverse=True):
        try:
            location = _of_run(steps[step])
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for problem in problems:  # never silently: users expect the newest to be the run's end
            print(f"passing over a newer checkpoint: {problem}", file=sys.stderr, flush=True)
        return location
    raise CheckpointError(f"no checkpoint in {checkpoints} is whole:\n" + "\n".join(problems))


def manifest_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the manifest's entry (``bytes``, ``sha256``) of each file of a run's checkpoint, by name."""
    files = _json(folder / MANIFEST).get("files")
    if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
        raise CheckpointError(f"{folder / MANIFEST} lists no files: it is damaged")
    return files


def _of_run(folder: Path) -> Location:
    """Return a run's checkpoint. Raises CheckpointError unless all files in its manifest have full length."""
    files = manifest_files(folder)
    for name, entry in files.items():
        path = file_below(folder, name)
        size = path.stat().st_size if path.is_file() else None
        if size != entry.get("bytes"):
            state = "is missing" if size is None else f"has {size} bytes instead of {entry.get('bytes')}"
            raise CheckpointError(f"{path} {state}: the checkpoint is not whole")
    policy = folder / POLICY
    if f"{POLICY}/{METADATA}" not in files:
        raise CheckpointError(f"{folder / MANIFEST} lists no policy/{METADATA}: it is damaged")
    return Location(policy, Format.TORCH_DIST, _iteration(policy))


def _model_of_run(path: Path) -> Path | None:
    """Return the model folder named in a run's config.json; None if the file is not a run's."""
    if not path.is_file():
        return None
    config = _json(path).get("config")
    name = config.get("model.hf_path") if isinstance(config, dict) else None
    if not isinstance(name, str):
        return None
    if not (Path(name) / _CONFIG).is_file():
        raise CheckpointError(f"{path} names the model {name}, which is not there; give --hf-reference")
    return Path(name)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_file_inside(path.parent, path.name))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!s:.200}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object: it is damaged")
    return value
