"""The search in groups of an update, by hand and against the literal algorithm."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bapo_megatron.algo.bapo import balanced, fixed, published_code
from bapo_megatron.algo.bounds import Bounds, BoundsConfig
from bapo_megatron.algo.losses.clip import (
    ClipLoss,
    contribution_fn,
    group_of_sequences,
    search_groups,
)
from bapo_megatron.algo.objective import Objective
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.tensor_types import MicroBatch, TokenStats
from bapo_megatron.types import Metrics, PackLayout
from tests.support import literal_bapo as literal
from tests.support.models import random_samples

GROUPED = dataclasses.replace(balanced(), scope="micro_batch", bounds_tokens=60)


@pytest.mark.parametrize(
    ("lengths", "bounds_tokens", "groups"),
    [
        ((3, 1, 2, 10, 4), 5, (0, 0, 1, 2, 3)),  # stretches of 5; middles 1.5, 3.5, 5, 11, 18
        ((3, 1, 2, 10, 4), 10, (0, 0, 0, 1, 1)),
        ((3, 1, 2, 10, 4), 14, (0, 0, 0, 0, 0)),  # 20 / 14 rounds to one
        ((100, 1, 1), 10, (0, 1, 1)),  # middles 50, 100.5 and 101.5 of 102 in tenths: stretches 4, 9, 9
        ((2, 0, 2), 2, (0, 1, 1)),  # middles 1, 2, 3
        ((), 2, ()),
    ],
)
def test_the_rule(lengths: tuple[int, ...], bounds_tokens: int, groups: tuple[int, ...]) -> None:
    assert group_of_sequences(lengths, bounds_tokens) == groups


def stats_of(batch: MicroBatch) -> TokenStats:
    """Log-probs that differ from the rollout's by a function of each token alone, whatever its pack."""
    noise_T = 0.6 * torch.sin(1000 * batch.rollout_log_prob_T.double())
    log_prob_T = torch.where(batch.mask_T != 0, batch.old_log_prob_T + noise_T.float(), 0.0)
    return TokenStats(log_prob_T, torch.zeros_like(log_prob_T))


def packed(samples: list[Sample], pack_tokens: int, replicas: int = 1) -> list[MicroBatch]:
    """The packs of all replicas; advantages of a group of three sequences have one sign in two cases."""
    layouts = [PackLayout(rank, replicas) for rank in range(replicas)]
    return [pack for layout in layouts for pack in pack_samples(samples, pack_tokens, "sequence", layout)]


def literal_tokens(packs: list[MicroBatch], groups: tuple[int, ...]) -> list[list[literal.Token]]:
    """The trained tokens of each group, as the literal algorithm takes them."""
    found: list[list[literal.Token]] = [[] for _ in range(1 + max(groups))]
    for batch in packs:
        columns = (batch.advantage_T, batch.rollout_log_prob_T, batch.weight_T, batch.sequence_T)
        log_ratio_T = stats_of(batch).log_prob_T - batch.old_log_prob_T
        for *token, sequence in zip(*(column.tolist() for column in (log_ratio_T, *columns)), strict=True):
            if sequence >= 0:
                found[groups[sequence]].append(literal.Token(*token))
    return found


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Sequences of both signs in turns, negative ones a little longer; the first eight have one sign."""
    drawn = random_samples(30, seed=3, longest=30)
    return [
        dataclasses.replace(one, advantage=0.9 if at < 8 or at % 2 else -0.8) for at, one in enumerate(drawn)
    ]


@pytest.mark.parametrize(
    "config",
    [
        GROUPED,
        dataclasses.replace(GROUPED, weight="rollout_probability"),
        dataclasses.replace(published_code(), bounds_tokens=40),
    ],
)
def test_every_group_is_searched_by_itself(config: BoundsConfig, samples: list[Sample]) -> None:
    """Bounds, contribution and loss are those of the literal algorithm on each group's tokens."""
    packs = packed(samples, 96)
    groups = group_of_sequences(packs[0].trained_tokens, config.bounds_tokens or 0)
    tokens = literal_tokens(packs, groups)
    assert len(tokens) >= 4
    measure = contribution_fn(config)
    found = search_groups(sum(measure(stats_of(one), one) for one in packs), config)  # type: ignore[arg-type]
    expected = [literal.search_tokens(one, config) for one in tokens]
    for one, theirs in zip(found, expected, strict=True):
        assert (one.low, one.high) == (theirs.low, theirs.high)
        assert one.contribution == pytest.approx(theirs.contribution, rel=1e-9)
        assert (one.rounds, one.reached) == (theirs.rounds, theirs.reached)
    assert len({(one.low, one.high) for one in expected}) >= (3 if config.measure == "gradient" else 2)
    one_sign = [len({token.advantage > 0 for token in one if token.advantage}) == 1 for one in tokens]
    assert [one.one_sign for one in found] == one_sign
    assert 0 < sum(one_sign) < len(tokens)
    loss = ClipLoss(AlgorithmConfig(bounds=config))
    terms = [loss.terms(stats_of(one), one, found) for one in packs]
    value = sum(
        literal.token_loss(token, theirs.low, theirs.high, config.dual_clip)
        for one, theirs in zip(tokens, expected, strict=True)
        for token in one
    )
    assert sum(float(one.loss) for one in terms) == pytest.approx(value, rel=1e-9)
    slope = sum(
        abs(literal.token_gradient(token, theirs.low, theirs.high, config.dual_clip))
        for one, theirs in zip(tokens, expected, strict=True)
        for token in one
    )
    ours = sum(
        float((term.gradient_T * one.weight_T * one.advantage_T.abs()).sum())
        for term, one in zip(terms, packs, strict=True)
    )
    assert ours == pytest.approx(slope, rel=1e-6)


