"""Experiment trackers: their protocol, classes for W&B, trackio and MLflow, and secret redaction.

``TRACKERS[name](tracked_run(root, name))`` opens one: all starts of a run directory continue one tracked run,
by an id (W&B, MLflow) or a name (trackio). A tracker imports its package on construction, in a process of its
own (``following.py``), which retries when the package or its server raises an error. A new tracker is a class
with the methods of ``Tracker``, an entry in ``TRACKERS`` and one in ``TrackerName`` (config/run.py). Secrets
(API keys, passwords in URLs) are redacted from what a tracker's package prints or raises, and from the
configuration that it receives.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from bapo_megatron.runtime.device import environment_variable, set_default
from bapo_megatron.runtime.run_paths import RunPaths

_STEP_MARK = "time/step_s"
"""Metric with a number in every step."""

_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
_LEAST_CHARACTERS = 6
_IN_ADDRESSES = re.compile(r"(?<=://)[^/@\s]+(?=@)|(?<=write_token=)[^&\s'\"]+")
_HIDDEN = "***"


def redacted(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return ``text`` with *** for values of secret environment variables (by name) and URL passwords."""
    for name, value in environment.items():
        if _NAMES.search(name) and len(value) >= _LEAST_CHARACTERS:
            text = text.replace(value, _HIDDEN)
    return _IN_ADDRESSES.sub(_HIDDEN, text)


class RedactingStream:
    """Text stream around another one: ``write`` redacts secrets; everything else goes to the inner stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redacted(text))
        self._stream.flush()
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_PRIVATE = ("logging.on_event", "checkpoint.after_export")
"""Fields withheld from trackers: the user's commands and URLs may contain a key (a webhook URL is one)."""

_QUERY = re.compile(r"(://[^\s'\"?]*\?)[^\s'\"]+")
"""Query of a URL, which may contain a judge's key."""


@dataclass(frozen=True)
class TrackedRun:
    """Description of a run for a tracker, without secrets: id, name, project, configuration."""

    id: str
    """Unique to the run directory, equal for all its starts."""
    name: str
    project: str
    config: dict[str, Any]
    """Configuration by dotted names: numbers, booleans and None unchanged, all others as redacted text."""
    folder: Path
    """RUN/trackers, the data folder of trackers without a server."""


class Tracker(Protocol):
    """Client of one tracked run (protocol): ``last_step``, ``write``, ``close``. Constructed from a
    ``TrackedRun``; continues the tracked run of the same id. Calls may block, and may raise anything: the
    caller then closes it and constructs a new one."""

    def last_step(self) -> int | None:
        """Return the tracker's last step; -1 for none, None if unknown."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Add metrics of ``step``, which never decreases."""

    def close(self, end: str | None) -> None:
        """Flush, and mark the tracked run as ended (as finished only if done). ``end``: the run's end event
        (``event_kinds.ENDS``), or `killed`; None if it continues with another tracker after a pause."""


def tracked_run(root: Path, tracker: str) -> TrackedRun:
    """Return the description of the run in ``root`` for the tracker of this name, from the run's files.
    ``logging.wandb_project`` is the project for W&B only."""
    paths = RunPaths(root)
    with paths.config.open("rb") as file:
        config = json.load(file)["config"]
    with paths.wandb_id.open("rb") as file:
        run_id = file.read().decode().strip()
    former = config.get("logging.wandb_project") if tracker == "wandb" else None
    project = former or config["logging.project"]
    shown = {name: _shown(value) for name, value in config.items() if name not in _PRIVATE}
    return TrackedRun(run_id, config["name"], project, shown, paths.trackers.absolute())


def _shown(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return _QUERY.sub(r"\1***", redacted(str(value)))


class WandbTracker:
    """W&B ``Tracker``. WANDB_MODE=offline keeps the run in RUN/trackers/wandb, or in WANDB_DIR/wandb. W&B
    itself ignores steps before its last one."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=run.project,
            id=run.id,
            resume="allow",
            name=run.name,
            config=run.config,
            dir=environment_variable("WANDB_DIR") or str(run.folder),
            settings=wandb.Settings(console="off"),
        )

    def last_step(self) -> int | None:
        return None if self._run.offline else int(self._run.starting_step) - 1

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self, end: str | None) -> None:
        if end in ("preempted", None):  # W&B's word for a run that will resume; otherwise it says failed
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if end == "done" else 1)


class TrackioTracker:
    """trackio ``Tracker``: a run in TRACKIO_DIR's database (default RUN/trackers/trackio) or on a server."""

    def __init__(self, run: TrackedRun) -> None:
        set_default("TRACKIO_DIR", str(run.folder / "trackio"))
        import trackio

        # Trackio finds the run to continue by name, which other runs in the folder may share.
        self._run: Any = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.id[:8]}",
            config=run.config,
            resume="allow",
            embed=False,
            auto_log_cpu=False,
        )

    def last_step(self) -> int | None:
        return None

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self, end: str | None) -> None:
        self._run.finish()  # trackio's runs have no state


_TAG = "bapo.run_id"
_STATES = {"done": "FINISHED", "failed": "FAILED"}
"""MLflow run states; every other end is KILLED."""


class MlflowTracker:
    """MLflow ``Tracker``: a run on the server or in the store of MLFLOW_TRACKING_URI (default
    RUN/trackers/mlflow/mlflow.db). Continues the run of an earlier start."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric: Any = Metric
        folder = run.folder / "mlflow"
        uri, artifacts = environment_variable("MLFLOW_TRACKING_URI"), None
        if not uri:
            folder.mkdir(parents=True, exist_ok=True)
            uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
        self._client: Any = MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(run.project)
        number = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(run.project, artifact_location=artifacts)
        )
        runs = self._client.search_runs([number], f"tags.`{_TAG}` = '{run.id}'", max_results=1)
        if runs:
            stored = runs[0]
            self._client.update_run(stored.info.run_id, status="RUNNING")
        else:
            stored = self._client.create_run(number, run_name=run.name, tags={_TAG: run.id})
        self._id: str = stored.info.run_id
        known = stored.data.params  # MLflow refuses to change a parameter
        params = [Param(name, str(value)) for name, value in run.config.items() if name not in known]
        self._client.log_batch(self._id, params=params)

    def last_step(self) -> int | None:
        return max(
            (point.step for point in self._client.get_metric_history(self._id, _STEP_MARK)), default=-1
        )

    def write(self, step: int, metrics: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        # The mark comes last: a step that has it is whole.
        order = sorted(metrics, key=_STEP_MARK.__eq__)
        values = [self._metric(_allowed(name), metrics[name], now, step) for name in order]
        self._client.log_batch(self._id, metrics=values)

    def close(self, end: str | None) -> None:
        if end is not None:
            self._client.set_terminated(self._id, _STATES.get(end, "KILLED"))


def _allowed(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "mlflow": MlflowTracker,
}
"""Trackers by their names in ``logging.trackers``."""
