"""The penalty of overlong responses, on numbers worked out by hand."""

from __future__ import annotations

import pytest

from bapo_megatron.reward.pool import overlong_penalty


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [
        (0, 0.0),
        (79, 0.0),
        (80, 0.0),  # L_max - L_cache = 100 - 20: the zone begins after it
        (81, 0.5 * 1 / 20),
        (85, 0.5 * 5 / 20),
        (90, 0.25),
        (99, 0.475),
        (100, 0.5),
        (130, 0.5),
    ],
)
def test_the_overlong_penalty_of_dapo(tokens: int, penalty: float) -> None:
    """Zone of 20 tokens before 100, penalty 0.5: half of Eq. 13, with the other sign."""
    ours = overlong_penalty(tokens, max_response_tokens=100, zone_tokens=20, penalty=0.5)
    assert ours == pytest.approx(penalty, abs=1e-15)


def test_the_papers_numbers() -> None:
    """Expected length 16,384 and a cache of 4,096 on top: at 18,432 tokens half the way is gone."""
    assert overlong_penalty(16384, 20480, 4096, 1.0) == 0.0
    assert overlong_penalty(18432, 20480, 4096, 1.0) == 0.5
    assert overlong_penalty(20480, 20480, 4096, 1.0) == 1.0


def test_without_a_zone_length_is_free() -> None:
    assert overlong_penalty(100, max_response_tokens=100, zone_tokens=0, penalty=0.5) == 0.0
