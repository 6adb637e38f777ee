"""The row of a step, what is warned of, a run's last event and the process that sends events."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from bapo_megatron.algo.bapo import paper
from bapo_megatron.checkpoint.store import Saved
from bapo_megatron.config import (
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    RunConfig,
    SourceConfig,
)
from bapo_megatron.errors import ConfigError, Preempted, RunStopped
from bapo_megatron.runtime.jsonl_log import EventLog, read_jsonl
from bapo_megatron.trainer.preflight import check_hooks
from bapo_megatron.trainer.records import recorder
from bapo_megatron.trainer.records.metrics_log import last_wait_s
from bapo_megatron.trainer.records.recorder import (
    MOVED,
    IdleSearch,
    Recorder,
    RunRecords,
    StepClock,
    recorded_end,
    sending_events,
    step_metrics,
)
from bapo_megatron.types import Group, Metrics, Prompt, Rollout, StepHeader
from tests.support.batches import NO_FILE, in_memory
from tests.support.webhook import Webhook


def row_of(updates: list[Metrics], metrics: Metrics | None = None) -> Metrics:
    return step_metrics(StepHeader((), metrics or {}, NO_FILE), updates, StepClock())


def test_a_step_has_the_means_of_its_updates_and_of_maxima_the_largest() -> None:
    """An update without a response is none; a step without updates has none of their metrics."""
    gap, clipped = "rollout/engine_gap_max", "staleness/8-15/clipped"
    updates: list[Metrics] = [
        {"epoch": 0, "version": 1, "policy/kl": 1.0, "staleness/max": 3, gap: 0.25, clipped: None},
        {"epoch": 1, "version": 2, "policy/kl": 2.0, "staleness/max": 7, gap: None, clipped: 0.5},
    ]
    row = row_of(updates, {"rollout/tokens": 9.0})
    expected = {"policy/kl": 1.5, "staleness/max": 7, clipped: 0.5, gap: 0.25, "policy/updates": 2}
    assert {name: row[name] for name in expected} == expected
    assert "version" not in row
    assert row_of([{"version": 1, "policy/tokens": count} for count in (5.0, 0.0)])["policy/updates"] == 1
    assert {name for name in row_of([]) if not name.startswith("time/")} == {"policy/updates"}


@pytest.mark.usefixtures("one_process_group")
def test_an_export_is_the_last_one_if_no_checkpoint_came_after_it(tmp_path: Path) -> None:
    run = replace(run_config(tmp_path), steps=6)
    export = tmp_path / "export"
    with closing(Recorder(run, 1, True)) as recorder:
        recorder.checkpoint(Saved(6, 0, 0.1))
        recorder.export(6, export)
        assert not recorder.is_exported(export), "it was moved"
        export.mkdir()
        (export / "config.json").touch()
        assert recorder.is_exported(export)
        recorder.evaluation(6, {"eval/mean": 0.5})
        assert recorder.is_exported(export)
        recorder.checkpoint(Saved(6, 0, 0.1))  # the step was trained again
        assert not recorder.is_exported(export)
    with closing(Recorder(replace(run, steps=7), 7, True)) as recorder:
        recorder.export(6, export)
        assert not recorder.is_exported(export), "it has the weights of another step"


@pytest.mark.parametrize(
    ("metrics", "is_told"),
    [
        ({"finish_turns": 5 / 24, "finish_length": 19 / 24}, True),
        ({"finish_turns": 0.9, "finish_stop": 0.1}, False),
        ({"finish_turns": 1.0, "reward_turn_1": 0.0}, False),  # given before the cut
    ],
)
def test_a_step_whose_episodes_were_all_cut_is_told(
    metrics: dict[str, float], is_told: bool, tmp_path: Path
) -> None:
    """Their programs gave no reward, and the mean looks like that of wrong answers."""
    sources = tuple(SourceConfig(Path(f"{name}.jsonl")) for name in ("cut", "whole"))
    records = RunRecords(replace(run_config(tmp_path), data=DataConfig(sources=sources)), 1)
    named = {f"sampled/source/cut/environment/{name}": value for name, value in metrics.items()}
    records.warn_of_cut_episodes(4, {**named, "sampled/source/whole/environment/finish_turns": 0.5})
    records.close()
    told = [(row["kind"], row["message"]) for row in read_jsonl(tmp_path / "events.jsonl")]
    assert len(told) == is_told
    for kind, message in told:
        assert kind == "episodes_cut"
        assert message.startswith("step 4: all episodes of source cut were cut at environment.max_turns")


def run_config(run_dir: Path) -> RunConfig:
    algorithm = AlgorithmConfig(bounds=paper())
    return RunConfig("t", ModelConfig(Path("m")), DataConfig(Path("d")), algorithm=algorithm, run_dir=run_dir)


@pytest.mark.usefixtures("one_process_group")
def test_an_evaluation_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for first_step in (1, 5):  # the second continues from the checkpoint of step 4
        recorder = Recorder(run_config(tmp_path), first_step, True)
        recorder.evaluation(4, {"eval/sums/avg@2": 0.5, "eval/mean": 0.5})
        recorder.close()
    assert capsys.readouterr().out.count("held-out problems after step 4: sums avg@2 50.0%\n") == 1


REJECTED: Metrics = {"corrections/rejected_responses": 1.0}
KEPT: Metrics = {"corrections/rejected_responses": 0.5}


@pytest.mark.usefixtures("one_process_group")
def test_what_a_recorder_warns_of_is_an_event_and_printed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(run_config(tmp_path), 1, True)
    for step, updates in enumerate([[KEPT], [KEPT, REJECTED, KEPT, REJECTED], [REJECTED]], 1):
        recorder.step(step, updates, {"reward/mean": 0.0})
    recorder.step(4, [KEPT], {"reward/mean": 0.0, "sampled/environment/finish_turns": 1.0})
    recorder.no_updates()
    recorder.close()
    _, *events = read_jsonl(tmp_path / "events.jsonl")
    assert [(row["kind"], row["step"]) for row in events] == [
        *(("all_rejected", 2), ("all_rejected", 3), ("episodes_cut", 4), ("no_updates", 100))
    ]
    assert events[0]["message"].startswith("step 2: no optimizer step in update 1, 3 of updates.jsonl")
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert warnings == [f"warning: {events[place]['message']}" for place in (0, 2, 3)]


FRESH: Metrics = {MOVED: None, "bapo/contribution": 0.1}


def stale(moved: float = 0.0, share: float = 0.52) -> Metrics:
    return {MOVED: moved, "bapo/contribution": share}


def test_stale_updates_without_a_move_give_one_notice() -> None:
    idle = IdleSearch(paper())
    assert [idle.observe(step, [FRESH, *[stale()] * 7]) for step in (1, 2)] == [None, None]
    said = idle.observe(3, [FRESH, *[stale(share=0.5)] * 2]) or ""
    for words in ("16 stale updates (steps 1 to 3)", "fixed(0.6, 1.2)", "0.52 of the", "target of 0.4 "):
        assert words in said
    assert idle.observe(4, [stale()] * 100) is None
    assert "because" not in (IdleSearch(paper()).observe(1, [stale(share=0.25)] * 16) or "because")
    unsearched: list[Metrics] = [{"bapo/contribution": 0.5}]  # fixed bounds, or a loss without them
    for updates in ([*[stale()] * 10, stale(1.0), *[stale()] * 20], unsearched * 50, [FRESH] * 50):
        assert IdleSearch(paper()).observe(1, updates) is None


@pytest.fixture
def hook() -> Iterator[Webhook]:
    hook = Webhook()
    yield hook
    hook.close()


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return replace(run_config(tmp_path), steps=7)


class Log:
    def __init__(self, config: RunConfig) -> None:
        self.path = config.directory / "events.jsonl"

    def __call__(self, event: dict[str, Any]) -> None:
        log = EventLog(self.path)
        log.event(**event)
        log.close()

    def told(self) -> list[tuple[str, str | None]]:
        return [(row["kind"], row.get("reason")) for row in read_jsonl(self.path)]


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (Preempted("told to stop by SIGTERM"), "preempted", "told to stop by SIGTERM"),
        (RunStopped("the disk is full"), "stopped", "the disk is full"),
        (KeyboardInterrupt(), "stopped", "Ctrl-C"),
        (ConfigError("a gap"), "failed", "ConfigError: a gap"),
        (ZeroDivisionError("by zero"), "failed", "ZeroDivisionError: by zero"),
    ],
)
def test_an_end_event_names_its_kind(error: BaseException, kind: str, reason: str, config: RunConfig) -> None:
    log = Log(config)
    with pytest.raises(type(error)), recorded_end(config, True, log):
        raise error
    assert log.told() == [(kind, reason)]


def test_a_failed_end_event_does_not_hide_the_error(config: RunConfig) -> None:
    def full(_event: dict[str, Any]) -> None:
        raise RunStopped("the disk is full, too")

    with pytest.raises(ZeroDivisionError), recorded_end(config, True, full):
        raise ZeroDivisionError


def test_a_finished_run_records_done_once(config: RunConfig) -> None:
    """A start that finds nothing to do says so only where the one before did not come so far."""
    log = Log(config)
    log({"kind": "start"})
    for has_work in (True, False, False):
        with recorded_end(config, has_work, log):
            pass
    log({"kind": "failed"})
    for has_work in (False, True):
        with recorded_end(config, has_work, log):
            pass
    assert [kind for kind, _ in log.told()] == ["start", "done", "failed", "done", "done"]
    assert read_jsonl(log.path)[-1]["step"] == 7


@pytest.fixture
def senders(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The senders that a test starts."""
    started, start = list[Any](), recorder._start_sender
    monkeypatch.setattr(recorder, "_start_sender", lambda one: started.append(start(one)) or started[-1])
    return started


