"""The staleness ledger: numbers worked out by hand, and a slow reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from bapo_megatron.algo.measurements.staleness import (
    AGE_METRICS,
    BUCKETS,
    age_metrics,
    bucket_metrics,
    bucket_sums,
)
from bapo_megatron.types import Metrics, VersionSpan


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


def test_large_versions_do_not_overflow() -> None:
    [mean, largest, *_] = ages([[np.zeros(3000, np.int32)]], 2**30, 0).values()
    assert mean == largest == 2**30


def test_buckets_by_hand() -> None:
    """Two tokens of age 1 (one clipped), one of 5; one more of age 1 does not count, whatever it holds."""
    sums = bucket_sums(
        torch.tensor([1, 5, 1, 1], dtype=torch.int32),
        torch.tensor([True, True, True, False]),
        torch.tensor([True, False, False, True]),
        torch.tensor([-0.5, 0.25, 0.1, math.nan]),
        torch.tensor([1.0, 3.0, 2.0, math.nan]),
    )
    metrics = bucket_metrics(sums)
    expected = {
        "staleness/0/tokens": 0,
        "staleness/1/tokens": 2 / 3,
        "staleness/1/clipped": 0.5,
        "staleness/1/ratio_gap": 0.3,
        "staleness/1/entropy": 1.5,
        "staleness/4-7/tokens": 1 / 3,
        "staleness/4-7/clipped": 0,
        "staleness/4-7/ratio_gap": 0.25,
        "staleness/4-7/entropy": 3,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert metrics["staleness/16+/tokens"] == 0
    assert metrics["staleness/16+/entropy"] is None


@pytest.mark.parametrize(
    ("staleness", "bucket"),
    [
        *((-2, "0"), (0, "0"), (1, "1"), (2, "2-3"), (3, "2-3"), (4, "4-7"), (7, "4-7")),
        *((8, "8-15"), (15, "8-15"), (16, "16+"), (1000, "16+")),
    ],
)
def test_edges_of_the_buckets(staleness: int, bucket: str) -> None:
    one, yes = torch.ones(1), torch.ones(1, dtype=torch.bool)
    metrics = bucket_metrics(bucket_sums(torch.tensor([staleness]), yes, yes, one, one))
    assert [name for name in BUCKETS if metrics[f"staleness/{name}/tokens"]] == [bucket]


def test_buckets_add_up_and_agree_with_a_loop_over_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    count = 500
    staleness = torch.randint(0, 24, (count,), generator=generator)
    live, clipped = torch.rand(2, count, generator=generator) < 0.6
    log_ratio, entropy = torch.randn(2, count, generator=generator)
    fields = (staleness, live, clipped, log_ratio, entropy)
    parts = [bucket_sums(*(field[part] for field in fields)) for part in (slice(0, 123), slice(123, count))]
    ranges = [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, 99)]
    expected = []
    for low, high in ranges:
        row = [0.0] * 4
        for age, counts, cut, change, spread in zip(*(field.tolist() for field in fields), strict=True):
            if counts and low <= age <= high:
                row = [row[0] + 1, row[1] + cut, row[2] + abs(change), row[3] + spread]
        expected += row
    assert sum(parts).tolist() == pytest.approx(expected)
    assert parts[0].dtype == torch.float64
