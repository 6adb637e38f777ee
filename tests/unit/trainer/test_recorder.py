"""The row of a step, the notice of an idle search, a run's last event and the process that sends events."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from bapo_megatron.algo.bapo import BoundsConfig, balanced, fixed, grpo, paper, published_code
from bapo_megatron.algo.papo_schedule import PapoConfig
from bapo_megatron.checkpoint.store import Saved
from bapo_megatron.config import (
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ReferenceKlConfig,
    RewardConfig,
    RunConfig,
)
from bapo_megatron.errors import ConfigError, Preempted, RunStopped
from bapo_megatron.runtime.jsonl_log import EventLog, read_jsonl
from bapo_megatron.trainer.checks import check_one_sign
from bapo_megatron.trainer.preflight import check_hooks
from bapo_megatron.trainer.records.recorder import (
    MOVED,
    IdleSearch,
    Recorder,
    StepClock,
    recorded_end,
    sending_events,
    step_metrics,
)
from bapo_megatron.types import Group, Metrics, Prompt, Rollout, StepHeader
from tests.support.bapo_objective import objective
from tests.support.batches import NO_FILE, in_memory
from tests.support.webhook import Webhook

NAMES = objective(grpo()).metric_names()


def test_a_step_has_the_means_of_its_updates_and_of_maxima_the_largest() -> None:
    gap, clipped = "rollout/engine_gap_max", "staleness/8-15/clipped"
    updates = [
        {"epoch": 0, "version": 1, "policy/kl": 1.0, "staleness/max": 3, gap: 0.25, clipped: None},
        {"epoch": 1, "version": 2, "policy/kl": 2.0, "staleness/max": 7, gap: None, clipped: 0.5},
    ]
    row = step_metrics(StepHeader((), {"rollout/tokens": 9.0}, NO_FILE), updates, StepClock(), NAMES)
    assert row["policy/kl"] == 1.5
    assert row["staleness/max"] == 7
    assert row[clipped] == 0.5
    assert row[gap] == 0.25
    assert row["policy/updates"] == 2
    assert "version" not in row


@pytest.mark.usefixtures("one_process_group")
def test_an_export_is_the_last_one_if_no_checkpoint_came_after_it(tmp_path: Path) -> None:
    run = replace(run_config(tmp_path, RewardConfig()), steps=6)
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


def test_an_update_without_a_response_is_none() -> None:
    updates = [{"version": 1, "policy/tokens": 5.0}, {"version": 1, "policy/tokens": 0.0}]
    assert step_metrics(StepHeader((), {}, NO_FILE), updates, StepClock(), NAMES)["policy/updates"] == 1


@pytest.mark.parametrize("name", ["staleness/mean", "staleness/max", "staleness/16+/entropy", "policy/loss"])
def test_a_step_without_updates_has_the_same_columns(name: str) -> None:
    assert name in NAMES
    assert step_metrics(StepHeader((), {}, NO_FILE), [], StepClock(), NAMES)[name] is None


class OneSignNotes:
    """Stands for the recorder."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, str]] = []

    def warning(self, kind: str, step: int, message: str) -> None:
        assert kind == "one_sign"
        self.taken.append((step, message))


@pytest.mark.parametrize(
    ("shares", "noted"),
    [([0.9, 0.3], True), ([0.5, 0.5], False), ([0.9, None, 0.9], True), ([None], False), ([], False)],
)
def test_one_sign_searches_are_an_event(shares: list[float | None], noted: bool) -> None:
    """Where more than half of a step's tokens had such a search; on rank 0."""
    notes, updates = OneSignNotes(), [{"bapo/one_sign_tokens": share} for share in shares]
    check_one_sign(7, updates, notes)  # type: ignore[arg-type]
    check_one_sign(7, [{}], notes)  # type: ignore[arg-type]  # a loss without searches
    check_one_sign(7, updates, None)
    assert bool(notes.taken) == noted
    if noted:
        assert notes.taken[0][1].startswith("step 7: ")
        assert (
            f"{0.6 if 0.3 in shares else 0.9:.0%} of the tokens had bounds from searches" in notes.taken[0][1]
        )


