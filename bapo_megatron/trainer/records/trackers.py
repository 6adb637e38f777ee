"""Experiment trackers: their protocol, and those of W&B, trackio and MLflow; the redaction of secrets.

A tracker shows one run of a board for all starts of a run directory. It runs in an observer's process, and
imports its package when it is made. Errors of a package or its server are raised, and the observer tries
again. A new tracker is a class with the methods of ``Tracker``, an entry in ``TRACKERS`` and one in
``TrackerName`` (config/run.py). Secrets (API keys, passwords in URLs) are taken out of what a tracker's
package prints or raises, and of the configuration that it gets.

``steps_with`` reads, at a restart, which steps W&B's offline files hold: after a kill fewer than were logged.
A file has LevelDB's log format (github.com/google/leveldb, doc/log_format.md) after a header of seven bytes:
blocks of 32 KiB with records of checksum (4 bytes), length (2), kind (1: whole, 2: first, 3: middle, 4: last
part) and data, here a Record of W&B's protocol. A torn end is left out. Used by ``following.py``.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

from bapo_megatron.runtime.device import environment_variable, set_default
from bapo_megatron.runtime.files import read_plain
from bapo_megatron.runtime.run_paths import RunPaths

STEP_MARK = "time/step_s"
"""A metric that is a number in every step: a tracker that has it for a step has the step."""

EVALUATION_MARK = "eval/mean"
"""A metric that is a number in every evaluation."""

NOTHING = -1
"""The step before the first: evaluations begin with step 0."""

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

    ``following.main`` puts it in place of an observer's standard output and error.
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
    """Description of a run for a tracker, as plain data without secrets: id, name, project, configuration."""

    id: str
    """Unique to the run directory, and the same for all of its starts."""
    name: str
    project: str
    config: dict[str, Any]
    """The configuration by dotted names: numbers, truth values and None as they are, which a board sorts and
    filters by; all else as text, redacted."""
    folder: Path
    """RUN/trackers, where a tracker without a server keeps its data."""


RunEnd = Literal["done", "preempted", "stopped", "failed", "killed"]
"""How a run has ended: its end event (``runtime/event_kinds.py``), or `killed` where it has none."""


class Tracker(Protocol):
    """Protocol of an experiment tracker of one run: W&B, trackio or MLflow. Used in its observer's process.

    Made from a ``TrackedRun``; it resumes the tracked run of the same id. Calls may block, and may raise
    anything: the observer closes it and makes a new one.
    """

    def last_step(self, metric: str) -> int | None:
        """The last step whose ``metric`` is durably stored; -1 if none, None if the tracker cannot tell."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Add metrics of ``step``, which never falls."""

    def close(self, end: RunEnd | None) -> None:
        """Flush, and mark the tracked run as ended: as finished only where it is done.

        ``end`` None: the run goes on, and is followed again after a pause.
        """


def tracked_run(root: Path, tracker: str, of_earlier_version: bool = False) -> TrackedRun:
    """Description of the run in the run directory ``root`` for a tracker of this name, from the run's files.

    ``logging.wandb_project`` is the project of W&B alone, and of all trackers that an earlier version began:
    all starts of a run are one tracked run.
    """
    paths = RunPaths(root)
    with read_plain(paths.config) as file:
        config = json.load(file)["config"]
    with read_plain(paths.wandb_id) as file:
        run_id = file.read().decode().strip()
    heeds = tracker == "wandb" or of_earlier_version
    former = config.get("logging.wandb_project") if heeds else None
    project = former or config.get("logging.project", _PROJECT)
    shown = {name: _shown(value) for name, value in config.items() if name not in _PRIVATE}
    return TrackedRun(run_id, config["name"], project, shown, paths.trackers.absolute())


def _shown(value: Any) -> Any:
    """A value of the configuration as boards get it."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return _QUERY.sub(r"\1***", redacted(str(value)))


_HEADER, _BLOCK, _RECORD_HEADER = 7, 1 << 15, 7
_WHOLE, _FIRST, _LAST = 1, 2, 4


def steps_with(folder: Path, run_id: str, metric: str) -> Iterator[int]:
    """Steps of the offline run ``run_id`` that have ``metric``, in all files of ``folder``."""
    from wandb.proto import wandb_internal_pb2

    # W&B numbers the folders of starts in one second: offline-run-TIME-ID, offline-run-TIME-ID-1, ...
    for path in sorted(folder.glob(f"offline-run-*-{run_id}*/run-{run_id}.wandb")):
        with read_plain(path) as file:
            data = file.read()
        for record in _records(data):
            message: Any = wandb_internal_pb2.Record.FromString(record)  # type: ignore[attr-defined,unused-ignore]
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in message.history.item}
            if metric in items:
                yield int(json.loads(items["_step"]))


def _records(data: bytes) -> Iterator[bytes]:
    """The complete records of a file; a torn end is left out."""
    at, parts = _HEADER, b""
    while at + _RECORD_HEADER <= len(data):
        if (left := _BLOCK - at % _BLOCK) < _RECORD_HEADER:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        begin = at + _RECORD_HEADER
        at = begin + length
        if not kind or at > len(data):
            return
        parts = (b"" if kind in (_WHOLE, _FIRST) else parts) + data[begin:at]
        if kind in (_WHOLE, _LAST):
            yield parts


class WandbTracker:
    """The ``Tracker`` of W&B. WANDB_MODE=offline keeps the run in RUN/trackers/wandb, or in WANDB_DIR/wandb.

    ``write`` returns before W&B has stored the row; at a restart ``last_step`` tells what it has.
    ``Observer`` makes and calls it.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        folder = Path(environment_variable("WANDB_DIR") or run.folder)
        self._files = folder / "wandb"
        self._id = run.id
        self._run: Any = wandb.init(
            project=run.project,
            id=run.id,
            resume="allow",
            name=run.name,
            config=run.config,
            dir=str(folder),
            settings=wandb.Settings(console="off"),
        )

    def last_step(self, metric: str) -> int:
        # W&B writes some time after `log`: after a kill its server, or its files, have fewer steps.
        if self._run.offline:
            return max(steps_with(self._files, self._id, metric), default=NOTHING)
        return int(self._run.starting_step) - 1

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self, end: RunEnd | None) -> None:
        if end in ("preempted", None):  # W&B's own word for a run that will be resumed; else it says failed
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if end == "done" else 1)


