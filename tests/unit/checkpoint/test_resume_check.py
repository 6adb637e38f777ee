"""The resume check: which differences between a checkpoint's fingerprint and the present one count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.checkpoint.resume_check import Fingerprint, fingerprint_differences
from bapo_megatron.config import DataConfig, ModelConfig, RunConfig

STORED: Fingerprint = {
    "layout": {"tensor": 1, "processes": 1},
    "version": 8,
    "canary": [-100.0, 50.0],
    "optimizer": [1.0, 2.0],
    "learning_rate": 1e-6,
    "sampler": {"taken": 10, "served": 4, "next_number": 12},
}
CLOSE = [-100.0 * (1 + 5e-6), 50.0]
OTHER_LAYOUT = {"tensor": 2, "processes": 2}


def found(allow_change: tuple[str, ...] = (), **changed: Any) -> list[str]:
    model = ModelConfig(Path("m"), dtype="float32")
    config = RunConfig("test", model, DataConfig(Path("d")), allow_change=allow_change)
    return fingerprint_differences(config, STORED, {**STORED, **changed})


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_the_same_state_passes_and_the_sampler_may_be_ahead() -> None:
    assert found() == []
    assert found(sampler={"taken": 11, "served": 5, "next_number": 12}) == []


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"version": 9}, "version of the policy: 8 in the checkpoint, 9 now"),
        ({"canary": CLOSE}, "log-probs of the canary"),
        ({"optimizer": [1.0, 2.1]}, "digest of the optimizer: [1.0, 2.0] in the checkpoint, [1.0, 2.1] now"),
        ({"learning_rate": 2e-6}, "learning rate: 1e-06 in the checkpoint, 2e-06 now"),
        (
            {"sampler": {**STORED["sampler"], "served": 3}},
            "the sampler's served, at least: 4 in the checkpoint",
        ),
    ],
)
def test_each_difference_has_a_line(changed: dict[str, Any], line: str) -> None:
    [told] = found(**changed)
    assert told.startswith(line)


def test_another_layout_compares_to_rounding_and_no_digest() -> None:
    assert found(layout=OTHER_LAYOUT, canary=CLOSE, optimizer=[7.0]) == []
    assert found(layout=OTHER_LAYOUT, canary=[-100.1, 50.0]) != []


def test_a_learning_rate_that_was_allowed_to_change_may_differ() -> None:
    assert found(("optimizer.lr",), learning_rate=2e-6) == []
    assert len(found(("seed",), learning_rate=2e-6)) == 1
