"""What a resumed run continues with: differences that are accepted by name, and its number of threads."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.checkpoint.reader import Checkpoint
from bapo_megatron.config import RunConfig, load_recipe
from bapo_megatron.errors import ResumeError
from bapo_megatron.rollout.sampler import client
from bapo_megatron.runtime.event_kinds import event_text, is_trouble
from bapo_megatron.trainer import resume
from bapo_megatron.trainer.build import open_engines
from tests.support.forked_commands import ROOT
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


@pytest.mark.integration
def test_a_new_sampler_takes_the_runs_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed alone, in a run whose environment gives the next process another number."""
    monkeypatch.setattr(client, "_SERVICE", "tests.support.threads_service")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    run = replace(load_recipe(ROOT / "recipes/demo_cpu.py", RunConfig), run_dir=tmp_path, threads=1)
    kinds: list[str] = []
    with open_engines(run, lambda event: kinds.append(event["kind"])) as (sampler, _):
        sampler.start(1, None)
        first = sampler.state()
        os.kill(first["pid"], signal.SIGKILL)
        second = sampler.state()
    assert kinds == ["sampler_died"]
    assert first["pid"] != second["pid"]
    assert (first["threads"], second["threads"]) == (1, 1)