_STORED_S = 60.0
"""Time until a row must be in the database: trackio's thread writes every half second."""


class TrackioTracker:
    """The ``Tracker`` of trackio: a run in a database or, where trackio is set up so, on a server.

    The database is in TRACKIO_DIR, else RUN/trackers/trackio; ``write`` waits until it has the row, and
    raises OSError after a minute. A server's last step is not known (``last_step`` gives None). ``Observer``
    makes and calls it.
    """

    def __init__(self, run: TrackedRun) -> None:
        set_default("TRACKIO_DIR", str(run.folder / "trackio"))
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        self._storage: Any = SQLiteStorage
        # Trackio finds the run to go on with by its name, which other runs of the folder may have.
        self._run: Any = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.id[:8]}",
            config=run.config,
            resume="allow",
            embed=False,
            auto_log_cpu=False,
        )
        self._is_local = self._run.url is None

    def last_step(self, metric: str) -> int | None:
        if not self._is_local:
            return None
        return max((row["step"] for row in self._values(metric)), default=NOTHING)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)
        if self._is_local:
            self._wait_until_stored(step, next(iter(metrics)))

    def close(self, end: RunEnd | None) -> None:
        self._run.finish()  # trackio's runs have no state

    def _wait_until_stored(self, step: int, metric: str) -> None:
        """Wait until the row is in the database: trackio drops what it cannot store, with a warning alone."""
        deadline = time.monotonic() + _STORED_S
        while not self._values(metric, step=step):
            if time.monotonic() > deadline:
                raise OSError(f"trackio has not stored step {step}: logs/tracker-trackio.log may say why")
            time.sleep(0.05)

    def _values(self, metric: str, **where: int) -> list[dict[str, Any]]:
        run = self._run
        try:
            return list(
                self._storage.get_metric_values(run.project, run.name, metric, run_id=run.id, **where)
            )
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):  # trackio's thread is making the database
                return []
            raise


_TAG = "bapo.run_id"
_STATES = {"done": "FINISHED", "failed": "FAILED"}
"""MLflow's states of ended runs; every other end is KILLED."""
_PARAMS, _PARAM_CHARACTERS, _METRICS = 100, 500, 1000
"""Limits of one MLflow request: parameters, characters of a parameter's value, metrics."""


class MlflowTracker:
    """The ``Tracker`` of MLflow: a run of the server or store of MLFLOW_TRACKING_URI.

    Without that variable it is in RUN/trackers/mlflow/mlflow.db. Opening it continues the run of an earlier
    start. ``Observer`` makes and calls it.
    """

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

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
        found = self._client.search_runs([number], f"tags.`{_TAG}` = '{run.id}'", max_results=1)
        self._may_hold_parts = bool(found)
        if found:
            stored = found[0]
            self._client.update_run(stored.info.run_id, status="RUNNING")
        else:
            stored = self._client.create_run(number, run_name=run.name, tags={_TAG: run.id})
        self._id: str = stored.info.run_id
        known = stored.data.params  # MLflow refuses to change a parameter
        self._write_params({name: value for name, value in run.config.items() if name not in known})

    def last_step(self, metric: str) -> int:
        return max(self._steps(metric), default=NOTHING)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        named = {_allowed(name): value for name, value in metrics.items()}
        last = [name for name in (STEP_MARK, EVALUATION_MARK) if name in named]
        order = [*(name for name in named if name not in last), *last]
        if self._may_hold_parts:  # a store of files may hold the first part of what a killed process wrote
            # Only as far as it goes: the histories of all metrics of a long run are millions of values.
            order = list(dropwhile(lambda name: step in self._steps(name), order))
            self._may_hold_parts = False
        now = int(time.time() * 1000)
        values = [self._metric(name, named[name], now, step) for name in order]
        for begin in range(0, len(values), _METRICS):
            self._client.log_batch(self._id, metrics=values[begin : begin + _METRICS])

    def close(self, end: RunEnd | None) -> None:
        if end is not None:
            self._client.set_terminated(self._id, _STATES.get(end, "KILLED"))

    def _steps(self, metric: str) -> list[int]:
        return [one.step for one in self._client.get_metric_history(self._id, metric)]

    def _write_params(self, params: dict[str, Any]) -> None:
        from mlflow.entities import Param

        values = [Param(name, str(value)[:_PARAM_CHARACTERS]) for name, value in params.items()]
        for begin in range(0, len(values), _PARAMS):
            self._client.log_batch(self._id, params=values[begin : begin + _PARAMS])


def _allowed(name: str) -> str:
    """A metric's name with an underscore for each character that MLflow refuses."""
    return re.sub(r"[^\w\-. :/]", "_", name)


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "mlflow": MlflowTracker,
}
"""The trackers by their names in ``logging.trackers``."""
