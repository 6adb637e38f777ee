"""The cheaper ways to the bounds on the real policy (held forwards, known ratios), and losses by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from bapo_megatron.algo.bapo import balanced
from bapo_megatron.algo.bounds import search_bounds
from bapo_megatron.algo.losses.clip import contribution_fn
from bapo_megatron.algo.papo_schedule import PapoConfig
from bapo_megatron.config import (
    AlgorithmConfig,
    BatchConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
)
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.tensor_types import TokenStats
from bapo_megatron.trainer.update_loss import UpdateLoss
from bapo_megatron.types import Metrics, PackLayout
from tests.support.bapo_objective import loss_fn
from tests.support.layouts import layout
from tests.support.metrics import known
from tests.support.tiers import slow_but
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed

ONE = ParallelConfig()
EXACT = dataclasses.replace(balanced(), target=0.4)


class Answer(NamedTuple):
    metrics: list[Metrics]
    grad_norms: list[float]
    log_probs: dict[int, torch.Tensor]
    layout: PackLayout


def answer(
    folder: Path,
    samples: list[Sample],
    parallel: ParallelConfig,
    algorithm: AlgorithmConfig,
    hold: bool = False,
    updates: int = 2,
) -> Answer:
    batch = BatchConfig(pack_tokens=96, recompute="full")
    optimizer = OptimizerConfig(lr=1.0, eps=1.0)
    policy = MegatronPolicy(ModelConfig(folder, "float32"), parallel, batch, optimizer, updates)
    clipping = UpdateLoss(algorithm, hold)
    packs = pack_samples(samples, 96, layout=policy.pack_layout)
    log_probs = {
        row: stats.log_prob_T[start : start + length].clone()
        for pack, stats in zip(packs, policy.log_probs(packs), strict=True)
        for row, start, length in pack.rows
    }
    metrics, norms = [], []
    for _ in range(updates):
        result = policy.update(packs, clipping.loss(policy, packs, on_policy=False))
        weights = clipping.observe(result.sums)
        metrics.append({**clipping.objective.metrics(result.sums, clipping.found), **weights})
        norms.append(result.grad_norm)
    return Answer(metrics, norms, log_probs, policy.pack_layout)


def scoped(scope: Any) -> AlgorithmConfig:
    return AlgorithmConfig(bounds=dataclasses.replace(EXACT, scope=scope))


@pytest.mark.parametrize("text", slow_but(["dp2", "tp2-sp"], "tp2-sp"))
def test_held_forwards_make_the_same_updates(text: str, qwen2: Path, samples: list[Sample]) -> None:
    parallel = layout(text).parallel
    [exact, *_] = run_layout(answer, parallel, qwen2, samples, parallel, scoped("update"))
    for held in run_layout(answer, parallel, qwen2, samples, parallel, scoped("update"), True):
        assert held.grad_norms == pytest.approx(exact.grad_norms, rel=1e-6)
        for ours, theirs in zip(held.metrics, exact.metrics, strict=True):
            assert known(ours) == pytest.approx(known(theirs), rel=1e-6, abs=1e-8)
            assert (ours["bapo/clip_low"], ours["bapo/clip_high"]) == (
                theirs["bapo/clip_low"],
                theirs["bapo/clip_high"],
            )


@pytest.mark.parametrize("text", slow_but(["pp2", "cp2"], "pp2"))
def test_polarity_and_diagnostics_at_every_layout(text: str, qwen2: Path, samples: list[Sample]) -> None:
    """A target far above the entropy: from the second update on the weights are 1.5 and 0.5."""
    algorithm = AlgorithmConfig(bounds=EXACT, polarity=PapoConfig(True, target_entropy=100.0))
    parallel = layout(text).parallel
    [single] = run_layout(answer, ONE, qwen2, samples, ONE, algorithm)
    [plain] = run_layout(answer, ONE, qwen2, samples, ONE, scoped("update"))
    assert single.grad_norms[0] == plain.grad_norms[0]
    assert single.grad_norms[1] != pytest.approx(plain.grad_norms[1], rel=1e-2)
    for ranks in run_layout(answer, parallel, qwen2, samples, parallel, algorithm):
        assert ranks.grad_norms == pytest.approx(single.grad_norms, rel=1e-4)
        for ours, theirs in zip(ranks.metrics, single.metrics, strict=True):
            assert known(ours) == pytest.approx(known(theirs), rel=2e-4, abs=2e-5)
        assert ranks.metrics[1]["polarity/expanding_weight"] == 1.5


@pytest.mark.parametrize("text", slow_but(["dp2", "cp2"], "dp2"))
def test_bounds_of_the_packs_in_hand(text: str, qwen2: Path, samples: list[Sample]) -> None:
    """Searched anew for the packs that the replicas process together; the log holds the mean over tokens."""
    parallel, algorithm = layout(text).parallel, scoped("micro_batch")
    ranks = run_layout(answer, parallel, qwen2, samples, parallel, algorithm, False, 1)
    log_probs = {row: values for rank in ranks for row, values in rank.log_probs.items()}
    of_rank = {rank.layout.data_rank: rank.layout for rank in ranks}
    replicas = [pack_samples(samples, 96, layout=of_rank[rank]) for rank in sorted(of_rank)]
    assert len(replicas) == (parallel.data or 1)
    measure = contribution_fn(algorithm.bounds)
    low = high = tokens = 0.0
    for packs in zip(*replicas, strict=True):
        sums = torch.zeros(0)
        for pack in packs:
            log_prob_T = torch.zeros_like(pack.mask_T)
            for row, start, length in pack.rows:
                log_prob_T[start : start + length] = log_probs[row]
            part = measure(TokenStats(log_prob_T, torch.zeros_like(log_prob_T)), pack)
            sums = sums + part if sums.numel() else part
        bounds = search_bounds(sums, algorithm.bounds)
        count = float(sum(pack.mask_T.sum() for pack in packs))
        low, high, tokens = low + count * bounds.low, high + count * bounds.high, tokens + count
    assert len(replicas[0]) > 1
    for rank in ranks:
        [metrics] = rank.metrics
        assert metrics["bapo/clip_low"] == pytest.approx(low / tokens, rel=1e-9)
        assert metrics["bapo/clip_high"] == pytest.approx(high / tokens, rel=1e-9)


def old_sums(folder: Path, samples: list[Sample], parallel: ParallelConfig) -> torch.Tensor:
    batch = BatchConfig(pack_tokens=96)
    policy = MegatronPolicy(ModelConfig(folder, "float32"), parallel, batch, OptimizerConfig(), 1)
    packs = pack_samples(samples, 96, layout=policy.pack_layout)
    found = search_bounds(torch.zeros(53), EXACT)
    return torch.cat(
        [policy.old_sums(packs, fn) for fn in (contribution_fn(EXACT), loss_fn(found, EXACT, 0))]
    )


@pytest.mark.parametrize("text", slow_but(["dp2-cp2", "tp2-pp2"], "dp2-cp2"))
def test_known_ratios_count_every_token_once(text: str, qwen2: Path, samples: list[Sample]) -> None:
    """At ratio 1 the sums follow from the samples alone: P counts w A of every positive token."""
    parallel = layout(text).parallel
    positive = sum(s.advantage * s.response_tokens for s in samples if s.advantage > 0)
    negative = -sum(s.advantage * s.response_tokens for s in samples if s.advantage < 0)
    for sums in run_layout(old_sums, parallel, qwen2, samples, parallel):
        assert sums[:37].tolist() == pytest.approx([positive] * 37, rel=1e-6)
        assert sums[37:53].tolist() == pytest.approx([negative] * 16, rel=1e-6)
        assert float(sums[54]) == sum(s.response_tokens for s in samples)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"), [("dppo_tv", {"divergence_threshold": 1e-4}), ("ce_gppo", {}), ("p3o", {})], ids=str
)
def test_a_loss_has_one_answer_at_every_layout(
    name: str, settings: dict[str, float], qwen2: Path, samples: list[Sample]
) -> None:
    """A mask by the rollout's probabilities, all small; metrics that are sums of mass; a cap of an update."""
    algorithm = AlgorithmConfig(loss=name, loss_settings=settings)
    [single] = run_layout(answer, ONE, qwen2, samples, ONE, algorithm)
    own = [metric for metric in single.metrics[0] if metric.startswith(name.split("_tv")[0])]
    assert own
    assert single.metrics[0]["bapo/clip_fraction_high"]
    for text in ("dp2-cp2", "tp2-sp-pp2"):
        parallel = layout(text).parallel
        for rank in run_layout(answer, parallel, qwen2, samples, parallel, algorithm):
            assert rank.grad_norms == pytest.approx(single.grad_norms, rel=1e-4), text
            for ours, theirs in zip(rank.metrics, single.metrics, strict=True):
                assert known(ours) == pytest.approx(known(theirs), rel=2e-4, abs=2e-5), text
