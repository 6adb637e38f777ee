"""The last event of a run, and the process that sends events, as rank 0 uses them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from bapo_megatron.config import CheckpointConfig, DataConfig, LoggingConfig, ModelConfig, RunConfig
from bapo_megatron.errors import ConfigError, Preempted, RunStopped
from bapo_megatron.runtime.jsonl_log import EventLog, read_jsonl
from bapo_megatron.trainer.preflight import check_hooks
from bapo_megatron.trainer.records.recorder import recorded_end, sending_events
from tests.support.webhook import Webhook


@pytest.fixture
def hook() -> Iterator[Webhook]:
    hook = Webhook()
    yield hook
    hook.close()


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(
        model=ModelConfig(hf_path=tmp_path / "model"),
        data=DataConfig(path=tmp_path / "data.jsonl"),
        name="r",
        steps=7,
        run_dir=tmp_path,
    )


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
def test_the_end_event_names_how_a_run_ended(
    error: BaseException, kind: str, reason: str, config: RunConfig
) -> None:
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
    assert log.told() == [("start", None), ("done", None)]
    log({"kind": "failed"})
    with recorded_end(config, False, log):
        pass
    with recorded_end(config, True, log):
        pass
    assert [kind for kind, _ in log.told()] == ["start", "done", "failed", "done", "done"]
    assert read_jsonl(log.path)[-1]["step"] == 7


def test_without_a_target_there_is_no_process(config: RunConfig) -> None:
    with sending_events(config):
        assert not senders()
    assert not (config.directory / "logs").exists()


def senders() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if sends(child)]


def sends(process: psutil.Process) -> bool:
    try:
        return "bapo_megatron.runtime.event_sender" in process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):  # a child of another test
        return False


def the_sender() -> psutil.Process:
    """The one sender, as soon as its interpreter has begun: until then it has this process's command line."""
    deadline = time.monotonic() + 300
    while not (found := senders()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    [sender] = found
    return sender


@pytest.mark.parametrize("error", [None, Preempted("SIGTERM")])
def test_the_end_event_is_sent_before_the_run_exits(
    error: Exception | None, config: RunConfig, hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", hook.url)
    log = Log(config)
    log({"kind": "done"})  # of an earlier time, before there was a target
    config = replace(config, logging=LoggingConfig(on_event=("$HOOK",)))
    try:
        with sending_events(config), recorded_end(config, True, log):
            sender = the_sender()
            assert "S3CRET" not in " ".join(sender.cmdline())
            log({"kind": "resume"})
            if error:
                raise error
    except Preempted:
        pass
    assert hook.kinds() == ["resume", "preempted" if error else "done"]
    assert not sender.is_running()


def test_a_sender_that_dies_costs_a_warning(
    config: RunConfig, hook: Webhook, capfd: pytest.CaptureFixture[str]
) -> None:
    config = replace(config, logging=LoggingConfig(on_event=(hook.url,)))
    with sending_events(config):
        sender = the_sender()
        os.kill(sender.pid, signal.SIGKILL)
    assert (
        "warning: logging.on_event: the process that sends events has ended with -9" in capfd.readouterr().err
    )


def test_a_sender_that_cannot_be_started_costs_a_warning(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/python")
    with sending_events(replace(config, logging=LoggingConfig(on_event=("true",)))):
        pass
    assert "warning: logging.on_event: events cannot be sent: " in capfd.readouterr().err


def test_hooks_are_checked_before_the_run() -> None:
    check_hooks(CheckpointConfig(after_export="true {folder}"), LoggingConfig(on_event=("true",)))
    with pytest.raises(ConfigError, match="NO_HOOK") as error:
        check_hooks(CheckpointConfig(after_export="upload {folder}"), LoggingConfig(on_event=("$NO_HOOK",)))
    first, second = str(error.value).splitlines()
    assert first.startswith("logging.on_event=$NO_HOOK: that variable is not set")
    assert second.startswith("checkpoint.after_export='upload {folder}': there is no program upload on PATH")
