"""Accepting what the resume check has found: by name, for one checkpoint, on record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.checkpoint.reader import Checkpoint
from bapo_megatron.config import DataConfig, ModelConfig, RunConfig
from bapo_megatron.errors import ConfigError, ResumeError
from bapo_megatron.runtime.event_kinds import event_text, is_trouble
from bapo_megatron.trainer import resume

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