def run_config(run_dir: Path, reward: RewardConfig) -> RunConfig:
    algorithm = AlgorithmConfig(bounds=paper())
    parts = {"reward": reward, "algorithm": algorithm, "run_dir": run_dir}
    return RunConfig("t", ModelConfig(Path("m")), DataConfig(Path("d")), **parts)  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize(
    ("function", "failed", "warned"),
    [("math", 0.0, True), ("math", -1.0, False), ("math", -2.0, False), ("mine.reward:score", 0.0, False)],
)
def test_a_failed_reward_above_the_wrong_reward_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], function: str, failed: float, warned: bool
) -> None:
    reward = RewardConfig(function=function, wrong=-1.0, failed=failed, on_failure="value")
    Recorder(run_config(tmp_path, reward), 1, True).close()
    said = "warning: reward.failed=0 is above reward.wrong=-1: a response that hangs its scorer gets more"
    assert (said in capsys.readouterr().out) == warned


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"reward": RewardConfig(failed=-1.0)},
            "warning: reward.failed=-1 does nothing with reward.on_failure=leave_out: leave it out, or set",
        ),
        (
            {"data": DataConfig(Path("data.jsonl"), min_difficulty=0.25)},
            "warning: data.min_difficulty=0.25 leaves nothing out without data.difficulty: say there where",
        ),
        ({"data": DataConfig(Path("data.jsonl"), difficulty="level", max_difficulty=8)}, ""),
        (
            {"optimizer": OptimizerConfig(min_lr=1e-7)},
            "warning: optimizer.min_lr=1e-07 is where a decay ends",
        ),
        ({"optimizer": OptimizerConfig(min_lr=1e-7, decay="cosine")}, ""),
        ({"reward": RewardConfig(format_pattern=".*")}, "warning: reward.format_pattern changes no reward"),
        ({"reward": RewardConfig(format_pattern=".*", format_penalty=0.1)}, ""),
        ({"reward": RewardConfig(overlong_tokens=9)}, "warning: reward.overlong_tokens=9 changes no reward"),
        ({"reward": RewardConfig(overlong_tokens=9, overlong_penalty=0.1)}, ""),
        ({"evaluation": EvaluationConfig(5, ("s",), 4, 0.0)}, "warning: evaluation.samples=4 responses to a"),
        ({"evaluation": EvaluationConfig(0, ("s",), 4, 0.0)}, ""),
        ({"evaluation": EvaluationConfig(5, ("s",), 1, 0.0)}, ""),
        (
            {"algorithm": AlgorithmConfig(bounds=balanced(), loss_mean="sequence")},
            "warning: algorithm.loss_mean=sequence gives positive tokens half of the gradient at ratios of "
            "1, and algorithm.bounds.target=0.4 is no more: a search over an update has nothing to balance (",
        ),
        (
            {"algorithm": AlgorithmConfig(bounds=paper(), loss_mean="sequence")},
            "nothing to balance, and those of its parts move by which responses they see (docs",
        ),
        ({"algorithm": AlgorithmConfig(bounds=replace(paper(), target=0.6), loss_mean="sequence")}, ""),
        ({"algorithm": AlgorithmConfig(bounds=grpo(), loss_mean="sequence")}, ""),
        ({"algorithm": AlgorithmConfig(bounds=published_code(), loss_mean="sequence")}, ""),
        ({"algorithm": AlgorithmConfig(loss="gspo", loss_mean="sequence")}, ""),
        (
            {"algorithm": AlgorithmConfig(polarity=PapoConfig(enabled=True), loss_mean="sequence")},
            "",
        ),
    ],
)
def test_a_setting_that_does_nothing_is_warned_of(
    change: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Recorder(replace(run_config(tmp_path, RewardConfig()), **change), 1, True).close()
    out = capsys.readouterr().out
    assert said in out
    assert ("warning:" in out) == bool(said)


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize(
    ("settings", "warned"),
    [((0.1, "k1"), True), ((0.1, "k2"), False), ((0.1, "k1", "reward"), False), ((0.0, "k1"), False)],
)
def test_a_penalty_that_holds_nothing_is_warned_of(
    settings: tuple[Any, ...], warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_config(tmp_path, RewardConfig())
    algorithm = AlgorithmConfig(reference_kl=ReferenceKlConfig(*settings))
    Recorder(replace(run, algorithm=algorithm), 1, True).close()
    said = "warning: algorithm.reference_kl.estimator=k1 in the loss has a gradient that does not depend on"
    assert (said in capsys.readouterr().out) == warned


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize(("logged", "goes_on"), [(None, False), (b"", False), (b"records", True)])
def test_a_start_says_whether_the_journal_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], logged: bytes | None, goes_on: bool
) -> None:
    """A run that was killed before its first checkpoint starts at step 1, and keeps what it had sampled."""
    if logged is not None:
        (tmp_path / "journal").mkdir()
        (tmp_path / "journal/segments-000001.log").write_bytes(logged)
    Recorder(run_config(tmp_path, RewardConfig()), 1, True).close()
    [event] = read_jsonl(tmp_path / "events.jsonl")
    assert (event["kind"], event.get("segments")) == ("start", "kept" if goes_on else None)
    kept = ", with the responses of its journal" if goes_on else ""
    assert re.search(rf": start at step 1 of \d+, processes: 1{kept}\n", capsys.readouterr().out)


