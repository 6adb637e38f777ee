"""Path checks of a Slurm job: missing container mounts, and inputs that do not exist on this machine.

They yield texts and raise nothing: ``job.py`` decides whether a text is an error or a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from bapo_megatron.config import RunConfig


def missing_mounts(paths: Mapping[str, Path], mounts: Sequence[str]) -> Iterator[str]:
    """Missing mounts: one line for each path that the container does not mount. ``paths`` are named by role.

    ``mounts``: HOST:CONTAINER, with options after another colon. Tasks use the host's paths, so only a mount
    with two equal sides counts, of the path itself or of a folder above it.
    """
    places = [mount.split(":") for mount in mounts]
    shown = [
        PurePosixPath(host) for host, inside, *_ in places if PurePosixPath(host) == PurePosixPath(inside)
    ]
    for what, path in paths.items():
        if not any(PurePosixPath(path).is_relative_to(folder) for folder in shown):
            folder = path.parent if what == "recipe" else path
            yield f'the container does not mount the {what} {path}: add "{folder}:{folder}" to mounts'
            shown.append(PurePosixPath(folder))  # once told, it also covers the paths below it


def absent_inputs(config: RunConfig, root: Path) -> Iterator[str]:
    """Absent inputs: one line for each model or dataset that this machine lacks; nodes may have it."""
    model = root / config.model.hf_path
    if not (model / "config.json").is_file():
        yield f"model.hf_path: {model} has no config.json on this machine; the nodes must have the model"
    for source in config.data.files:
        data, field = (
            root / source.path,
            f"data.sources[{source.name}]" if config.data.sources else "data.path",
        )
        if not data.exists():
            yield f"{field}: {data} is absent on this machine; the nodes must have it (docs/data.md)"


def without_run_dir(flags: Sequence[str]) -> Iterator[str]:
    """The flags of `bapo train` without `--run-dir` and its value, in any spelling that tyro accepts."""
    words = iter(flags)
    for word in words:
        name, given, _ = word.replace("_", "-").partition("=")
        if name != "--run-dir":
            yield word
        elif not given:
            next(words, None)
