"""Metrics arrive in the files, in TensorBoard and in W&B, once for each step, also over a resume."""

from __future__ import annotations

import errno
import importlib.machinery
import math
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from bapo_megatron.config import run as config
from bapo_megatron.errors import ConfigError, RunStopped
from bapo_megatron.runtime.jsonl_log import read_jsonl
from bapo_megatron.trainer.records import metrics_log
from bapo_megatron.trainer.records.metrics_log import MetricsLog, check_logging, evaluation_means

FILES_ONLY = config.LoggingConfig(tensorboard=False)


def write_steps(
    run_dir: Path, logging: config.LoggingConfig, resume_step: int, last: int, reward: float
) -> None:
    """The part of a run from ``resume_step`` to ``last``: one step line and two update lines a step."""
    log = MetricsLog(run_dir, logging, resume_step, {"name": "demo"})
    for step in range(resume_step + 1, last + 1):
        for update in range(2):
            log.write_update(step, {"update": update, "policy/loss": reward})
        log.write_step(step, {"reward/mean": reward, "policy/entropy": None, "policy/kl": math.nan})
    log.close()


def scalars(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_files_hold_one_line_a_step_and_one_an_update(tmp_path: Path) -> None:
    write_steps(tmp_path, FILES_ONLY, 0, 2, 0.5)
    assert read_jsonl(tmp_path / "metrics.jsonl") == [
        {"step": step, "reward/mean": 0.5, "policy/entropy": None, "policy/kl": None} for step in (1, 2)
    ]
    assert [(row["step"], row["update"]) for row in read_jsonl(tmp_path / "updates.jsonl")] == [
        (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip
    assert not (tmp_path / "tensorboard").exists()


def test_resume_takes_the_files_back_to_the_checkpoint(tmp_path: Path) -> None:
    write_steps(tmp_path, FILES_ONLY, 0, 5, 0.25)
    write_steps(tmp_path, FILES_ONLY, 3, 6, 0.75)
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["reward/mean"]) for row in rows] == [
        (1, 0.25), (2, 0.25), (3, 0.25), (4, 0.75), (5, 0.75), (6, 0.75),
    ]  # fmt: skip
    assert len(read_jsonl(tmp_path / "updates.jsonl")) == 12


def test_tensorboard_has_each_value_under_its_name(tmp_path: Path) -> None:
    write_steps(tmp_path, config.LoggingConfig(), 0, 3, 0.5)
    assert scalars(tmp_path, "reward/mean") == [(1, 0.5), (2, 0.5), (3, 0.5)]
    tags = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["scalars"]
    assert tags == ["reward/mean"]  # None and NaN are left out.


@pytest.mark.parametrize("resume_step", [0, 3])
def test_tensorboard_has_each_step_once_after_a_resume(tmp_path: Path, resume_step: int) -> None:
    write_steps(tmp_path, config.LoggingConfig(), 0, 5, 0.25)
    write_steps(tmp_path, config.LoggingConfig(), resume_step, 6, 0.75)
    expected = [(step, 0.25 if step <= resume_step else 0.75) for step in range(1, 7)]
    assert scalars(tmp_path, "reward/mean") == expected


class FakeWandB(ModuleType):
    """Remembers what the metrics log asks of wandb."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []

    def init(self, **arguments: Any) -> FakeWandB:
        self.inits.append(arguments)
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, metrics))

    def finish(self) -> None:
        pass


def test_wandb_continues_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    logging = config.LoggingConfig(tensorboard=False, wandb_project="bapo")
    check_logging(logging)
    write_steps(tmp_path, logging, 0, 1, 0.5)
    write_steps(tmp_path, logging, 1, 2, 0.5)
    first, second = wandb.inits
    assert first == second
    assert first["id"]
    assert (first["project"], first["resume"], first["name"]) == ("bapo", "allow", "demo")
    assert wandb.logged == [(1, {"reward/mean": 0.5}), (2, {"reward/mean": 0.5})]


def test_loggers_that_are_not_installed_are_told_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_log, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install tensorboard") as error:
        check_logging(config.LoggingConfig(tensorboard=True, wandb_project="bapo"))
    assert "pip install tensorboard" in str(error.value)
    assert "pip install wandb" in str(error.value)
    check_logging(FILES_ONLY)


def test_evaluations_follow_a_run_that_goes_back(tmp_path: Path) -> None:
    """Of the weights that it goes on from, an evaluation stays and is not written twice; later ones go."""
    log = MetricsLog(tmp_path, FILES_ONLY, 0, {})
    for step in (0, 2, 4):
        assert log.write_evaluation(step, {"eval/mean": step / 10})
    log.close()
    again = MetricsLog(tmp_path, FILES_ONLY, 2, {})
    assert evaluation_means(tmp_path) == {0: 0.0, 2: 0.2}
    assert not again.write_evaluation(2, {"eval/mean": 0.9})
    assert again.write_evaluation(4, {"eval/mean": 0.5})
    again.close()
    assert evaluation_means(tmp_path) == {0: 0.0, 2: 0.2, 4: 0.5}


@pytest.mark.parametrize("steps", [0, 1])
def test_a_full_disk_below_tensorboard_is_one_error(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard's own thread would print a traceback, too. Those of other threads are printed.

    The disk is full before the event file begins, or from the second step on.
    """
    printed: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", printed.append)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def write() -> None:
        log = MetricsLog(tmp_path, config.LoggingConfig(), 0, {})
        for step in range(1, steps + 1):
            log.write_step(step, {"reward/mean": 0.5})
        monkeypatch.setattr(RecordWriter, "write", full)
        log.write_step(steps + 1, {"reward/mean": 0.5})

    if not steps:
        monkeypatch.setattr(RecordWriter, "write", full)
    with pytest.raises(RunStopped, match=r"what the boards show could not be written .*No space left"):
        write()
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("tensorboard."):
            thread.join(1)
    assert not printed
    other = threading.Thread(target=full)
    other.start()
    other.join()
    assert len(printed) == 1
