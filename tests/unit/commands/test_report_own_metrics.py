"""Metrics of a loss of one's own, in the comparison of runs."""

from __future__ import annotations

from pathlib import Path

from bapo_megatron.commands.report.data import read_run
from bapo_megatron.commands.report.page import own_metrics
from bapo_megatron.commands.report.text import NO_VALUE

FIXTURES = Path(__file__).parents[2] / "fixtures"


def test_a_comparison_has_the_metrics_of_custom_losses() -> None:
    runs = [read_run(FIXTURES / name) for name in ("bapo", "papo")]
    assert own_metrics(runs) == [], "all others have panels"
    runs[0].steps.last["spo/factor"] = 0.5
    runs[0].steps.last["experts/router_entropy"] = 1.5  # of a mixture of experts: it has panels
    assert own_metrics(runs) == [("spo/factor", ["0.500", NO_VALUE])]
