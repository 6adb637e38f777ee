"""Metrics arrive in the files and in TensorBoard, once for each step, also over a resume."""

from __future__ import annotations

import errno
import math
import threading
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from bapo_megatron.config import run as config
from bapo_megatron.errors import RunStopped
from bapo_megatron.runtime.jsonl_log import read_jsonl
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.trainer.records import metrics_log
from bapo_megatron.trainer.records.metrics_log import MetricsLog, evaluation_means


def no_report(_kind: str, **_fields: Any) -> None:
    """Nothing is to be told."""
    raise AssertionError


FILES_ONLY = config.LoggingConfig(tensorboard=False)


def write_steps(
    run_dir: Path, logging: config.LoggingConfig, resume_step: int, last: int, reward: float
) -> None:
    """The part of a run from ``resume_step`` to ``last``: one step line and two update lines a step."""
    log = MetricsLog(run_dir, logging, resume_step, no_report)
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


def test_observers_are_notified_of_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They start when the files are back at the checkpoint, and are told of what is in the files."""
    told: list[Any] = []

    class Told:
        def __init__(
            self, names: list[str], paths: RunPaths, resume_step: int, report: Any, catch_up_s: float
        ) -> None:
            told.append((names, resume_step, len(read_jsonl(paths.metrics)), report, catch_up_s))

        def tell(self, step: int) -> None:
            told.append((step, len(read_jsonl(tmp_path / "metrics.jsonl"))))

        def close(self) -> None:
            told.append("closed")

    write_steps(tmp_path, FILES_ONLY, 0, 3, 0.25)
    monkeypatch.setattr(metrics_log, "Observers", Told)
    logging = config.LoggingConfig(trackers=("wandb", "tensorboard", "mlflow"), catch_up_minutes=3)
    write_steps(tmp_path, logging, 2, 4, 0.75)
    assert told == [(["wandb", "mlflow"], 2, 2, no_report, 180.0), (3, 3), (4, 4), "closed"]
    assert scalars(tmp_path, "reward/mean") == [(3, 0.75), (4, 0.75)]


def test_evaluations_follow_a_run_that_goes_back(tmp_path: Path) -> None:
    """Of the weights that it goes on from, an evaluation stays and is not written twice; later ones go."""
    log = MetricsLog(tmp_path, FILES_ONLY, 0, no_report)
    for step in (0, 2, 4):
        assert log.write_evaluation(step, {"eval/mean": step / 10})
    log.close()
    again = MetricsLog(tmp_path, FILES_ONLY, 2, no_report)
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
        log = MetricsLog(tmp_path, config.LoggingConfig(), 0, no_report)
        for step in range(1, steps + 1):
            log.write_step(step, {"reward/mean": 0.5})
        monkeypatch.setattr(RecordWriter, "write", full)
        log.write_step(steps + 1, {"reward/mean": 0.5})

    if not steps:
        monkeypatch.setattr(RecordWriter, "write", full)
    with pytest.raises(RunStopped, match=r"the boards' data could not be written .*No space left"):
        write()
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("tensorboard."):
            thread.join(1)
    assert not printed
    other = threading.Thread(target=full)
    other.start()
    other.join()
    assert len(printed) == 1