@pytest.mark.parametrize("error", [None, Preempted("SIGTERM"), KeyboardInterrupt()])
def test_the_end_event_is_sent_before_the_run_exits(
    error: BaseException | None, config: RunConfig, hook: Webhook, senders: list[Any], monkeypatch: Any
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(recorder, "last_wait_s", lambda most: waited.append(last_wait_s(most)) or waited[-1])
    monkeypatch.setenv("HOOK", hook.url)
    log = Log(config)
    log({"kind": "done"})  # of an earlier time, before there was a target
    config = replace(config, logging=LoggingConfig(on_event=("$HOOK",)))
    with suppress(Preempted, KeyboardInterrupt), sending_events(config), recorded_end(config, True, log):
        sender = psutil.Process(senders[0].pid)
        while not sender.environ():  # within its exec
            time.sleep(0.01)
        assert "S3CRET" not in " ".join(sender.cmdline())
        assert sender.environ()["PYTHONPATH"].split(os.pathsep) == list(filter(None, sys.path))
        log({"kind": "resume"})
        if error:
            raise error
    assert (hook.kinds(), waited) == (["resume", log.told()[-1][0]], [10.0 if error else 30.0])
    assert not sender.is_running()


def test_a_dead_sender_is_told(
    config: RunConfig, senders: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    config = replace(config, logging=LoggingConfig(on_event=("true",)))
    with sending_events(config):
        senders[0].kill()
    assert (
        "warning: logging.on_event: the process that sends events has ended with -9" in capfd.readouterr().err
    )


def test_hooks_are_checked_before_the_run() -> None:
    check_hooks(CheckpointConfig(after_export="true {folder}"), LoggingConfig(on_event=("true",)))
    with pytest.raises(ConfigError, match="NO_HOOK") as error:
        check_hooks(CheckpointConfig(after_export="upload {folder}"), LoggingConfig(on_event=("$NO_HOOK",)))
    first, second = str(error.value).splitlines()
    assert first.startswith("logging.on_event='$NO_HOOK': ")
    assert second.startswith("checkpoint.after_export='upload {folder}': there is no program upload")


def test_named_rewards_have_their_means() -> None:
    """A response without one of them counts 0 for it, an episode with branches once."""
    column = np.zeros(1, np.int32)
    rollouts = tuple(
        Rollout(column, column.astype(np.float32), column, "stop", 1.0, named_rewards=named, branch=branch)
        for branch, named in ((0, {"correct": 1.0, "format": 0.5}), (0, {}), (1, {}))
    )
    header = in_memory(Group(Prompt(0, column, "", ""), rollouts)).header
    found = step_metrics(header, None, StepClock())
    assert (found["reward/named/correct"], found["reward/named/format"]) == (0.5, 0.25)
