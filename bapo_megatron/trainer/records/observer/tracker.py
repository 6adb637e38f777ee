"""The protocol of a tracker, and the run that it is told of."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bapo_megatron.runtime.run_files import read_plain
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.trainer.records.observer.secrets import without_secrets

_PROJECT = "bapo-megatron"
"""That of a run whose configuration is older than the field: the default of ``logging.project``."""


_PRIVATE = ("logging.on_event", "checkpoint.after_export")
"""Fields with commands and addresses of the user, which may hold a key (a webhook's address is one)."""

_QUERY = re.compile(r"(://[^\s'\"?]*\?)[^\s'\"]+")
"""What stands behind the question mark of an address, which may be the key of a judge."""


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker knows it."""

    id: str
    """The same for all starts of a run directory, and no other's."""
    name: str
    project: str
    config: dict[str, str]
    """The configuration by dotted names, without what may hold a key."""
    folder: Path
    """RUN/trackers, where a tracker without a server keeps its data."""


class Tracker(Protocol):
    """A viewer of metrics that goes on with the run of the same id."""

    def held(self, metric: str) -> int | None:
        """The last step whose ``metric`` it has for sure; -1 if none, None if it cannot tell."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Add metrics of ``step``: not below the last one."""

    def close(self) -> None:
        """Write what is left, and say that the run is not under way."""


def tracked_run(root: Path) -> TrackedRun:
    """The run in the run directory ``root``."""
    paths = RunPaths(root)
    with read_plain(paths.config) as file:
        config = json.load(file)["config"]
    with read_plain(paths.wandb_id) as file:
        run_id = file.read().decode().strip()
    project = config.get("logging.wandb_project") or config.get("logging.project", _PROJECT)
    shown = {name: without_secrets(str(value)) for name, value in config.items() if name not in _PRIVATE}
    texts = {name: _QUERY.sub(r"\1***", text) for name, text in shown.items()}
    return TrackedRun(run_id, config["name"], project, texts, paths.trackers.absolute())
