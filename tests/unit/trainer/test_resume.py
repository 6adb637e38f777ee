"""What a resumed run continues with: differences that are accepted by name, and its number of threads."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bapo_megatron.checkpoint.reader import Checkpoint
from bapo_megatron.checkpoint.run_directory import store_config
from bapo_megatron.config import DataConfig, ModelConfig, ParallelConfig, RunConfig, load_recipe
from bapo_megatron.errors import ConfigError, ResumeError
from bapo_megatron.rollout.sampler import client
from bapo_megatron.runtime.event_kinds import event_text, is_trouble
from bapo_megatron.trainer import resume
from bapo_megatron.trainer.build import open_engines
from tests.support.forked_commands import ROOT

FOUND = {"canary": "log-probs of the canary: 0.3", "weights": "bits of the weights: aa, bb now"}


@pytest.fixture(autouse=True)
def _differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "broadcast_from_main", lambda value: value)
    monkeypatch.setattr(resume, "state_fingerprint", lambda *_: {})
    monkeypatch.setattr(resume, "fingerprint_differences", lambda *_: FOUND)


def events(*accepted: str, certificate: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    config = RunConfig("test", ModelConfig(Path("m")), DataConfig(Path("d")), accept_resume_mismatch=accepted)
    trainer = {"certificate": {"state": {}} if certificate is None else certificate}
    saved = Checkpoint(Path("run/checkpoints/step_000004"), (4, 0), trainer)
    return resume.check_restored(config, None, None, saved)  # type: ignore[arg-type]


def test_a_resume_mismatch_is_refused_with_the_flag_that_accepts_it() -> None:
    with pytest.raises(ResumeError, match="the loaded state differs from the saved state") as refusal:
        events()
    assert str(refusal.value).splitlines() == [
        "resume check of run/checkpoints/step_000004 failed, the loaded state differs from the saved state:",
        "log-probs of the canary: 0.3",
        "bits of the weights: aa, bb now",
        "if you know why and want to train on the loaded state: "
        "--accept-resume-mismatch step_000004:canary step_000004:weights",
    ]


def test_an_accepted_resume_mismatch_is_an_event() -> None:
    assert events("step_000004:weights", "step_000004:canary") == [
        {"kind": "resume_mismatch_accepted", "checkpoint": "step_000004", "differences": FOUND}
    ]


def test_a_damaged_checkpoint_that_was_passed_over_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads `bapo status`, and not the log, learns that steps are made again, and why."""
    monkeypatch.setattr(resume, "fingerprint_differences", lambda *_: {})
    config = RunConfig("test", ModelConfig(Path("m")), DataConfig(Path("d")))
    why = "run/checkpoints/step_000006: trainer.json is missing"
    trainer = {"certificate": {"state": {}}}
    saved = Checkpoint(Path("run/checkpoints/step_000004"), (4, 0), trainer, (why,))
    [event] = resume.check_restored(config, None, None, saved)  # type: ignore[arg-type]
    assert event == {"kind": "checkpoint_damaged", "checkpoint": "step_000004", "message": why}
    assert is_trouble(event)
    assert why in event_text(event)


@pytest.mark.parametrize("accepted", ["step_000004:canary", "step_000004:optimizer"])
def test_every_resume_mismatch_must_be_accepted_by_name(accepted: str) -> None:
    with pytest.raises(ResumeError, match="bits of the weights"):
        events(accepted)


def test_a_flag_that_was_left_on_accepts_nothing_of_a_later_checkpoint() -> None:
    with pytest.raises(ResumeError, match="log-probs of the canary: 0.3\nbits of the weights: aa, bb now"):
        events("step_000002:canary", "step_000002:weights")


def test_a_checkpoint_without_digests_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "fingerprint_differences", lambda *_: {})
    [event] = events(certificate={"canary": [1.0]})
    assert event["kind"] == "resume_check"
    assert "not compared bit by bit" in event["message"]
    assert events() == []


