"""The state that a resumed run continues with: differences, and which of them are accepted by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.checkpoint.reader import Checkpoint
from bapo_megatron.errors import ResumeError
from bapo_megatron.runtime.event_kinds import event_text, is_trouble
from bapo_megatron.trainer import resume
from tests.support.small_steps import run_config

pytestmark = pytest.mark.usefixtures("one_process_group")

FOUND = {"canary": "log-probs of the canary: 0.3", "weights": "bits of the weights: aa, bb now"}


@pytest.fixture(autouse=True)
def _differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "state_fingerprint", lambda *_: {})
    monkeypatch.setattr(resume, "fingerprint_differences", lambda *_: FOUND)


def events(
    *accepted: str, certificate: dict[str, Any] | None = None, passed_over: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    trainer = {"certificate": {"state": {}} if certificate is None else certificate}
    saved = Checkpoint(Path("run/checkpoints/step_000004"), (4, 0), trainer, passed_over)
    return resume.check_restored(run_config(accept_resume_mismatch=accepted), None, None, saved)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("accepted", "told"),
    [
        ((), ["canary", "weights"]),
        (("step_000004:canary",), ["weights"]),
        (("step_000004:optimizer",), ["canary", "weights"]),
        (("step_000002:canary", "step_000002:weights"), ["canary", "weights"]),  # left on since then
    ],
)
def test_a_mismatch_is_refused_with_its_flag(accepted: tuple[str, ...], told: list[str]) -> None:
    with pytest.raises(ResumeError, match="check of run/checkpoints/step_000004 failed") as refusal:
        events(*accepted)
    _, *lines, flag = str(refusal.value).splitlines()
    assert lines == [FOUND[name] for name in told]
    assert flag.endswith(" --accept-resume-mismatch step_000004:canary step_000004:weights")


def test_a_checkpoint_passed_over_or_without_digests_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads `bapo status`, and not the log, learns that steps are made again, and why."""
    monkeypatch.setattr(resume, "fingerprint_differences", lambda *_: {})
    why = "run/checkpoints/step_000006: trainer.json is missing"
    [event] = events(passed_over=(why,))
    assert event == {"kind": "checkpoint_damaged", "checkpoint": "step_000004", "message": why}
    assert is_trouble(event)
    assert why in event_text(event)
    [event] = events(certificate={"canary": [1.0]})
    assert event["kind"] == "resume_check"
    assert "are not compared" in event["message"]
    assert events() == []
