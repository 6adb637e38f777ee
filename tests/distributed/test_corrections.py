"""Corrections and a loss of sequences at every layout: the same are rejected, the rest trains alike."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from bapo_megatron.algo.corrections import CorrectionsConfig
from bapo_megatron.config import AlgorithmConfig, ParallelConfig
from bapo_megatron.hf.reader import HfReader
from bapo_megatron.types import Metrics
from tests.distributed.test_old_log_probs import Answer, answer
from tests.support.metrics import known
from tests.support.tiers import slow_but
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed

ONE = ParallelConfig()
GSPO = AlgorithmConfig(
    loss="gspo",
    loss_mean="sequence",
    old_log_probs="trainer",
    importance_cap=1.5,
    importance_level="sequence",
    corrections=CorrectionsConfig(geometric_min=0.7, geometric_max=1.6, off_policy_delta=0.05),
    reuse_epochs=2,
    updates_per_epoch=2,
)
"""Two passes over six groups of two: both masks reject some, and GSPO clips some."""
NOTHING = dataclasses.replace(
    GSPO, corrections=CorrectionsConfig(worst_token_min=0.999999, worst_token_max=1.000001), reuse_epochs=1
)
"""Every response is rejected in every update."""


@pytest.fixture(scope="module")
def alone(qwen2: Path) -> Answer:
    [found] = run_layout(answer, ONE, qwen2, ONE, GSPO)
    assert isinstance(found, Answer)
    return found


def rejected(rows: list[Metrics]) -> list[float | None]:
    return [row["corrections/rejected_responses"] for row in rows]


@pytest.mark.slow
def test_both_masks_and_the_clipping_do_something(alone: Answer) -> None:
    """Or the comparison below would compare updates in which nothing happens."""
    shares = rejected(alone.metrics)
    assert all(share is not None and 0 < share < 1 for share in shares), shares
    clipped = [row["bapo/clip_fraction_high"] + row["bapo/clip_fraction_low"] for row in alone.metrics]  # type: ignore[operator]
    assert max(clipped) > 0
    assert all(0 < row["corrections/weight"] <= 1.5 for row in alone.metrics)  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(data=3),
        ParallelConfig(context=2),
        ParallelConfig(tensor=2, sequence=True, pipeline=2),
    ],
    ids=["dp3", "cp2", "tp2-sp-pp2"],
)
def test_every_layout_makes_the_same_updates(parallel: ParallelConfig, qwen2: Path, alone: Answer) -> None:
    for ours in run_layout(answer, parallel, qwen2, parallel, GSPO):
        assert rejected(ours.metrics) == rejected(alone.metrics)
        for row, expected in zip(ours.metrics, alone.metrics, strict=True):
            assert known(row) == pytest.approx(known(expected), rel=1e-4, abs=1e-5)
        for name, tensor in ours.weights.items():
            torch.testing.assert_close(tensor, alone.weights[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parallel", slow_but([ONE, ParallelConfig(data=2)], ONE), ids=["one", "dp2"])
def test_updates_that_are_rejected_whole_change_nothing(parallel: ParallelConfig, qwen2: Path) -> None:
    before = HfReader(qwen2)
    for ours in run_layout(answer, parallel, qwen2, parallel, NOTHING):
        assert [row["policy/tokens"] for row in ours.metrics] == [0.0, 0.0]
        assert [row["version"] for row in ours.metrics] == [0, 0]
        assert rejected(ours.metrics) == [1.0, 1.0]
        for name, tensor in ours.weights.items():
            assert torch.equal(tensor, before.read(name))
