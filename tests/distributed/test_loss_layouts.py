"""Losses by name on the real policy: the same metrics and gradient norms at every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo_megatron.config import AlgorithmConfig, ParallelConfig
from bapo_megatron.data.samples import Sample
from tests.distributed.test_clipping import answer
from tests.support.metrics import known
from tests.support.workers import run_layout

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ONE = ParallelConfig()
LAYOUTS = {
    "dp2-cp2": ParallelConfig(data=2, context=2),
    "tp2-sp-pp2": ParallelConfig(tensor=2, sequence=True, pipeline=2),
}


@pytest.mark.parametrize(
    ("name", "settings"), [("dppo_tv", {"divergence_threshold": 1e-4}), ("ce_gppo", {})], ids=str
)
def test_a_loss_has_one_answer_at_every_layout(
    name: str, settings: dict[str, float], qwen2: Path, samples: list[Sample]
) -> None:
    """One with a mask by the rollout's probabilities, all small, one whose metrics are sums of mass."""
    algorithm = AlgorithmConfig(loss=name, loss_settings=settings)
    [single] = run_layout(answer, ONE, qwen2, samples, ONE, algorithm)
    own = [metric for metric in single.metrics[0] if metric.startswith(name.split("_tv")[0])]
    assert own
    assert single.metrics[0]["bapo/clip_fraction_high"]
    for layout, parallel in LAYOUTS.items():
        for rank in run_layout(answer, parallel, qwen2, samples, parallel, algorithm):
            assert rank.grad_norms == pytest.approx(single.grad_norms, rel=1e-4), layout
            for ours, theirs in zip(rank.metrics, single.metrics, strict=True):
                assert known(ours) == pytest.approx(known(theirs), rel=2e-4, abs=2e-5), layout
