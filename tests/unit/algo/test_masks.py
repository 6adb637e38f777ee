"""Masks by hand and against verl's function."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from bapo_megatron.algo.masks import (
    Response,
    cut_responses,
    icepop,
    rollout_rs,
    second_moment,
    taken_out,
)


def response(log_ratio: list[float], is_cut: bool = False) -> Response:
    rollout_N = np.linspace(-1.0, -2.0, len(log_ratio))
    return Response(-1.0, len(log_ratio), is_cut, -1, lambda: (rollout_N, rollout_N + log_ratio))


def test_cut_responses_need_no_tokens() -> None:
    def unread() -> Any:
        raise AssertionError("nothing of the tokens is asked for")

    assert [cut_responses(Response(1.0, 3, is_cut, 0, unread)) for is_cut in (True, False)] == [True, False]


def test_icepop_takes_the_tokens_outside_its_range() -> None:
    """Ratios 0.4, 0.6, 1, 4, 6 and a broken one."""
    ratios = [0.4, 0.6, 1.0, 4.0, 6.0, math.nan]
    assert icepop(response([*map(math.log, ratios)])).tolist() == [True, False, False, False, True, True]
    assert icepop(response([math.log(4.0)]), high=3.0).tolist() == [True]


def test_second_moment_takes_the_largest_until_the_mean_is_small() -> None:
    """Squares 0.01, 0.04, 0.09, 1: means of the smallest 0.01, 0.025, 0.14 / 3 = 0.047 and 0.285."""
    ratios = response([0.3, -0.1, 1.0, -0.2])
    assert second_moment(ratios).tolist() == [True, False, True, False]
    assert second_moment(ratios, tau=0.05).tolist() == [False, False, True, False]
    assert second_moment(ratios, tau=0.3).tolist() == [False] * 4
    assert second_moment(response([math.nan, 0.1])).tolist() == [True, False]


RATIOS = [[0.1, -0.9, 0.6], [0.2, 0.1, -0.1], [1.2, -1.1, 0.0], [-0.3, -0.4, -0.2]]


@pytest.mark.parametrize(
    ("kind", "low", "high", "theirs"),
    [  # what verl 1dda039b9's compute_rollout_rejection_mask takes out of these, with this threshold
        ("token_k1", 0.5, 2.0, "010 000 110 000"),
        ("token_k2", None, 0.2, "010 000 110 000"),
        ("token_k3", None, 0.3, "010 000 110 000"),
        ("seq_sum_k1", 0.8, 1.5, "000 000 000 111"),
        ("seq_sum_k2", None, 0.2, "111 000 111 000"),
        ("seq_sum_k3", None, 0.3, "111 000 111 000"),
        ("seq_mean_k1", 0.9, 1.2, "000 000 000 111"),
        ("seq_mean_k2", None, 0.1, "111 000 111 000"),
        ("seq_mean_k3", None, 0.15, "111 000 111 000"),
        ("seq_max_k2", None, 0.45, "000 000 111 000"),
        ("seq_max_k3", None, 0.5, "000 000 111 000"),
    ],
)
def test_rollout_rs_takes_what_verl_takes(kind: Any, low: float | None, high: float, theirs: str) -> None:
    found = [
        taken_out(kind, lambda one: rollout_rs(one, kind, high, low), response(row)).astype(int).tolist()
        for row in RATIOS
    ]
    assert " ".join("".join(map(str, row)) for row in found) == theirs
