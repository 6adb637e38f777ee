"""MLflow tracker: one MLflow run for all starts of a run directory.

In the observer's process; no other module imports mlflow. Errors of the package or its server are raised, and
the observer tries again. Used by ``__main__.py``.
"""

from __future__ import annotations

import os
import re
import time
from typing import Any

from bapo_megatron.trainer.records.observer.rows import EVALUATION_MARK, STEP_MARK
from bapo_megatron.trainer.records.observer.state import NOTHING
from bapo_megatron.trainer.records.observer.tracker import TrackedRun

_TAG = "bapo.run_id"
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
        uri, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
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
        self._write_params({name: text for name, text in run.config.items() if name not in known})

    def last_step(self, metric: str) -> int:
        return max(self._steps(metric), default=NOTHING)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        named = {_allowed(name): value for name, value in metrics.items()}
        if self._may_hold_parts:  # a store of files may hold a part of what a killed process was writing
            named = {name: value for name, value in named.items() if step not in self._steps(name)}
            self._may_hold_parts = False
        last = [name for name in (STEP_MARK, EVALUATION_MARK) if name in named]
        order = [*(name for name in named if name not in last), *last]
        now = int(time.time() * 1000)
        values = [self._metric(name, named[name], now, step) for name in order]
        for begin in range(0, len(values), _METRICS):
            self._client.log_batch(self._id, metrics=values[begin : begin + _METRICS])

    def close(self) -> None:
        self._client.set_terminated(self._id)

    def _steps(self, metric: str) -> list[int]:
        return [one.step for one in self._client.get_metric_history(self._id, metric)]

    def _write_params(self, params: dict[str, str]) -> None:
        from mlflow.entities import Param

        values = [Param(name, text[:_PARAM_CHARACTERS]) for name, text in params.items()]
        for begin in range(0, len(values), _PARAMS):
            self._client.log_batch(self._id, params=values[begin : begin + _PARAMS])


def _allowed(name: str) -> str:
    """A metric's name with an underscore for each character that MLflow refuses."""
    return re.sub(r"[^\w\-. :/]", "_", name)
