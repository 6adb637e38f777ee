"""At the size of real runs: a sequence of 65,536 tokens over four ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from bapo_megatron.algo.bapo import Bounds, balanced
from bapo_megatron.algo.bounds import search_bounds
from bapo_megatron.algo.losses.clip import contribution_fn
from bapo_megatron.config import BatchConfig, ModelConfig, OptimizerConfig, ParallelConfig
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.policy.megatron import MegatronPolicy
from tests.support.bapo_objective import loss_fn
from tests.support.models import VOCAB, save_tiny_model
from tests.support.workers import run_layout

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LIMIT = 65536
BOUNDS = dataclasses.replace(balanced(), target=0.45)
# Far above every gradient, so that Adam's first step moves each weight by lr / eps x gradient.
OPTIMIZER = OptimizerConfig(lr=1e9, eps=1e6, weight_decay=0.0, clip_grad=1e9)


class Answer(NamedTuple):
    log_probs: dict[int, torch.Tensor]
    bounds: Bounds
    loss: float
    grad_norm: float
    gradient: dict[str, torch.Tensor]


def answer(folder: Path, samples: list[Sample], parallel: ParallelConfig) -> Answer:
    batch = BatchConfig(pack_tokens=LIMIT)
    policy = MegatronPolicy(ModelConfig(folder, "float32"), parallel, batch, OPTIMIZER, 1)
    before = {name: tensor.clone() for name, tensor in policy.hf_weights()}
    packs = pack_samples(samples, LIMIT, layout=policy.pack_layout)
    stats = policy.log_probs(packs)
    log_probs = {
        row: values.log_prob_T[start : start + length].clone()
        for pack, values in zip(packs, stats, strict=True)
        for row, start, length in pack.rows
    }
    measure = contribution_fn(BOUNDS)
    found = search_bounds(sum(measure(*pair) for pair in zip(stats, packs, strict=True)), BOUNDS)
    result = policy.update(packs, loss_fn(found, BOUNDS, 0))
    gradient = {name: before[name] - tensor for name, tensor in policy.hf_weights()}
    return Answer(log_probs, found, float(result.sums[0]), result.grad_norm, gradient)


def sample(generator: np.random.Generator, tokens: int, advantage: float) -> Sample:
    """A prompt of one token and a response; ``tokens`` predicting positions in all."""
    return Sample(
        token_ids=generator.integers(0, VOCAB, tokens + 1).astype(np.int32),
        log_probs_R=(-4.85 + 0.5 * generator.normal(size=tokens)).astype(np.float32),
        versions_R=np.zeros(tokens, dtype=np.int32),
        advantage=advantage,
    )


def test_a_sequence_at_the_limit(tmp_path: Path) -> None:
    """Beside it, in a pack of their own: short documents down to a single token."""
    small = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    folder = save_tiny_model("qwen2", tmp_path, **small, max_position_embeddings=LIMIT)
    generator = np.random.default_rng(0)
    lengths = [LIMIT, 1, 2, 777, 8, 3001]
    advantages = [-0.5, 1.0, -1.0, 3.0, 1.0, 4.0]
    samples = [sample(generator, *pair) for pair in zip(lengths, advantages, strict=True)]
    one, four = ParallelConfig(), ParallelConfig(context=4)
    [alone] = run_layout(answer, one, folder, samples, one)
    assert alone.bounds.high > 1.2  # the search has moved
    for ours in run_layout(answer, four, folder, samples, four):
        for row, expected in alone.log_probs.items():
            torch.testing.assert_close(ours.log_probs[row], expected, rtol=1e-5, atol=2e-6)
        assert (ours.bounds.low, ours.bounds.high) == (alone.bounds.low, alone.bounds.high)
        assert ours.loss == pytest.approx(alone.loss, rel=1e-5)
        assert ours.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)
        for name, gradient in alone.gradient.items():
            scale = float(gradient.abs().max())
            torch.testing.assert_close(ours.gradient[name], gradient, rtol=1e-3, atol=2e-5 * scale)
