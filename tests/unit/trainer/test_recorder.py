"""The row of a step: what its updates say together."""

from __future__ import annotations

import pytest

from bapo_megatron.algo.bapo import grpo
from bapo_megatron.trainer.recorder import StepClock, step_metrics
from bapo_megatron.types import StepBatch
from tests.support.bapo_objective import objective

NAMES = objective(grpo()).metric_names()


def test_a_step_has_the_means_of_its_updates_and_of_maxima_the_largest() -> None:
    gap, clipped = "rollout/engine_gap_max", "staleness/8-15/clipped"
    updates = [
        {"epoch": 0, "version": 1, "policy/kl": 1.0, "staleness/max": 3, gap: 0.25, clipped: None},
        {"epoch": 1, "version": 2, "policy/kl": 2.0, "staleness/max": 7, gap: None, clipped: 0.5},
    ]
    row = step_metrics(StepBatch((), {"rollout/tokens": 9.0}), updates, StepClock(), NAMES)
    assert row["policy/kl"] == 1.5
    assert row["staleness/max"] == 7
    assert row[clipped] == 0.5
    assert row[gap] == 0.25
    assert row["policy/updates"] == 2
    assert "version" not in row


@pytest.mark.parametrize("name", ["staleness/mean", "staleness/max", "staleness/16+/entropy", "policy/loss"])
def test_a_step_without_updates_has_the_same_columns(name: str) -> None:
    assert name in NAMES
    assert step_metrics(StepBatch((), {}), [], StepClock(), NAMES)[name] is None
