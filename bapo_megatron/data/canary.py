"""Canary batch: random sequences for ``bapo verify-parallel`` and the resume check, without a dataset.

``canary_sequences(spec, bounds)`` draws them. In verify-parallel, the reference layout makes a forward pass
over ``unscored(sequences)`` and passes its log-probs to ``scored``, which returns the batch's samples: their
rollout log-probs are the measured ones minus drawn log-ratios, since random tokens are improbable under any
model. Other layouts read these samples from a file. The resume check uses those of ``with_token_indices``.

Results must not depend on rounding. So no ratio is close to a bound that BAPO's search tries. Positive
advantages are small, so that the search of ``balanced`` moves both bounds. Samples for a mixture of experts
get random routes (``with_random_routes``), because rounding could swap two almost equally likely experts:
they test the router's probabilities, not its choice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bapo_megatron.algo.bounds import BoundsConfig, high_values, low_values
from bapo_megatron.data.samples import Sample
from bapo_megatron.hf.config import ModelShape
from bapo_megatron.types import RouteShape

_SPREAD = 0.6
"""Standard deviation of the drawn log-ratios, to place tokens in every interval between candidates."""

_POSITIVE = 0.5
"""Positive advantages, relative to negative ones."""


@dataclass(frozen=True)
class CanarySpec:
    """Parameters of a canary batch: seed and sizes. Equal ones, with equal bounds, give equal batches."""

    seed: int
    tokens: int
    """Tokens of all sequences together; the batch may have one fewer."""
    longest: int
    """Tokens of the longest sequence."""
    vocab: int


@dataclass(frozen=True)
class CanarySequence:
    """Random sequence of the canary batch: token ids, an advantage, and a log-ratio for each response token,
    from which ``scored`` computes rollout log-probs."""

    token_ids: np.ndarray
    """Token ids of prompt and response, int32."""
    log_ratio_R: np.ndarray
    """Drawn log-ratio, log pi - log pi_rollout, of each response token at the reference layout, float64."""
    advantage: float


def canary_sequences(spec: CanarySpec, bounds: BoundsConfig) -> list[CanarySequence]:
    """Draw the canary batch of ``spec``: one sequence of 2 tokens, one of the longest, others in between."""
    generator = np.random.default_rng([spec.seed, spec.tokens, spec.longest, spec.vocab])
    return [
        _sequence(generator, length, _POSITIVE if number % 2 else -1.0, spec.vocab, bounds)
        for number, length in enumerate(_lengths(generator, spec))
    ]


def unscored(sequences: Sequence[CanarySequence]) -> list[Sample]:
    """Return samples with zeros as rollout log-probs, for the reference layout's first forward pass."""
    return [_sample(sequence, np.zeros(len(sequence.log_ratio_R), np.float32)) for sequence in sequences]


def with_token_indices(sequences: Sequence[CanarySequence]) -> list[Sample]:
    """Return samples with each response token's index in the batch (0, 1, ...) as its rollout log-prob, which
    identifies the token in any pack and on any rank."""
    ends = np.cumsum([len(sequence.log_ratio_R) for sequence in sequences])
    return [
        _sample(sequence, np.arange(end - len(sequence.log_ratio_R), end, dtype=np.float32))
        for sequence, end in zip(sequences, ends, strict=True)
    ]


def with_random_routes(samples: Sequence[Sample], seed: int, model: ModelShape) -> list[Sample]:
    """Return the samples with a random route for each position, prompts included; deterministic in ``seed``.
    All experts of a layer are equally likely. Samples of a ``model`` without experts stay unchanged."""
    if model.experts is None:
        return list(samples)
    shape, routed = RouteShape(model.layers, model.experts.per_token, model.experts.count), []
    for number, sample in enumerate(samples):
        generator = np.random.default_rng([seed, number])
        places = (sample.positions, shape.layers, 1)
        first = generator.integers(0, shape.experts, places)
        # Steps go around the experts at most once, so no expert repeats.
        step = generator.integers(1, shape.experts // shape.per_token + 1, places)
        routes = (first + step * np.arange(shape.per_token)) % shape.experts
        routed.append(dataclasses.replace(sample, routes_R=routes.astype(shape.dtype)))
    return routed


def scored(sequences: Sequence[CanarySequence], log_probs: Sequence[np.ndarray]) -> list[Sample]:
    """Return samples with the measured ``log_probs`` minus the drawn log-ratios as rollout log-probs."""
    return [
        _sample(one, (log_prob[-len(one.log_ratio_R) :] - one.log_ratio_R).astype(np.float32))
        for one, log_prob in zip(sequences, log_probs, strict=True)
    ]


def _lengths(generator: np.random.Generator, spec: CanarySpec) -> list[int]:
    lengths = [2, spec.longest]
    left = spec.tokens - sum(lengths)
    while left >= 2:
        drawn = math.exp(generator.uniform(math.log(2), math.log(spec.longest + 1)))
        lengths.append(min(int(drawn), spec.longest, left))
        left -= lengths[-1]
    return lengths


def _sequence(
    generator: np.random.Generator, length: int, sign: float, vocab: int, bounds: BoundsConfig
) -> CanarySequence:
    prompt = int(generator.integers(1, max(2, length // 4)))
    return CanarySequence(
        token_ids=generator.integers(0, vocab, length).astype(np.int32),
        log_ratio_R=_off_the_edges(generator.normal(scale=_SPREAD, size=length - prompt), bounds),
        advantage=sign * (0.5 + generator.random()),
    )


def _off_the_edges(log_ratio_R: np.ndarray, bounds: BoundsConfig) -> np.ndarray:
    """Move each log-ratio into the middle half of its interval between candidate bounds."""
    candidates = [*low_values(bounds), *high_values(bounds)]
    edges = np.log(sorted({*candidates, bounds.dual_clip or candidates[-1]}))
    edges = np.concatenate([edges[:1] - 1.0, edges, edges[-1:] + 1.0])
    interval_R = np.clip(np.searchsorted(edges, log_ratio_R), 1, len(edges) - 1)
    low_R, high_R = edges[interval_R - 1], edges[interval_R]
    margin_R = (high_R - low_R) / 4
    moved_R: np.ndarray = np.clip(log_ratio_R, low_R + margin_R, high_R - margin_R)
    return moved_R


def _sample(sequence: CanarySequence, rollout_log_prob_R: np.ndarray) -> Sample:
    versions_R = np.zeros(len(rollout_log_prob_R), np.int32)
    return Sample(sequence.token_ids, rollout_log_prob_R, versions_R, sequence.advantage)
