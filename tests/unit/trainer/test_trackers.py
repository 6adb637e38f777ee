"""What each tracker is asked for, on stand-ins for the packages; tests/e2e/test_trackers.py has those."""

from __future__ import annotations

import importlib.machinery
import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bapo_megatron.commands.doctor.packages import BOARDS, PACKAGES
from bapo_megatron.config import LoggingConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.trainer import preflight
from bapo_megatron.trainer.preflight import check_logging
from bapo_megatron.trainer.records.trackers import (
    MlflowTracker,
    TrackedRun,
    WandbTracker,
)

STEP = {"time/step_s": 2.0, "reward/mean": 0.5, "staleness/16+/tokens": 1.0}


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


def fake_wandb(monkeypatch: pytest.MonkeyPatch, made: FakeWandbRun) -> list[dict[str, Any]]:
    inits: list[dict[str, Any]] = []
    module(monkeypatch, "wandb", init=lambda **arguments: inits.append(arguments) or made, Settings=dict)
    return inits


def test_wandb_continues_after_its_last_step(run: TrackedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_wandb(monkeypatch, FakeWandbRun(starting_step=0))
    assert WandbTracker(run).last_step() == -1  # step 0 is to come
    inits = fake_wandb(monkeypatch, FakeWandbRun(starting_step=7))
    assert WandbTracker(run).last_step() == 6
    asked = {"project": "sums", "id": run.id, "resume": "allow", "name": "demo", "dir": str(run.folder)}
    assert asked.items() <= inits[0].items()
    fake_wandb(monkeypatch, FakeWandbRun(offline=True))
    assert WandbTracker(run).last_step() is None


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
    mlflow: FakeMlflow,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit code 0 is W&B's state "finished", any other one "failed" or, of a run that continues,
    "preempted"."""
    made = FakeWandbRun()
    fake_wandb(monkeypatch, made)
    WandbTracker(run).close(end)
    assert made.calls == calls
    MlflowTracker(run).close("done")
    MlflowTracker(run).close(end)
    assert mlflow.status == state


@dataclass
class FakeMlflow:
    """The client and the store, which has one run at most."""

    uri: str = ""
    created: list[tuple[str, Any]] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    metrics: list[tuple[str, float, int]] = field(default_factory=list)
    status: str = ""

    def __call__(self, tracking_uri: str) -> FakeMlflow:
        self.uri = tracking_uri
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        known = [made for made in self.created if made[0] == name]
        return SimpleNamespace(experiment_id="7") if known else None

    def create_experiment(self, name: str, artifact_location: str | None) -> str:
        self.created.append((name, artifact_location))
        return "7"

    def search_runs(self, experiments: list[str], text: str, max_results: int) -> list[Any]:
        assert (experiments, text) == (["7"], "tags.`bapo.run_id` = '0123456789abcdef'")
        return [self._run()] if len(self.created) > 1 else []

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        self.created.append((run_name, tags))
        return self._run()

    def _run(self) -> Any:
        data = SimpleNamespace(params=dict(self.params))
        return SimpleNamespace(info=SimpleNamespace(run_id="m1"), data=data)

    def update_run(self, run_id: str, status: str) -> None:
        self.status = status

    def set_terminated(self, run_id: str, status: str) -> None:
        self.status = status

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert run_id == "m1"
        assert len(params) <= 100
        self.metrics += [(name, value, step) for name, value, _, step in metrics]
        for name, value in params:
            assert name not in self.params  # a real one refuses a changed value
            self.params[name] = value

    def get_metric_history(self, run_id: str, name: str) -> list[Any]:
        return [SimpleNamespace(step=step) for known, _, step in self.metrics if known == name]


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMlflow:
    fake = FakeMlflow()
    module(monkeypatch, "mlflow", MlflowClient=fake)
    module(monkeypatch, "mlflow.entities", Metric=lambda *values: values, Param=lambda *values: values)
    return fake


def test_mlflow_finds_its_run_again(run: TrackedRun, mlflow: FakeMlflow) -> None:
    tracker = MlflowTracker(run)
    assert mlflow.uri == f"sqlite:///{run.folder}/mlflow/mlflow.db"
    made = [("sums", f"file://{run.folder}/mlflow/artifacts"), ("demo", {"bapo.run_id": run.id})]
    assert mlflow.created == made
    assert mlflow.params == {"seed": "3", "long": "x" * 500}
    tracker.write(1, STEP)
    # The mark comes last: a step that has it is whole. MLflow takes no plus in a name.
    assert mlflow.metrics == [
        ("reward/mean", 0.5, 1),
        ("staleness/16_/tokens", 1.0, 1),
        ("time/step_s", 2.0, 1),
    ]
    tracker.close("done")
    assert mlflow.status == "FINISHED"
    run.config["new"] = 1
    again = MlflowTracker(run)
    assert mlflow.created == made
    assert (mlflow.status, mlflow.params["new"]) == ("RUNNING", "1")
    assert again.last_step() == 1


ENDS: list[tuple[Any, str]] = [
    ("done", "FINISHED"), ("failed", "FAILED"), ("preempted", "KILLED"), ("stopped", "KILLED"),
    ("killed", "KILLED"), (None, "RUNNING"),
]  # fmt: skip


def test_mlflow_at_an_address(run: TrackedRun, mlflow: FakeMlflow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host:5000")
    MlflowTracker(run)
    assert mlflow.uri == "http://host:5000"
    assert mlflow.created[0] == ("sums", None)
    assert not (run.folder / "mlflow").exists()


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
        origin = "/site-packages/x.py" if name in names else None
        found = importlib.machinery.ModuleSpec(name, None, origin=origin)
        found.has_location = origin is not None
        return found if name in names or name == "a folder" else None

    monkeypatch.setattr(preflight, "find_spec", find_spec)


def test_missing_tracker_packages_are_an_error_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    only(monkeypatch)
    names = ("tensorboard", "wandb", "trackio", "mlflow")
    with pytest.raises(ConfigError, match="pip install") as error:
        check_logging(LoggingConfig(trackers=names))
    for name, line in zip(names, str(error.value).splitlines(), strict=True):
        assert f'{name}, but {name} is not installed: `pip install "{name}' in line.replace("-skinny", "")
    check_logging(LoggingConfig(trackers=()))
    only(monkeypatch, "wandb")
    check_logging(LoggingConfig(trackers=("wandb",)))
    mlflow = LoggingConfig(trackers=("mlflow",))
    only(monkeypatch, "mlflow", "sqlalchemy")
    with pytest.raises(ConfigError, match="sqlalchemy and alembic, for a database in the run directory"):
        check_logging(mlflow)
    only(monkeypatch, "mlflow", "sqlalchemy", "alembic")
    check_logging(mlflow)
    only(monkeypatch, "mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host")  # a server has its own
    check_logging(mlflow)


def test_each_board_has_one_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a run's message, in `bapo doctor`, and in the extra of setup.py."""
    given: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", given.update)
    runpy.run_path("setup.py")
    lines = [line for name, line in preflight._INSTALLS.items() if name != "tensorboard"]
    assert [word.strip('"') for line in lines for word in line.split()] == given["extras_require"]["trackers"]
    assert preflight._INSTALLS["tensorboard"].strip('"') in given["install_requires"]
    assert [one.install for one in PACKAGES if one.purpose == BOARDS] == lines


def test_a_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B's data, in a folder `wandb` of the present directory, can be imported as a package without code."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match="wandb is not installed"):
        check_logging(LoggingConfig(trackers=("wandb",)))


@pytest.mark.parametrize(
    ("fields", "chosen"),
    [
        ({}, ["tensorboard"]),
        ({"tensorboard": False}, []),
        ({"wandb_project": "x"}, ["tensorboard", "wandb"]),
        ({"tensorboard": False, "wandb_project": "x"}, ["wandb"]),
        ({"trackers": ("mlflow", "wandb", "mlflow"), "wandb_project": "x"}, ["mlflow", "wandb"]),
        ({"trackers": ()}, []),
    ],
)
def test_former_fields_choose_too(fields: dict[str, Any], chosen: list[str]) -> None:
    assert list(LoggingConfig(**fields).chosen) == chosen
