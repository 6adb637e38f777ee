"""Distribution of response lengths and decode schedule of a rollout: by hand, by sampling, by simulation."""

from __future__ import annotations

from math import exp, log
from random import Random
from statistics import NormalDist, fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.planning.lengths import (
    ResponseLengths,
    busiest_engine_responses,
    decode_steps,
    read_tokens,
)


@pytest.mark.parametrize(
    ("mean", "spread", "longest"), [(4585, 1.5, 8192), (2048, 1.0, 8192), (3206, 0.5, 4096)]
)
def test_the_distribution_against_random_draws(mean: float, spread: float, longest: float) -> None:
    """400,000 draws of a log-normal distribution, cut: its mean, what is cut, E[n^2] / E[n] / 2."""
    lengths = ResponseLengths(mean, spread, longest)
    share = (1 - lengths.cut_share) / 2
    middle = log(lengths.quantile(share)) - spread * NormalDist().inv_cdf(share)
    draw = Random(0)
    drawn = [min(longest, exp(draw.gauss(middle, spread))) for _ in range(400_000)]
    assert fmean(drawn) == pytest.approx(mean, rel=0.01)
    assert fmean(n == longest for n in drawn) == pytest.approx(lengths.cut_share, abs=0.005)
    running = fmean(n * n for n in drawn) / fmean(drawn) / 2
    assert lengths.running_mean == pytest.approx(running, rel=0.01)
    assert sorted(drawn)[100_000] == pytest.approx(lengths.quantile(0.25), rel=0.02)


def test_distributions_at_the_ends() -> None:
    """All are cut; or none, and all are alike."""
    cut = ResponseLengths(100, 1.0, 100)
    assert (cut.cut_share, cut.running_mean, cut.quantile(0.1)) == (1, 50, 100)
    alike = ResponseLengths(50, 1e-6, 100)
    assert alike.quantile(0.1) == pytest.approx(50, rel=1e-4)
    assert alike.running_mean == pytest.approx(25, rel=1e-4)


def test_lengths_of_an_engine_keep_the_mean_and_have_the_longest() -> None:
    lengths = ResponseLengths(2048, 1.5, 8192)
    found = lengths.busiest_engine_lengths(128, 1024)
    assert fmean(found) == pytest.approx(2048, rel=0.01)
    assert max(found) == 8192
    for half in (found[:64], found[64:]):
        assert fmean(half) == pytest.approx(2048, rel=0.1)
    few = ResponseLengths(2048, 0.5, 65536).busiest_engine_lengths(2, 1024)
    assert max(few) == ResponseLengths(2048, 0.5, 65536).quantile(1 - 0.5 / 1024)


def test_steps_by_hand() -> None:
    """Two slots: 3 and 5 begin, 2 follows the 3 and ends with the 5, 4 follows one of both."""
    assert decode_steps([3, 5, 2, 4], 2) == 9
    assert decode_steps([3, 5, 2, 4], 4) == 5
    assert decode_steps([3, 5, 2, 4], 1) == 14
    # 3 (1 + 1.5) + 5 (1 + 2.5) + 2 (1 + 1) + 4 (1 + 2)
    assert read_tokens([3, 5, 2, 4], 1) == 41


def token_by_token(lengths: list[int], slots: int, prompt: int, step: float, token: float) -> float:
    """A loop over decode steps: each reads the weights, and the tokens of all that run."""
    waiting, running, seconds = list(lengths), [], 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append([0, waiting.pop(0)])
        seconds += step + token * sum(prompt + done + 0.5 for done, _ in running)
        running = [[done + 1, length] for done, length in running if done + 1 < length]
    return seconds


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=20),
    st.integers(1, 24),
    st.integers(0, 9),
    st.floats(0.1, 9),
    st.floats(0.01, 1),
)
def test_the_closed_form_is_a_simulation(
    lengths: list[int], slots: int, prompt: int, step: float, token: float
) -> None:
    expected = token_by_token(lengths, slots, prompt, step, token)
    found = step * decode_steps(lengths, slots) + token * read_tokens(lengths, prompt)
    assert found == pytest.approx(expected)


def test_the_share_of_the_busiest_engine() -> None:
    assert busiest_engine_responses(256, 8, 1.0) == 32
    assert busiest_engine_responses(256, 8, 1.76) == 57  # 56.3
    assert busiest_engine_responses(256, 8, 99) == 256
    assert busiest_engine_responses(3, 8, 1.0) == 1
    assert busiest_engine_responses(7, 2, 1.0) == 4
