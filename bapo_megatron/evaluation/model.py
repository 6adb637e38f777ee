"""Model of an evaluation: finds the checkpoint, and converts it to a Hugging Face folder for the engines.

A conversion is written to the evaluation's output and reused by later ones. Used by ``run.py``.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import check_files_inside, write_atomically
from bapo_megatron.runtime.run_files import open_lock, read_plain
from checkpoints_tools.formats.locate import Format, Location, locate
from checkpoints_tools.to_hf import to_hf

_FILES = (".safetensors", ".json", ".jinja", ".model")
"""Endings of files in the model's digest: weights, configuration, tokenizer, chat template."""


@dataclass(frozen=True)
class Model:
    """Model of an evaluation, as plain data: its HF folder, origin and digest.

    Made by ``hf_model`` for ``evaluation/run.py``.
    """

    folder: Path
    checkpoint: str
    """Path of the checkpoint or HF folder that the model comes from."""
    sha256: str
    """SHA-256 of the model's files, see `model_digest`."""


def output_of(location: Location) -> Path:
    """Default output folder: ``evaluations/`` and a name that is unique to the checkpoint."""
    folder = location.folder.resolve()
    if folder.name == "policy" and location.format is not Format.HF:  # RUN/checkpoints/step_000120/policy
        return Path("evaluations") / f"{folder.parents[2].name}_{folder.parent.name}"
    return Path("evaluations") / f"{folder.parent.name}_{folder.name}"


def find_checkpoint(path: Path, step: str) -> Location:
    """Locate the checkpoint of ``path`` and ``step``. CheckpointError or ConfigError if there is no usable
    one."""
    location = locate(path, step)
    if location.format is Format.HF:
        check_files_inside(location.folder)
    if location.format is Format.HF and not (location.folder / "config.json").is_file():
        raise ConfigError(f"checkpoint={location.folder} holds no config.json; give a whole model folder")
    return location


def hf_model(location: Location, reference: Path | None, output: Path) -> Model:
    """Hugging Face folder of the checkpoint: itself, or its conversion in ``output/model``.

    An existing conversion is reused. ConfigError if it is another checkpoint's.
    """
    source = str(location.folder.resolve())
    if location.format is Format.HF:
        return Model(location.folder, source, model_digest(location.folder))
    folder, note = output / "model", output / "model.json"
    output.mkdir(parents=True, exist_ok=True)
    with open_lock(output / ".model.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # elements of an array share it: the first converts
        if folder.exists():
            made_of = _made_of(note) or "an unknown checkpoint"
            if made_of != source:
                raise ConfigError(f"{folder} was made of {made_of}, not of {source}: give another --output")
        else:
            _check_note(note)
            print(f"converting {source} to {folder}", flush=True)
            write_atomically(note, json.dumps({"checkpoint": source}) + "\n")
            to_hf(location.folder, folder, reference)
    return Model(folder, source, model_digest(folder))


def _made_of(note: Path) -> str | None:
    """Checkpoint that a conversion's note names; None if it is no such note."""
    try:
        with read_plain(note) as file:
            content = json.loads(file.read(1 << 16))
    except (OSError, ValueError):
        return None
    return content["checkpoint"] if isinstance(content, dict) and content.keys() == {"checkpoint"} else None


def _check_note(note: Path) -> None:
    """ConfigError if a file with the note's name was not written by a conversion."""
    if os.path.lexists(note) and _made_of(note) is None:
        raise ConfigError(f"{note} was written by something else, and is kept: give another --output")


def model_digest(folder: Path) -> str:
    """SHA-256 over the names and SHA-256 of weights, configuration and tokenizer files."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name.endswith(_FILES))
    with ThreadPoolExecutor(8) as threads:
        digests = list(threads.map(_digest, paths))
    lines = "".join(f"{digest}  {path.name}\n" for digest, path in zip(digests, paths, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
