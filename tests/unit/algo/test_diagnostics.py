"""The diagnostics of an update, also by source: numbers by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from bapo_megatron.algo.bapo import BoundsConfig, fixed, grpo, published_code
from bapo_megatron.algo.diagnostics import (
    AGE_METRICS,
    BUCKETS,
    QUADRANTS,
    age_metrics,
    bucket_of,
    diagnostic_metrics,
    diagnostic_sums,
)
from bapo_megatron.algo.losses.clip import ClipLoss
from bapo_megatron.algo.measurements import PackView
from bapo_megatron.algo.objective import Objective
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.tensor_types import MicroBatch, TokenStats
from bapo_megatron.types import Metrics, VersionSpan
from tests.support.bapo_objective import metric_names
from tests.unit.algo.test_objective import pack

LN = math.log


def sums_of(stats: TokenStats, batch: MicroBatch, config: BoundsConfig, version: int) -> torch.Tensor:
    """Of BAPO's loss at fixed bounds."""
    loss = ClipLoss(AlgorithmConfig(bounds=config))
    terms = loss.terms(stats, batch, loss.search.known)
    return diagnostic_sums(PackView(stats, batch, terms, loss.search.known, version))


# At pi = 1/2 with entropy 1, log pi + H = 1 - ln 2 > 0: a likely token. At 1/4 it is 1 - 2 ln 2 < 0.
# Ratios: 1, 1, 2.25 (clipped above 1.2) and 0.55 (clipped below 0.8). The fifth token does not count.
BATCH = pack(
    [1.0, -2.0, 3.0, -1.0, 9.0],
    [LN(1 / 2), LN(1 / 4), LN(1 / 9), LN(1 / 1.1), -1.0],
    [1.0, 0.5, 1.0, 1.0, 0.0],
    [5, 5, 3, 3, 0],
)
STATS = TokenStats(
    torch.tensor([LN(1 / 2), LN(1 / 4), LN(1 / 4), LN(1 / 2), math.nan]),
    torch.tensor([1.0, 1.0, 1.0, 1.0, math.nan]),
)


