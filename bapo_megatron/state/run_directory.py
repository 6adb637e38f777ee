"""One run, one directory, one process that writes to it.

run/  config.json  metrics.jsonl  updates.jsonl  events.jsonl  journal/  checkpoints/  tensorboard/
      report/  export/
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bapo_megatron.config import RunConfig
from bapo_megatron.config_checks import flat
from bapo_megatron.errors import ConfigError
from bapo_megatron.files import write_atomically

FORMAT = 1
"""Version of the directory's layout. A program that meets another refuses."""

# What may differ when a run is continued: how far, where and how it is shown, but not what it computes.
_MAY_CHANGE = (
    *("steps", "run_dir", "parallel.", "checkpoint.", "logging.", "batch."),
    *("algorithm.gap_", "algorithm.on_gap"),
    "rollout.sglang.urls",  # after a requeue servers are on other nodes
)


def check_writable(directory: Path) -> None:
    """ConfigError if the run directory cannot be made or written to."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ".lock").touch()
    except OSError as error:
        raise ConfigError(f"the run directory {directory} cannot be written: {error}; name another") from None


@contextmanager
def only_writer(directory: Path) -> Iterator[None]:
    """Hold the directory's lock, or ConfigError if another process writes to the run."""
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is writing to the run {directory}; stop it first") from None
        yield


def check_same_run(config: RunConfig) -> None:
    """ConfigError if the run directory belongs to a run that computes something else."""
    stored = read_config(config.directory)
    metrics = config.directory / "metrics.jsonl"
    if stored is None or not metrics.exists() or metrics.stat().st_size == 0:
        return  # no step was made yet: nothing to contradict
    ours = _as_json(config)
    # A schedule that decays is stretched over the steps: with more of them it is another schedule.
    may_change = _MAY_CHANGE if config.optimizer.decay == "constant" else _MAY_CHANGE[1:]
    changed = [
        f"{name}: {stored.get(name)!r} in the run, {ours.get(name)!r} now"
        for name in sorted(stored.keys() | ours.keys())
        if stored.get(name) != ours.get(name) and not name.startswith(may_change)
    ]
    if changed:
        raise ConfigError(
            f"the run {config.directory} was started with other settings:\n"
            + "\n".join(changed)
            + "\ngive them as they were to continue it, or another --run-dir to start anew"
        )


def store_config(config: RunConfig) -> None:
    """Write the resolved configuration into the run directory."""
    stored = {"format": FORMAT, "config": _as_json(config)}
    write_atomically(config.directory / "config.json", json.dumps(stored, indent=2) + "\n")


def read_config(directory: Path) -> dict[str, Any] | None:
    """The stored configuration by dotted names; None if the directory holds no run."""
    path = directory / "config.json"
    if not path.exists():
        return None
    try:
        stored = json.loads(path.read_text())
        version, config = stored["format"], stored["config"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error!r}") from None
    if version != FORMAT:
        raise ConfigError(f"{path} has run format {version}, this version of the program reads {FORMAT}")
    return dict(config)


def _as_json(config: RunConfig) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(flat(config), default=str))
    return values
