"""The canary: the same for everybody, of all lengths, far from what rounding could decide."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from bapo_megatron.algo.bapo import contribution_sums
from bapo_megatron.algo.bounds import (
    BoundsConfig,
    balanced,
    eq8_literal,
    grpo,
    high_values,
    low_values,
    published_code,
    search_bounds,
)
from bapo_megatron.data.canary import CanarySpec, canary_sequences, scored, unscored, with_random_routes
from bapo_megatron.data.packing import UNKNOWN_BYTE, pack_samples
from bapo_megatron.data.routes import route_problem
from bapo_megatron.hf.config import model_shape
from bapo_megatron.layers.mlp import Experts
from bapo_megatron.types import RouteShape
from tests.support.shapes import resized

SPEC = CanarySpec(seed=3, tokens=4000, longest=200, vocab=50)


def test_lengths_run_from_one_response_token_to_the_longest() -> None:
    samples = unscored(canary_sequences(SPEC, balanced()))
    lengths = [len(sample.token_ids) for sample in samples]
    assert min(lengths) == 2
    assert max(lengths) == SPEC.longest
    assert SPEC.tokens - 1 <= sum(lengths) <= SPEC.tokens
    assert min(sample.response_tokens for sample in samples) == 1
    assert all(sample.response_tokens < length for sample, length in zip(samples, lengths, strict=True))
    assert max(sample.token_ids.max() for sample in samples) == SPEC.vocab - 1
    assert {sample.advantage > 0 for sample in samples} == {True, False}


@pytest.mark.parametrize("bounds", [balanced(), eq8_literal(), published_code(), grpo()])
def test_no_ratio_is_near_a_candidate(bounds: BoundsConfig) -> None:
    ratios = np.concatenate([one.log_ratio_R for one in canary_sequences(SPEC, bounds)])
    edges = [*low_values(bounds), *high_values(bounds), *([bounds.dual_clip] if bounds.dual_clip else [])]
    nearest = min(np.abs(ratios - math.log(edge)).min() for edge in edges)
    assert nearest > 3e-3  # a quarter of the narrowest interval, log(3 / 2.95) / 4, is 4e-3
    assert ratios.min() < math.log(low_values(bounds)[0])
    assert ratios.max() > math.log(high_values(bounds)[-1])


@pytest.mark.parametrize("seed", range(4))
def test_the_search_moves_its_bounds(seed: int) -> None:
    """At the log-probs that the reference measured: bounds that never move would test nothing."""
    bounds = balanced()
    sequences = canary_sequences(dataclasses.replace(SPEC, seed=seed), bounds)
    generator = np.random.default_rng(0)
    measured = [generator.normal(-9, 3, len(one.token_ids) - 1).astype(np.float32) for one in sequences]
    samples = scored(sequences, measured)
    counts = [sample.response_tokens for sample in samples]
    responses = [log_prob[-count:] for log_prob, count in zip(measured, counts, strict=True)]
    log_prob, rollout = np.concatenate(responses), np.concatenate([one.log_probs_R for one in samples])
    np.testing.assert_allclose(
        log_prob - rollout, np.concatenate([one.log_ratio_R for one in sequences]), atol=4e-6
    )
    advantages = np.repeat([sample.advantage for sample in samples], counts)
    columns = [torch.from_numpy(column.astype(np.float64)) for column in (log_prob - rollout, advantages)]
    rollout_T = torch.from_numpy(rollout)
    sums = contribution_sums(*columns, rollout_T, torch.ones(len(rollout)), bounds)
    assert search_bounds(sums, bounds).rounds >= 3


SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4}
MORE = {"intermediate_size": 64, "vocab_size": 50, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6}
DENSE = model_shape({"model_type": "qwen3", **SIZES, **MORE}, "a test")


@pytest.mark.parametrize(("experts", "per_token"), [(8, 2), (128, 8), (7, 3), (4, 4), (300, 8)])
def test_every_position_of_a_mixture_of_experts_has_a_route(experts: int, per_token: int) -> None:
    """Prompts, too: in a pack only padding has none. All experts are taken about as often."""
    model = resized(DENSE, experts=Experts(experts, per_token, 24, True))
    plain = unscored(canary_sequences(SPEC, balanced()))
    samples = with_random_routes(plain, 5, model)
    shape, counts = RouteShape(3, per_token, experts), np.zeros(experts)
    for sample in samples:
        assert sample.routes_R is not None
        assert sample.routes_R.shape == (sample.positions, 3, per_token)
        assert sample.routes_R.dtype == shape.dtype
        assert route_problem(sample.routes_R, shape) is None
        counts += np.bincount(sample.routes_R.ravel(), minlength=experts)
    assert counts.max() < 2 * counts.mean()
    assert counts.min() > counts.mean() / 2
    for pack in pack_samples(samples, 256):
        assert pack.route_TLK is not None
        assert pack.replays_routes
        unknown = UNKNOWN_BYTE if pack.route_TLK.dtype == torch.uint8 else -1
        known = (pack.route_TLK != unknown).all(-1).all(-1)
        assert int(known.sum()) == sum(positions for _, _, positions in pack.rows)
    assert with_random_routes(plain, 5, DENSE) == plain
    again, other = (with_random_routes(plain, seed, model)[1].routes_R for seed in (5, 6))
    np.testing.assert_array_equal(samples[1].routes_R, again)
    assert not np.array_equal(samples[1].routes_R, other)
