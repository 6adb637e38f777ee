"""M2PO's mask against Algorithm 1 in a plain loop, and with numbers by hand."""

from __future__ import annotations

import math

import pytest

from bapo_megatron.algo.objective import Objective
from tests.unit.algo.test_sequence_losses import (
    algorithm_1,
    found_by,
    log_ratio,
    loss_of,
    responses,
    update,
)


def test_m2po_by_hand() -> None:
    """tau 0.3 over squares 1, 4 (A > 0) and 0.25 (A < 0): means 1.75, then 0.625, then 0.25.

    So both tokens with A > 0 and r > 1 are masked. log r = -3 with A > 0 and 3 with A < 0 are no candidates.
    Loss: -(-exp(-0.5) + exp(-3) - exp(3)); all five tokens stay in the count.
    """
    loss = loss_of("m2po", tau=0.3)
    stats, batch = responses([1.0, 2.0, -0.5, -3.0, 3.0], [0] * 5, [1.0, 1.0, -1.0, 1.0, -1.0])
    found = found_by(loss, stats, batch)
    assert (found.moment, found.kept) == pytest.approx((1.75, 0.25))
    assert 0.995 <= found.threshold <= 1.0
    terms = loss.terms(stats, batch, found)
    assert float(terms.loss) == pytest.approx(math.exp(-0.5) - math.exp(-3) + math.exp(3))
    assert terms.clipped_T.tolist() == [True, True, False, False, False]
    assert terms.gradient_T.tolist() == pytest.approx([0, 0, math.exp(-0.5), math.exp(-3), math.exp(3)])
    objective = Objective(loss)
    metrics = objective.metrics(objective.token_fn(found, 6)(stats, batch), found)
    assert metrics["policy/tokens"] == 5.0
    assert metrics["policy/loss"] == pytest.approx(float(terms.loss) / 5)
    assert metrics["bapo/clip_fraction_high"] == pytest.approx(2 / 5)
    assert metrics["m2po/second_moment_kept"] == pytest.approx(0.25)


def test_m2po_masks_nothing_within_its_bound() -> None:
    loss = loss_of("m2po", tau=2.0)
    stats, batch = responses([1.0, 1.7, 0.0], [0] * 3, [1.0, 1.0, 1.0])
    found = found_by(loss, stats, batch)
    assert (found.threshold, found.moment) == (math.inf, pytest.approx((1 + 1.7**2) / 2))
    assert not bool(loss.terms(stats, batch, found).clipped_T.any())
    metrics = Objective(loss).metrics(Objective(loss).token_fn(found, 6)(stats, batch), found)
    assert metrics["m2po/threshold"] is None


@pytest.mark.parametrize("seed", range(8))
def test_m2po_masks_what_algorithm_1_does_and_at_most_the_rest_of_a_bin(seed: int) -> None:
    stats, batch = update(seed, drift=0.4)
    loss = loss_of("m2po", tau=0.02)
    found = found_by(loss, stats, batch)
    ours = set(loss.terms(stats, batch, found).clipped_T.nonzero().flatten().tolist())
    theirs = algorithm_1(stats, batch, 0.02)
    assert theirs
    assert theirs <= ours
    last = min(abs(log_ratio(stats, batch, t)) for t in theirs)
    assert all(abs(log_ratio(stats, batch, t)) > last / 1.005 for t in ours - theirs)
    assert found.kept <= 0.02


def test_a_token_on_an_edge_is_in_the_bin_above() -> None:
    """tau 0.25: the first edge is 1/2, and the bin of 1/2 and 0.5004 has a mean above tau."""
    loss = loss_of("m2po", tau=0.25)
    stats, batch = responses([0.5, 0.5004], [0, 0], [1.0, 1.0])
    found = found_by(loss, stats, batch)
    assert (found.threshold, found.kept) == (0.5, 0.0)
    assert loss.terms(stats, batch, found).clipped_T.tolist() == [True, True]


def test_m2po_masks_all_that_lies_beyond_its_edges_and_hides_no_nan() -> None:
    loss = loss_of("m2po")
    stats, batch = responses([50.0, math.inf, 0.1], [0] * 3, [1.0, 1.0, 1.0])
    found = found_by(loss, stats, batch)
    assert loss.terms(stats, batch, found).clipped_T.tolist() == [True, True, False]
    stats, batch = responses([50.0, math.nan, 0.1], [0] * 3, [1.0, 1.0, 1.0])
    assert math.isnan(float(loss.terms(stats, batch, found_by(loss, stats, batch)).loss))
