"""The gap between engine and trainer, and the check of it."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from bapo_megatron.algo.measurements import gap_metrics, gap_sums
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.errors import ConfigError, GapError
from bapo_megatron.trainer import checks as mismatch

MEAN, MAX = "rollout/engine_gap_mean", "rollout/engine_gap_max"


def gaps(*values: float) -> dict[str, float | None]:
    """Metrics of tokens whose trainer's log-prob is that much above the engine's."""
    engine = torch.full((len(values),), -2.0, dtype=torch.float64)
    every = torch.ones(len(values), dtype=torch.bool)
    return gap_metrics(gap_sums(engine + torch.tensor(values, dtype=torch.float64), engine, every))


def test_mean_and_maximum_by_hand() -> None:
    """The largest is 0.3 = 2^-1.737, in the bin that ends at 2^-1.5; signs do not matter; a nan shows."""
    assert gaps(0.1, -0.3, 0.0) == {MEAN: pytest.approx(0.4 / 3), MAX: pytest.approx(2**-1.5)}
    assert gaps(0.1, math.nan) == {MEAN: pytest.approx(math.nan, nan_ok=True), MAX: math.inf}


@pytest.mark.parametrize(
    ("gap", "told"),
    [(0.0, 2**-20), (2**-21, 2**-20), (0.5, 0.5), (0.5000001, 2**-0.75), (32.0, 32.0), (33.0, math.inf)],
)
def test_a_maximum_is_the_upper_edge_of_its_bin(gap: float, told: float) -> None:
    """A bin is 19 % wide."""
    assert gaps(gap, gap / 2)[MAX] == told


def test_only_the_tokens_of_the_present_weights_count() -> None:
    log_prob, engine = torch.tensor([-1.0, -1.0, math.nan]), torch.tensor([-1.25, -9.0, -1.0])
    sums = gap_sums(log_prob, engine, torch.tensor([True, False, False]))
    assert gap_metrics(sums) == {MEAN: 0.25, MAX: 0.25}
    nothing = gap_sums(log_prob, engine, torch.zeros(3, dtype=torch.bool))
    assert not nothing.any()
    assert gap_metrics(nothing) == {MEAN: None, MAX: None}


# The first update of a step alone has tokens of the present weights.
UPDATES = [{MEAN: 0.06, MAX: 0.8}, {MEAN: None, MAX: None}]


@pytest.mark.parametrize(
    ("limits", "updates", "says"),
    [
        ({}, UPDATES, "engine_gap_mean is 0.06 nats, above algorithm.gap_mean_limit=0.05"),
        (
            {"gap_mean_limit": None, "gap_max_limit": 0.5},
            UPDATES,
            "engine_gap_max is 0.8 nats, above algorithm.gap_max_limit=0.5",
        ),
        ({"gap_mean_limit": 1e9}, [{MEAN: math.nan, MAX: math.inf}], "engine_gap_mean is nan"),
        ({"gap_mean_limit": 0.06, "gap_max_limit": 0.8}, UPDATES, None),  # at a limit, or without one
        ({"gap_max_limit": 1e-9}, UPDATES[1:], None),  # without tokens
    ],
)
def test_a_gap_above_its_limit_is_noted(limits: Any, updates: Any, says: str | None) -> None:
    notes = Mock()
    mismatch.check_engine_gap(AlgorithmConfig(**limits), 7, updates, notes)
    mismatch.check_engine_gap(AlgorithmConfig(**limits), 7, updates, None)  # the other ranks
    assert notes.engine_gap.call_count == (says is not None)
    for (step, message, action), _ in notes.engine_gap.call_args_list:
        assert (step, action) == (7, "warn")
        assert f"rollout/{says}" in message


@pytest.mark.parametrize("main", [True, False])
def test_stop_raises_on_every_rank_once_recorded(main: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    notes, waited = Mock(), []
    monkeypatch.setattr(mismatch, "barrier", lambda: waited.append(notes.engine_gap.call_count))
    with pytest.raises(GapError, match=r"step 7.*gap_mean_limit=0.05.*algorithm.on_gap=warn") as caught:
        mismatch.check_engine_gap(AlgorithmConfig(on_gap="stop"), 7, UPDATES, notes if main else None)
    assert waited == [int(main)]  # it waits with the others once it has written
    assert isinstance(caught.value, ConfigError)  # exit code 2: to start again unchanged does not help


@pytest.mark.parametrize(
    ("gap", "limit", "is_first", "stops"),
    [
        (0.51, 0.05, True, True),
        (0.51, 0.05, False, False),  # later it may have grown, which is a warning
        (0.5, 0.05, True, False),
        (0.51, 0.6, True, None),  # known to the user
        (0.51, 0.53, True, False),  # the first one is
        (math.nan, 0.05, True, True),
    ],
)
def test_colocated_engines_that_begin_with_other_weights_stop_the_run(
    gap: float, limit: float, is_first: bool, stops: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first gap of the step that could be measured counts."""
    monkeypatch.setattr(mismatch, "barrier", lambda: None)
    notes, config = Mock(), AlgorithmConfig(gap_mean_limit=limit, gap_max_limit=10.0)
    updates = [{MEAN: None, MAX: None}, {MEAN: gap, MAX: 1.0}, {MEAN: 0.55, MAX: 9.0}]
    ends = pytest.raises(
        GapError, match=r"step 7: .*above 0.5 in the first step of colocated engines.*weights"
    )
    with ends if stops else nullcontext():
        mismatch.check_engine_gap(config, 7, updates, notes, is_first)
    taken = [action for (_, _, action), _ in notes.engine_gap.call_args_list]
    assert taken == {True: ["stop"], False: ["warn"], None: []}[stops]
