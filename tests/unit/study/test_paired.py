"""Student's t, paired effects and Holm's correction: by hand, by tables, and by an independent procedure."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from studies.paired import fisher, holm, p_value, paired_effect, t_probability, t_quantile


# Tables of Student's t, 97.5 % and 95 %.
@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [
        *((0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 3, 3.182), (0.975, 4, 2.776), (0.975, 9, 2.262)),
        *((0.95, 5, 2.015), (0.975, 11, 2.201), (0.975, 30, 2.042), (0.5, 3, 0.0)),
    ],
)
def test_quantiles_of_the_tables(probability: float, freedom: int, expected: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("freedom", range(1, 9))
def test_the_distribution_is_the_integral_of_its_density(freedom: int) -> None:
    values = np.linspace(0, 1.7, 20001)
    factor = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    density = factor * (1 + values**2 / freedom) ** (-(freedom + 1) / 2)
    assert t_probability(1.7, freedom) == pytest.approx(0.5 + np.trapezoid(density, values), abs=1e-8)
    assert t_probability(-1.7, freedom) == pytest.approx(1 - t_probability(1.7, freedom))


def test_an_effect_by_hand() -> None:
    """Differences 0.1, 0.2, 0.3: mean 0.2, s = 0.1, half width 4.303 0.1 / sqrt(3) = 0.2484."""
    effect = paired_effect([0.1, 0.2, 0.3])
    assert effect is not None
    assert effect.pairs == 3
    assert [effect.mean, effect.low, effect.high] == pytest.approx([0.2, -0.0484, 0.4484], abs=1e-4)
    assert paired_effect([]) is None
    alone = paired_effect([0.3])
    assert alone is not None
    assert (alone.low, alone.high) == (-math.inf, math.inf)


def test_p_values_by_hand() -> None:
    """t = 0.2 sqrt(3) / 0.1 = 3.4641 at 2 degrees: p = 1 - t / sqrt(t^2 + 2) = 1 - sqrt(12 / 14)."""
    assert p_value([0.1, 0.2, 0.3]) == pytest.approx(1 - math.sqrt(12 / 14))
    assert p_value([-0.1, -0.2, -0.3]) == pytest.approx(1 - math.sqrt(12 / 14))
    assert p_value([0.2, 0.2, 0.2]) == 0.0
    assert p_value([0.0, 0.0, 0.0]) == 1.0
    assert p_value([0.2, 0.3]) is None


def test_holm_by_hand() -> None:
    """Sorted 0.01, 0.02, 0.03: times 3, 2, 1 is 0.03, 0.04, 0.03; the last is raised to 0.04."""
    assert holm([0.03, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([0.04]) == [0.04]
    assert holm([]) == []


def test_fisher_by_hand() -> None:
    """Of 24 and 24 runs 0 and 4 collapsed: C(24, 4) of C(48, 4) divisions, and as many the other way."""
    assert fisher(0, 4, 24) == fisher(4, 0, 24) == pytest.approx(2 * 10_626 / 194_580)
    assert fisher(2, 2, 24) == fisher(0, 0, 24) == 1.0


def closed_test(p_values: Sequence[float]) -> list[float]:
    """Holm's by its other definition: a hypothesis is rejected if Bonferroni's test rejects every
    intersection of hypotheses that contains it; its adjusted p-value is the largest of theirs."""
    places = range(len(p_values))
    subsets = [set(one) for size in places for one in itertools.combinations(places, size + 1)]
    return [
        max(min(1.0, len(one) * min(p_values[place] for place in one)) for one in subsets if own in one)
        for own in places
    ]


def test_holm_is_the_closed_test_of_bonferroni() -> None:
    draw = random.Random(1)
    for count in (1, 2, 3, 5):
        for _ in range(20):
            values = [draw.random() ** 3 for _ in range(count)]
            assert holm(values) == pytest.approx(closed_test(values))