@pytest.mark.usefixtures("one_process_group")
def test_an_evaluation_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for first_step in (1, 5):  # the second continues from the checkpoint of step 4
        recorder = Recorder(run_config(tmp_path, RewardConfig()), first_step, True)
        recorder.evaluation(4, {"eval/sums/avg@2": 0.5, "eval/mean": 0.5})
        recorder.close()
    assert capsys.readouterr().out.count("held-out problems after step 4: sums avg@2 50.0%\n") == 1


@pytest.mark.usefixtures("one_process_group")
def test_an_idle_search_is_an_event_and_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(run_config(tmp_path, RewardConfig()), 1, True)
    stale = {MOVED: 0.0, "bapo/contribution": 0.5}
    for step in (1, 2, 3):
        recorder.step(step, [stale] * 8, {"reward/mean": 0.0})
    recorder.close()
    [event] = [row for row in read_jsonl(tmp_path / "events.jsonl") if row["kind"] == "bounds_idle"]
    assert event["step"] == 2
    assert event["message"].startswith(
        "the bounds have not moved in the last 16 stale updates (steps 1 to 2)"
    )
    assert capsys.readouterr().out.count("note: the bounds have not moved") == 1


FRESH: Metrics = {MOVED: None, "bapo/contribution": 0.1}


def stale(moved: float = 0.0, share: float = 0.52) -> Metrics:
    return {MOVED: moved, "bapo/contribution": share}


def test_sixteen_stale_updates_without_a_move_give_one_notice() -> None:
    idle = IdleSearch(paper())
    assert [idle.observe(step, [FRESH, *[stale()] * 7]) for step in (1, 2)] == [None, None]
    assert idle.observe(3, [FRESH, *[stale(share=0.5)] * 2]) == (
        "the bounds have not moved in the last 16 stale updates (steps 1 to 3), in which this run equals "
        "fixed(0.6, 1.2), because positive tokens hold 0.52 of the gradient, above the target of 0.4 "
        "(docs/algorithm.md#which-preset)"
    )
    assert idle.observe(4, [stale()] * 100) is None
    below = IdleSearch(paper()).observe(1, [stale(share=0.25)] * 16)
    assert below is not None
    assert "because" not in below


@pytest.mark.parametrize(
    "updates",
    [
        [*[stale()] * 10, stale(1.0), *[stale()] * 20],
        [{"bapo/contribution": 0.5}] * 50,  # fixed bounds, or a loss without them
        [FRESH] * 50,
        [stale()] * 15,
    ],
)
def test_runs_whose_bounds_move_get_no_idle_notice(updates: list[Metrics]) -> None:
    assert IdleSearch(paper()).observe(1, updates) is None


@pytest.mark.parametrize("config", [paper(), BoundsConfig()])
def test_a_search_has_the_metric(config: BoundsConfig) -> None:
    assert MOVED in objective(config).metric_names()


def test_fixed_bounds_have_none() -> None:
    assert MOVED not in objective(fixed(0.8, 1.2)).metric_names()


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


def test_named_rewards_have_their_means() -> None:
    """A response without one of them counts 0 for it, an episode with branches once."""
    column = np.zeros(1, np.int32)
    rollouts = tuple(
        Rollout(column, column.astype(np.float32), column, "stop", 1.0, named_rewards=named, branch=branch)
        for branch, named in ((0, {"correct": 1.0, "format": 0.5}), (0, {}), (1, {}))
    )
    header = in_memory(Group(Prompt(0, column, "", ""), rollouts)).header
    found = step_metrics(header, [], StepClock(), [])
    assert (found["reward/named/correct"], found["reward/named/format"]) == (0.5, 0.25)
