"""The notice that a search is idle, by updates written out by hand."""

from __future__ import annotations

import pytest

from bapo_megatron.algo.bapo import BoundsConfig, fixed, paper
from bapo_megatron.trainer.records.recorder import MOVED, IdleSearch
from bapo_megatron.types import Metrics
from tests.support.bapo_objective import objective

FRESH: Metrics = {MOVED: None, "bapo/contribution": 0.1}


def stale(moved: float = 0.0, share: float = 0.52) -> Metrics:
    return {MOVED: moved, "bapo/contribution": share}


def test_sixteen_stale_updates_without_a_move_give_one_notice() -> None:
    idle = IdleSearch(paper(), first_step=1)
    assert [idle.observe(step, [FRESH, *[stale()] * 7]) for step in (1, 2)] == [None, None]
    assert idle.observe(3, [FRESH, *[stale(share=0.5)] * 2]) == (
        "the bounds have not moved in the first 16 stale updates (steps 1 to 3): so far this run equals "
        "fixed(0.6, 1.2), because positive tokens hold 0.52 of the gradient, above the target of 0.4 "
        "(docs/algorithm.md#which-preset)"
    )
    assert idle.observe(4, [stale()] * 100) is None


@pytest.mark.parametrize(
    "updates",
    [
        [*[stale()] * 10, stale(1.0), *[stale()] * 20],
        [{"bapo/contribution": 0.5}] * 50,  # fixed bounds, or a loss without them
        [FRESH] * 50,
        [stale()] * 15,
    ],
)
def test_runs_whose_bounds_move_get_no_idle_notice(updates: list[Metrics]) -> None:
    assert IdleSearch(paper(), first_step=1).observe(1, updates) is None


def test_a_resumed_run_gives_no_idle_notice() -> None:
    assert IdleSearch(paper(), first_step=101).observe(101, [stale()] * 16) is None


@pytest.mark.parametrize("config", [paper(), BoundsConfig()])
def test_a_search_has_the_metric(config: BoundsConfig) -> None:
    assert MOVED in objective(config).metric_names()


def test_fixed_bounds_have_none() -> None:
    assert MOVED not in objective(fixed(0.8, 1.2)).metric_names()
