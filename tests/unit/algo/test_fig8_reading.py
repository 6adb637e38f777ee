"""What is read from Fig. 8: the numbers of the document, and the method on curves that are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from studies import fig8_reading as fig8

DOCUMENT = Path(fig8.__file__).with_name("results") / "fig8_reading.md"


def test_the_document_is_what_the_command_prints() -> None:
    assert DOCUMENT.read_text() == "\n".join(fig8.report()) + "\n"


def test_pairings_of_the_curves_give_different_correlations() -> None:
    high, low = fig8.curves()
    all_pairs, early = fig8.by_step(high, low), fig8.by_step(high, low, last=128)
    assert fig8.fit(fig8.interpolated(high, low))[1:] == pytest.approx((0.106, 0.472, 0.816, 0.13), abs=2e-3)
    assert fig8.fit(all_pairs).slope == pytest.approx(0.092, abs=5e-4)
    assert fig8.fit(all_pairs).correlation == pytest.approx(0.71, abs=5e-3)
    assert fig8.fit(early).slope == pytest.approx(0.2 / 1.7, abs=3e-4)
    assert fig8.fit(early).correlation > 0.995


def test_searches_that_end_at_two_places_lie_on_the_line_through_both() -> None:
    """150 steps of 100 searches, 40 % at (3.0, 0.8), the rest at (1.3, 0.6)."""
    share = np.random.default_rng(0).binomial(100, 0.4, 150) / 100
    pairs = np.stack([1.3 + 1.7 * share, 0.6 + 0.2 * share], axis=1)
    found = fig8.fit(pairs)
    assert (found.slope, found.correlation) == pytest.approx((0.2 / 1.7, 1.0))
    assert fig8.searches_a_step(pairs[:, 0], 1.3, 3.0) == pytest.approx(100, rel=0.3)