def metrics_of(
    samples: list[Sample], config: BoundsConfig, *packing: int
) -> tuple[tuple[Bounds, ...], Metrics, torch.Tensor]:
    packs = packed(samples, *packing)
    objective = Objective(ClipLoss(AlgorithmConfig(bounds=config)))
    search_of = objective.loss.search
    assert search_of is not None
    found = search_of.find(sum(search_of.measure(stats_of(one), one) for one in packs))
    vector = sum(objective.token_fn(found, 9)(stats_of(one), one) for one in packs)
    assert isinstance(vector, torch.Tensor)
    return found, objective.metrics(vector, found), vector


@pytest.mark.parametrize("packing", [(64,), (4096,), (96, 2), (64, 3)])
def test_packs_and_replicas_change_nothing(packing: tuple[int, ...], samples: list[Sample]) -> None:
    """Micro-batch scope with groups is one answer; replicas beyond the samples get dummies."""
    reference, metrics, vector = metrics_of(samples, GROUPED, 96)
    found, ours, other = metrics_of(samples, GROUPED, *packing)
    assert [one.low for one in found] == [one.low for one in reference]
    assert [one.high for one in found] == [one.high for one in reference]
    torch.testing.assert_close(other, vector, rtol=1e-10, atol=1e-12)
    assert ours.keys() == metrics.keys()
    known = {name: value for name, value in metrics.items() if value is not None}
    assert {name: ours[name] for name in known} == pytest.approx(known, rel=1e-9)


def test_metrics_are_means_over_tokens() -> None:
    """Six positive tokens in one group, at rest at (0.6, 1.2), four negative in another, at (0.9, 3.0)."""
    samples = [one_response(6, 1.0), one_response(4, -1.0)]
    config = dataclasses.replace(balanced(), scope="micro_batch", bounds_tokens=4)
    found, metrics, _ = metrics_of(samples, config, 64)
    assert [(one.low, one.high) for one in found] == [(0.6, 1.2), (0.9, 3.0)]
    assert (metrics["bapo/clip_low"], metrics["bapo/clip_high"]) == pytest.approx((0.72, 1.92))
    assert metrics["bapo/one_sign_tokens"] == 1.0
    assert (metrics["bapo/bounds_moved"], metrics["bapo/moved_tokens"]) == (1.0, 0.4)
    assert metrics["bapo/contribution"] == pytest.approx(0.6)  # 1 and 0
    together, exact, _ = metrics_of(samples, dataclasses.replace(config, bounds_tokens=10), 64)
    assert (len(together), exact["bapo/one_sign_tokens"]) == (1, 0.0)


def one_response(tokens: int, advantage: float) -> Sample:
    """A response at ratio 1."""
    like = random_samples(1, seed=5)[0]
    return Sample(
        like.token_ids[:1].repeat(tokens + 1),
        0 * like.log_probs_R[:1].repeat(tokens),
        like.versions_R[:1].repeat(tokens),
        advantage,
    )


def test_groups_need_lengths_unless_bounds_are_fixed(samples: list[Sample]) -> None:
    fixed_bounds = dataclasses.replace(fixed(0.8, 1.2), scope="micro_batch", bounds_tokens=8)
    assert ClipLoss(AlgorithmConfig(bounds=fixed_bounds)).search.known.low == 0.8
    batch = dataclasses.replace(packed(samples, 96)[0], trained_tokens=())
    with pytest.raises(IndexError):  # not as one group
        contribution_fn(GROUPED)(stats_of(batch), batch)
