"""Protocol of an experiment tracker, the description of the run that it shows, and redaction of secrets.

A new tracker is a class with these methods, an entry in ``__main__.py`` and one in ``TrackerName``
(config/outputs.py). Secrets (API keys, passwords in URLs) are taken out of what a tracker's package prints or
raises, and of the configuration that it gets. Used by ``__main__.py``, ``following.py`` and ``trackers.py``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from bapo_megatron.runtime.run_files import read_plain
from bapo_megatron.runtime.run_paths import RunPaths

_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
_LEAST_CHARACTERS = 6
_IN_ADDRESSES = re.compile(r"(?<=://)[^/@\s]+(?=@)|(?<=write_token=)[^&\s'\"]+")
_HIDDEN = "***"


def redacted(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """``text`` with *** for values of variables whose names say KEY or TOKEN, and for passwords in URLs."""
    for name, value in environment.items():
        if _NAMES.search(name) and len(value) >= _LEAST_CHARACTERS:
            text = text.replace(value, _HIDDEN)
    return _IN_ADDRESSES.sub(_HIDDEN, text)


class RedactingStream:
    """Text stream that redacts secrets before it writes; all other methods are the stream's.

    ``__main__.py`` puts it in place of an observer's standard output and error.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redacted(text))
        self._stream.flush()
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_PROJECT = "bapo-megatron"
"""Project of a run whose stored configuration is older than ``logging.project``: that field's default."""


_PRIVATE = ("logging.on_event", "checkpoint.after_export")
"""Fields that trackers never get: the user's commands and URLs may hold a key (a webhook's URL is one)."""

_QUERY = re.compile(r"(://[^\s'\"?]*\?)[^\s'\"]+")
"""What stands behind the question mark of an address, which may be the key of a judge."""


@dataclass(frozen=True)
class TrackedRun:
    """Description of a run for a tracker, as plain data without secrets: id, name, project, configuration.

    Made by ``tracked_run`` from the configuration on disk, for the ``Tracker``.
    """

    id: str
    """Unique to the run directory, and the same for all of its starts."""
    name: str
    project: str
    config: dict[str, str]
    """The configuration by dotted names, redacted."""
    folder: Path
    """RUN/trackers, where a tracker without a server keeps its data."""


class Tracker(Protocol):
    """Protocol of an experiment tracker of one run: W&B, trackio or MLflow. Used in its observer's process.

    Made from a ``TrackedRun``; it resumes the tracked run of the same id. Calls may block, and may raise
    anything: the observer closes it and makes a new one.
    """

    def last_step(self, metric: str) -> int | None:
        """The last step whose ``metric`` is durably stored; -1 if none, None if the tracker cannot tell."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Add metrics of ``step``, which never falls."""

    def close(self) -> None:
        """Flush, and mark the tracked run as not running."""


def tracked_run(root: Path) -> TrackedRun:
    """Description of the run in the run directory ``root``, read from its files."""
    paths = RunPaths(root)
    with read_plain(paths.config) as file:
        config = json.load(file)["config"]
    with read_plain(paths.wandb_id) as file:
        run_id = file.read().decode().strip()
    project = config.get("logging.wandb_project") or config.get("logging.project", _PROJECT)
    shown = {name: redacted(str(value)) for name, value in config.items() if name not in _PRIVATE}
    texts = {name: _QUERY.sub(r"\1***", text) for name, text in shown.items()}
    return TrackedRun(run_id, config["name"], project, texts, paths.trackers.absolute())