def test_every_metric_of_four_tokens_by_hand() -> None:
    """One token in each quadrant; the first two have a gradient, with masses 1 and 0.5 * 2 = 1.

    Effects: -(1)(1 - ln 2) and -(-1)(1 - 2 ln 2). Covariance of x = log pi = -(1, 2, 2, 1) ln 2 and
    y = A X = (1, -2, 0, 0): mean xy = (-1 + 4) ln 2 / 4, mean x = -1.5 ln 2, mean y = -1/4.
    """
    metrics = diagnostic_metrics(sums_of(STATS, BATCH, grpo(), version=5))
    for quadrant in QUADRANTS:
        clipped = float(quadrant in ("positive_low", "negative_high"))
        assert metrics[f"quadrant/{quadrant}/tokens"] == 0.25
        assert metrics[f"quadrant/{quadrant}/clipped"] == clipped
        assert metrics[f"quadrant/{quadrant}/contribution"] == pytest.approx(0.5 - clipped / 2)
    first, second = -(1 - LN(2)), 1 - 2 * LN(2)
    expected = {
        "entropy_rule/covariance": (0.75 - 1.5 / 4) * LN(2),
        "entropy_rule/effect": (first + second) / 4,
        "polarity/expanding_tokens": 0.5,
        "polarity/expanding_contribution": 0.0,
        "polarity/expanding_effect": 0.0,
        "polarity/contracting_effect": (first + second) / 4,
        "staleness/0/effect": (first + second) / 2,
        "staleness/0/covariance": (3 / 2 - 1.5 / 2) * LN(2),
        "staleness/0/clipped_positive_high": 0.0,
        "staleness/0/clipped_positive_low": None,
        "staleness/2-3/clipped_positive_low": 1.0,
        "staleness/2-3/clipped_negative_high": 1.0,
        "staleness/2-3/effect": 0.0,
        "staleness/16+/effect": None,
        "ratio/0.98-1.02/tokens": 0.5,
        "ratio/0.98-1.02/probability": 3 / 8,
        "ratio/0.98-1.02/entropy": 1.0,
        "ratio/2.0-3.0/tokens": 0.25,
        "ratio/2.0-3.0/probability": 1 / 4,
        "ratio/0.5-0.6/probability": 1 / 2,
        "ratio/below_0.5/tokens": 0.0,
        "ratio/below_0.5/entropy": None,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_a_live_token_in_an_expanding_quadrant() -> None:
    """A rewarded unlikely token: effect -(2)(ln 1/4 + 1) > 0; a punished likely one: (1)(ln 1/2 + 1) > 0."""
    batch = pack([2.0, -1.0], [LN(1 / 4), LN(1 / 2)], [1.0, 1.0], [0, 0])
    stats = TokenStats(batch.old_log_prob_T, torch.ones(2))
    metrics = diagnostic_metrics(sums_of(stats, batch, grpo(), 0))
    assert metrics["polarity/expanding_tokens"] == 1.0
    assert metrics["polarity/expanding_contribution"] == 1.0
    assert metrics["polarity/contracting_effect"] == pytest.approx(0.0, abs=1e-12)
    assert metrics["entropy_rule/effect"] == pytest.approx((2 * (LN(4) - 1) + (1 - LN(2))) / 2)


def test_a_dual_clip_takes_the_gradient_away() -> None:
    """A = -1 at r = 4 beyond the dual clip of 3: it has no mass. Without it the mass is 4."""
    batch = pack([-1.0], [LN(1 / 8)], [1.0], [0])
    stats = TokenStats(torch.tensor([LN(1 / 2)]), torch.ones(1))
    single = sums_of(stats, batch, fixed(0.8, 1.2), 0)
    assert diagnostic_metrics(single)["entropy_rule/effect"] == pytest.approx(4 * (1 - LN(2)))
    dual = dataclasses.replace(fixed(0.8, 1.2), dual_clip=published_code().dual_clip)
    metrics = diagnostic_metrics(sums_of(stats, batch, dual, 0))
    assert metrics["entropy_rule/effect"] == 0.0
    assert metrics["quadrant/negative_high/clipped"] == 0.0  # as in bapo/clip_fraction_low


def ages(groups: Sequence[Sequence[np.ndarray]], version: int, step_version: int) -> Metrics:
    return age_metrics([[VersionSpan.of(one) for one in group] for group in groups], version, step_version)


def test_the_three_parts_by_hand() -> None:
    """Trained at version 12 in a step that began at 10.

    First group: versions 6, 8 and 9, newest 9. Reuse 2 each; queue 1 each; segment 3, 1, 0. Total 6, 4, 3.
    Second group: version 10 once. Reuse 2, queue 0, segment 0. Total 2.
    """
    groups = [[np.array([6, 8], np.int32), np.array([9], np.int32)], [np.array([10], np.int32)]]
    assert ages(groups, version=12, step_version=10) == {
        "staleness/mean": 15 / 4,
        "staleness/max": 6,
        "staleness/reuse_mean": 2,
        "staleness/queue_mean": 3 / 4,
        "staleness/segment_mean": 1,
    }


def test_the_newest_version_is_that_of_the_group_and_not_of_the_response() -> None:
    """A response of version 3 beside one of version 5: what it waited for its group is the segment's age."""
    together = ages([[np.array([3]), np.array([5])]], 5, 5)
    apart = ages([[np.array([3])], [np.array([5])]], 5, 5)
    assert (together["staleness/segment_mean"], together["staleness/queue_mean"]) == (1, 0)
    assert (apart["staleness/segment_mean"], apart["staleness/queue_mean"]) == (0, 1)
    assert together["staleness/mean"] == apart["staleness/mean"] == 1


def test_without_tokens_there_is_no_staleness() -> None:
    nothing = dict.fromkeys(AGE_METRICS)
    assert ages([], 5, 4) == nothing
    assert ages([[np.zeros(0, np.int32)], []], 5, 4) == nothing


@pytest.mark.parametrize(
    ("staleness", "bucket"),
    [
        *((-2, "0"), (0, "0"), (1, "1"), (2, "2-3"), (3, "2-3"), (4, "4-7"), (7, "4-7")),
        *((8, "8-15"), (15, "8-15"), (16, "16+"), (1000, "16+")),
    ],
)
def test_edges_of_the_buckets(staleness: int, bucket: str) -> None:
    assert BUCKETS[int(bucket_of(torch.tensor(staleness)))] == bucket


SOURCES = ("sums", "words")

# Sequences 0 and 2 are of `sums`, 1 of `words`, 3 of no source; the last token does not count.
SOURCE_PACK = dataclasses.replace(
    MicroBatch.of(
        (0, 6),
        sequences=4,
        mask_T=torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0]),
        weight_T=torch.tensor([1.0, 1.0, 2.0, 0.5, 1.0, 0.0]),
        advantage_T=torch.tensor([2.0, -1.0, 3.0, -4.0, 1.0, 9.0]),
        sequence_T=torch.tensor([0, 0, 2, 1, 3, -1]),
    ),
    sources=(0, 1, 0, -1),
)
SOURCE_STATS = TokenStats(
    torch.tensor([LN(2.0), LN(0.5), 0.0, LN(1.1), 0.0, 50.0]), torch.tensor([0.3, 0.5, 0.4, 0.7, 0.1, 99.0])
)


def measured(pack: MicroBatch, names: tuple[str, ...] = SOURCES) -> Metrics:
    objective = Objective(ClipLoss(AlgorithmConfig(bounds=grpo())), names)
    found = objective.loss.search.known
    return objective.metrics(objective.token_fn(found, 0)(SOURCE_STATS, pack), found)


def test_metrics_by_source_by_hand() -> None:
    """Bounds 0.8 and 1.2: of `sums` the first token (A = 2, r = 2) and the second (A = -1, r = 1/2) are
    clipped, the third (A = 3, r = 1, weight 2) has mass 6. `words`: A = -4, r = 1.1, weight 1/2: mass 2.2.
    The token without a source has mass 1: 9.2 in all. Without bounds `sums` has 4 + 6 positive and 0.5."""
    expected = {
        "policy/tokens": (3.0, 1.0, 0.0),
        "policy/entropy": (0.4, 0.7, None),
        "token_share": (3 / 5, 1 / 5, 0.0),
        "gradient_share": (6 / 9.2, 2.2 / 9.2, 0.0),
        "bapo/contribution": (1.0, 0.0, None),
        "bapo/contribution_unclipped": (10 / 10.5, 0.0, None),
        "bapo/clip_fraction_high": (1 / 3, 0.0, None),
        "bapo/clip_fraction_low": (1 / 3, 0.0, None),
        "bapo/positive_token_fraction": (2 / 3, 0.0, None),
    }
    metrics = measured(SOURCE_PACK, (*SOURCES, "absent"))
    found = {name: value for name, value in metrics.items() if name.startswith("source/")}
    assert len(found) == 3 * len(expected)
    for metric, values in expected.items():
        ours = [found[f"source/{source}/{metric}"] for source in (*SOURCES, "absent")]
        assert ours == [value if value is None else pytest.approx(value, abs=1e-6) for value in values]
    plain = Objective(ClipLoss(AlgorithmConfig(bounds=grpo())))
    assert not [name for name in metric_names(plain) if name.startswith("source/")]
