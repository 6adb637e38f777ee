"""What each tracker is asked for, on stand-ins for the packages; tests/e2e/test_trackers.py has those."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from bapo_megatron.config import LoggingConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.trainer.preflight import check_logging
from bapo_megatron.trainer.records.trackers import MlflowTracker, TrackedRun, WandbTracker


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrackedRun:
    for name in ("WANDB_DIR", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", "")
    monkeypatch.delenv("TRACKIO_DIR")
    return TrackedRun("0123456789abcdef", "demo", "sums", {"seed": 3, "long": "x" * 900}, tmp_path)


def module(monkeypatch: pytest.MonkeyPatch, name: str, **values: Any) -> None:
    made = ModuleType(name)
    vars(made).update(values)
    monkeypatch.setitem(sys.modules, name, made)


@dataclass
class FakeWandbRun:
    offline: bool = False
    starting_step: int = 0
    calls: list[Any] = field(default_factory=list)

    def mark_preempting(self) -> None:
        self.calls.append("preempting")

    def finish(self, exit_code: int) -> None:
        self.calls.append(exit_code)


def fake_wandb(monkeypatch: pytest.MonkeyPatch, made: FakeWandbRun) -> None:
    module(monkeypatch, "wandb", init=lambda **_: made, Settings=dict)


@pytest.mark.parametrize(
    ("end", "calls", "state"),
    [
        ("done", [0], "FINISHED"),
        ("failed", [1], "FAILED"),
        ("preempted", ["preempting", 1], "KILLED"),
        ("stopped", [1], "KILLED"),
        ("killed", [1], "KILLED"),
        (None, ["preempting", 1], "RUNNING"),
    ],
)
def test_boards_are_told_how_the_run_has_ended(
    end: Any,
    calls: list[Any],
    state: str,
    run: TrackedRun,
    mlflow: MagicMock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit code 0 is W&B's state "finished", any other one "failed" or, of a run that continues,
    "preempted"."""
    made = FakeWandbRun()
    fake_wandb(monkeypatch, made)
    WandbTracker(run).close(end)
    assert made.calls == calls
    MlflowTracker(run).close(end)
    ends = [call.args[1] for call in mlflow.set_terminated.call_args_list]
    assert ends == ([] if end is None else [state])


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """The client of a store without a run."""
    client = MagicMock()
    client.get_experiment_by_name.return_value = None
    client.create_experiment.return_value = "7"
    client.search_runs.return_value = []
    client.create_run.return_value = stored({})
    client.get_metric_history.side_effect = lambda run, name: [SimpleNamespace(step=step) for step in (3, 1)]
    module(monkeypatch, "mlflow", MlflowClient=MagicMock(return_value=client))
    module(monkeypatch, "mlflow.entities", Metric=lambda *values: values, Param=lambda *values: values)
    return client


def stored(params: dict[str, str]) -> Any:
    """A run of the store."""
    return SimpleNamespace(info=SimpleNamespace(run_id="m1"), data=SimpleNamespace(params=params))


def test_a_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B's data, in a folder `wandb` of the present directory, can be imported as a package without code."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match="wandb is not installed"):
        check_logging(LoggingConfig(trackers=("wandb",)))
