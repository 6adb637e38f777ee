"""Every metric that a run without environments and experts writes is on a page, by its full name."""

from __future__ import annotations

import json
import re

import pytest

from bapo_megatron.algo.bapo import paper
from bapo_megatron.algo.bins import BUCKETS, RATIO_BINS
from bapo_megatron.commands.report.panels import PANELS
from bapo_megatron.config import RewardConfig
from bapo_megatron.rollout.sampler.sampling_metrics import rollout_metrics
from tests.support.bapo_objective import objective
from tests.support.pages import ROOT

_QUADRANTS = [f"{sign}_{half}" for sign in ("positive", "negative") for half in ("high", "low")]


def _named(metric: str) -> str:
    """The name under which the pages have a metric: one for all bins, buckets, quadrants and readings."""
    metric = re.sub(r"^contribution/.+", "contribution/MEASURE_SHARE_WEIGHT", metric)
    for family, members, name in (("staleness", BUCKETS, "BUCKET"), ("ratio", RATIO_BINS, "BIN")):
        for member in members:
            metric = metric.replace(f"{family}/{member}/", f"{family}/{name}/")
    for quadrant in _QUADRANTS:
        metric = metric.replace(f"quadrant/{quadrant}/", "quadrant/Q/")
        metric = metric.replace(f"/clipped_{quadrant}", "/clipped_Q")
    return metric


def _written() -> set[str]:
    lines = (ROOT / "tests/fixtures/bapo/metrics.jsonl").read_text().splitlines()
    stored = {name for line in lines for name in json.loads(line) if "/" in name}
    return {*objective(paper()).metric_names(), *rollout_metrics([], 0, RewardConfig()), *stored}


def test_every_metric_is_on_a_page() -> None:
    pages = "\n".join(path.read_text() for path in (ROOT / "docs").glob("*.md") if path.stem != "study")
    names = sorted({_named(metric) for metric in _written()})
    assert len(names) > 60
    assert [name for name in names if f"`{name}`" not in pages] == []


@pytest.mark.parametrize(("metric", "label"), [("positive", "right"), ("negative", "wrong")])
def test_lengths_are_those_of_right_and_wrong_responses(metric: str, label: str) -> None:
    """Not of positive and negative advantages, whatever the metric's name: so ``rollout_metrics`` has it."""
    [panel] = [panel for panel in PANELS if panel.file == "response_length"]
    [curve] = [one for one in panel.curves if one.metric == f"rollout/length_{metric}_mean"]
    assert curve.label == label
    assert "advantage" not in panel.caption