def test_names_have_the_form_that_the_check_prints() -> None:
    config = RunConfig("test", ModelConfig(Path("m")), DataConfig(Path("d")))
    for name in ("canary", "step_000004", "step_000004:all"):
        with pytest.raises(ConfigError, match=f"accept_resume_mismatch={name}: must be CHECKPOINT:NAME"):
            RunConfig(**{**vars(config), "accept_resume_mismatch": (name,)}).check()
    RunConfig(**{**vars(config), "accept_resume_mismatch": ("step_000002_update_003:canary",)}).check()


@pytest.fixture(autouse=True)
def present(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One process, whose environment gives three threads; its own number comes back."""
    before = torch.get_num_threads()
    monkeypatch.setattr(resume, "broadcast_from_main", lambda value: value)
    monkeypatch.setattr(resume, "is_main", lambda: True)
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def _pinned(config: RunConfig) -> tuple[RunConfig, dict[str, Any] | None]:
    return resume.pin_threads(config, resume.read_begun(config.directory))


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A run that begins."""
    return replace(load_recipe(ROOT / "recipes/demo_cpu.py", RunConfig), run_dir=tmp_path)


@pytest.mark.parametrize(
    ("stored", "configured", "threads", "kept"),
    [(None, None, 3, False), (2, None, 2, True), (2, 1, 1, False)],
    ids=["a new run takes the environment's", "a resumed run keeps its own", "a configured number wins"],
)
def test_number_of_threads(
    config: RunConfig, stored: int | None, configured: int | None, threads: int, kept: bool
) -> None:
    if stored is not None:
        store_config(replace(config, threads=stored))
    pinned, event = _pinned(replace(config, threads=configured))
    assert pinned.threads == torch.get_num_threads() == threads
    assert (event is not None) == kept
    if event is not None:
        assert (event["kind"], event["threads"], event["environment"]) == ("threads_kept", 2, 3)


def test_another_layout_takes_the_environments_number_of_threads(config: RunConfig) -> None:
    store_config(replace(config, threads=2))
    pinned, event = _pinned(replace(config, parallel=ParallelConfig(pipeline=2)))
    assert pinned.threads == torch.get_num_threads() == 3
    assert event is not None
    assert (event["kind"], event["threads"], event["environment"]) == ("threads_anew", 3, 3)
    assert "3 threads a rank, and not 2 as when the run began" in event["message"]


@pytest.mark.parametrize("parallel", [ParallelConfig(timeout_minutes=30), ParallelConfig(data=1)])
def test_an_equal_layout_keeps_the_number_of_threads(config: RunConfig, parallel: ParallelConfig) -> None:
    store_config(replace(config, threads=2))
    assert _pinned(replace(config, parallel=parallel))[0].threads == torch.get_num_threads() == 2


def test_more_replicas_are_another_layout(config: RunConfig) -> None:
    store_config(replace(config, threads=2, parallel=ParallelConfig(data=1)))
    assert _pinned(replace(config, parallel=ParallelConfig(data=2)))[0].threads == 3


def test_on_a_gpu_only_a_configured_number_of_threads_is_set(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "has_cuda", lambda: True)
    assert _pinned(config) == (config, None)
    assert _pinned(replace(config, threads=1))[0].threads == torch.get_num_threads() == 1


@pytest.mark.integration
def test_a_sampler_that_is_started_again_takes_the_runs_number(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed alone, in a run whose environment gives the next process another number."""
    monkeypatch.setattr(client, "_SERVICE", "tests.support.threads_service")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    config, _ = _pinned(config)
    events: list[dict[str, Any]] = []
    with open_engines(config, events.append) as (sampler, _):
        sampler.start(1, None)
        first = sampler.state()
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        os.kill(first["pid"], signal.SIGKILL)
        second = sampler.state()
    assert [event["kind"] for event in events] == ["sampler_died"]
    assert first["pid"] != second["pid"]
    assert (first["threads"], second["threads"]) == (1, 1)
