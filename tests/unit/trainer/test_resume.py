"""What a resumed run continues with: differences that are accepted by name, and its number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bapo_megatron.checkpoint.reader import Checkpoint
from bapo_megatron.checkpoint.run_directory import store_config
from bapo_megatron.config import RunConfig, load_recipe
from bapo_megatron.errors import ResumeError
from bapo_megatron.runtime.event_kinds import event_text, is_trouble
from bapo_megatron.trainer import resume
from tests.support.forked_commands import ROOT
from tests.support.small_steps import run_config

FOUND = {"canary": "log-probs of the canary: 0.3", "weights": "bits of the weights: aa, bb now"}


@pytest.fixture(autouse=True)
def _differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "broadcast_from_main", lambda value: value)
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
    ("stored", "changed", "threads", "kind"),
    [
        (None, {}, 3, None),  # a new run takes the environment's
        (2, {}, 2, "threads_kept"),  # a resumed run keeps its own
        (2, {"threads": 1}, 1, None),  # a configured number wins
    ],
)
def test_number_of_threads(
    config: RunConfig, stored: int | None, changed: dict[str, Any], threads: int, kind: str | None
) -> None:
    if stored is not None:
        store_config(replace(config, threads=stored))
    pinned, event = _pinned(replace(config, **changed))
    assert pinned.threads == torch.get_num_threads() == threads
    assert (event and (event["kind"], event["threads"], event["environment"])) == (
        kind and (kind, threads, 3)
    )


def test_a_gpu_takes_a_configured_number_alone(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "has_cuda", lambda: True)
    assert _pinned(config) == (config, None)
    assert _pinned(replace(config, threads=1))[0].threads == torch.get_num_threads() == 1
