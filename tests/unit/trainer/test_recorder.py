"""The row of a step: what its updates say together."""

from __future__ import annotations

import pytest

from bapo_megatron.algo.bapo import grpo
from bapo_megatron.trainer.records.recorder import StepClock, check_one_sign, step_metrics
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


def test_an_update_without_a_response_is_none() -> None:
    updates = [{"version": 1, "policy/tokens": 5.0}, {"version": 1, "policy/tokens": 0.0}]
    assert step_metrics(StepBatch((), {}), updates, StepClock(), NAMES)["policy/updates"] == 1


@pytest.mark.parametrize("name", ["staleness/mean", "staleness/max", "staleness/16+/entropy", "policy/loss"])
def test_a_step_without_updates_has_the_same_columns(name: str) -> None:
    assert name in NAMES
    assert step_metrics(StepBatch((), {}), [], StepClock(), NAMES)[name] is None


class OneSignNotes:
    """Stands for the recorder."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, str]] = []

    def one_sign(self, step: int, message: str) -> None:
        self.taken.append((step, message))


@pytest.mark.parametrize(
    ("shares", "noted"),
    [([0.9, 0.3], True), ([0.5, 0.5], False), ([0.9, None, 0.9], True), ([None], False), ([], False)],
)
def test_searches_that_balance_nothing_are_noted(shares: list[float | None], noted: bool) -> None:
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
