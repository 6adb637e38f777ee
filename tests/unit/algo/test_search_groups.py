"""The search: groups of an update, and repairs, by hand and against the literal algorithm."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from bapo_megatron.algo.bapo import (
    all_measures,
    balanced,
    contribution_sums,
    contributions,
    eq8_literal,
    fixed,
    floored,
    measured_sums,
    published_code,
)
from bapo_megatron.algo.bounds import Bounds, BoundsConfig, high_values, low_values, search_bounds
from bapo_megatron.algo.losses.clip import (
    ClipLoss,
    SearchResult,
    contribution_fn,
    group_of_sequences,
    group_of_tokens,
    search,
    search_groups,
)
from bapo_megatron.algo.objective import Objective
from bapo_megatron.algo.tokens import constant_on
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.trainer.update_loss import UpdateLoss
from bapo_megatron.types import Metrics, MicroBatch, PackLayout, SearchedLoss, TokenStats
from tests.support import literal_bapo as literal
from tests.support.models import random_samples
from tests.unit.algo.test_objective import pack
from tests.unit.trainer.test_update_loss import FakePolicy

GROUPED = dataclasses.replace(balanced(), scope="micro_batch", bounds_tokens=60)


@pytest.mark.parametrize(
    ("lengths", "bounds_tokens", "groups"),
    [
        ((3, 1, 2, 10, 4), 5, (0, 0, 1, 2, 3)),  # stretches of 5; middles 1.5, 3.5, 5, 11, 18
        ((3, 1, 2, 10, 4), 10, (0, 0, 0, 1, 1)),
        ((3, 1, 2, 10, 4), 14, (0, 0, 0, 0, 0)),  # 20 / 14 rounds to one
        ((3, 1, 2, 10, 4), 10**6, (0, 0, 0, 0, 0)),
        ((100, 1, 1), 10, (0, 1, 1)),  # middles 50, 100.5 and 101.5 of 102 in tenths: stretches 4, 9, 9
        ((2, 0, 2), 2, (0, 1, 1)),  # middles 1, 2, 3
        ((0, 0), 2, (0, 0)),
        ((), 2, ()),
    ],
)
def test_the_rule(lengths: tuple[int, ...], bounds_tokens: int, groups: tuple[int, ...]) -> None:
    assert group_of_sequences(lengths, bounds_tokens) == groups


def test_groups_hold_about_as_many_tokens_as_they_should() -> None:
    lengths = tuple(int(n) for n in torch.randint(1, 100, (500,), generator=torch.Generator().manual_seed(0)))
    groups = group_of_sequences(lengths, 1000)
    assert list(groups) == sorted(groups)
    sizes = [
        sum(length for length, group in zip(lengths, groups, strict=True) if group == one)
        for one in sorted(set(groups))
    ]
    assert len(sizes) == round(sum(lengths) / 1000)
    assert max(abs(size - 1000) for size in sizes) < 150


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
        dataclasses.replace(GROUPED, negative_weight="first_pass", weight="rollout_probability"),
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
        assert (one.bounds.low, one.bounds.high) == (theirs.low, theirs.high)
        assert one.bounds.contribution == pytest.approx(theirs.contribution, rel=1e-9)
        assert (one.bounds.rounds, one.bounds.reached) == (theirs.rounds, theirs.reached)
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
) -> tuple[tuple[SearchResult, ...], Metrics, torch.Tensor]:
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
    assert [one.bounds.low for one in found] == [one.bounds.low for one in reference]
    assert [one.bounds.high for one in found] == [one.bounds.high for one in reference]
    torch.testing.assert_close(other, vector, rtol=1e-10, atol=1e-12)
    assert ours.keys() == metrics.keys()
    known = {name: value for name, value in metrics.items() if value is not None}
    assert {name: ours[name] for name in known} == pytest.approx(known, rel=1e-9)


def test_metrics_are_means_over_tokens_and_over_those_that_a_bound_acts_on() -> None:
    """Two groups of four tokens: one all positive, at rest at (0.6, 1.2), one all negative, at (0.9, 3.0).

    c_low acts on the negative tokens alone, c_high on the positive ones: as fixed bounds of (0.9, 1.2).
    """
    samples = [one_response(4, advantage) for advantage in (1.0, -1.0)]
    config = dataclasses.replace(balanced(), scope="micro_batch", bounds_tokens=4)
    found, metrics, _ = metrics_of(samples, config, 64)
    assert [(one.bounds.low, one.bounds.high) for one in found] == [(0.6, 1.2), (0.9, 3.0)]
    assert (metrics["bapo/clip_low"], metrics["bapo/clip_high"]) == pytest.approx((0.75, 2.1))
    in_force = (metrics["bapo/clip_low_negative"], metrics["bapo/clip_high_positive"])
    assert in_force == pytest.approx((0.9, 1.2))
    assert metrics["bapo/one_sign_tokens"] == 1.0
    assert (metrics["bapo/bounds_moved"], metrics["bapo/moved_tokens"]) == (1.0, 0.5)
    assert metrics["bapo/contribution"] == pytest.approx(0.5)  # 1 and 0
    assert metrics["contribution/gradient_ratio_uniform"] == math.inf  # over no negative token
    together, exact, _ = metrics_of(samples, dataclasses.replace(config, bounds_tokens=8), 64)
    assert (len(together), exact["bapo/one_sign_tokens"]) == (1, 0.0)


def test_new_bounds_are_three_copies_to_the_device() -> None:
    """Of what the loss needs, of the metrics' means, and of the bounds in force: the host waits for each."""
    config = dataclasses.replace(balanced(), scope="micro_batch", bounds_tokens=4)
    constant_on.cache_clear()
    copies = []
    for advantage in (1.0, -1.0):
        metrics_of([one_response(4, advantage), one_response(4, -advantage)], config, 64)
        copies.append(constant_on.cache_info().misses)
    assert copies[1] - copies[0] == 3


def one_response(tokens: int, advantage: float) -> Sample:
    """A response at ratio 1."""
    like = random_samples(1, seed=5)[0]
    return Sample(
        like.token_ids[:1].repeat(tokens + 1),
        0 * like.log_probs_R[:1].repeat(tokens),
        like.versions_R[:1].repeat(tokens),
        advantage,
    )


def test_tokens_that_are_not_trained_on_belong_to_the_first_group(samples: list[Sample]) -> None:
    for batch in packed(samples, 64):
        group_T = group_of_tokens(batch, 60)
        assert not group_T[batch.mask_T == 0].any()
        groups = group_of_sequences(batch.trained_tokens, 60)
        expected = [groups[sequence] for sequence in batch.sequence_T.tolist() if sequence >= 0]
        assert group_T[batch.sequence_T >= 0].tolist() == expected


def test_one_group_is_the_search_of_the_update(samples: list[Sample]) -> None:
    packs = packed(samples, 96)
    whole = dataclasses.replace(GROUPED, bounds_tokens=10**6)
    sums = sum(contribution_fn(whole)(stats_of(one), one) for one in packs)
    assert isinstance(sums, torch.Tensor)
    exact = sum(contribution_fn(balanced())(stats_of(one), one) for one in packs)
    assert isinstance(exact, torch.Tensor)
    torch.testing.assert_close(sums, exact, rtol=1e-12, atol=1e-12)
    assert search_groups(sums, whole)[0].bounds.low == search(exact, balanced()).bounds.low


def test_fixed_bounds_need_no_groups() -> None:
    config = dataclasses.replace(fixed(0.8, 1.2), scope="micro_batch", bounds_tokens=8)
    loss = ClipLoss(AlgorithmConfig(bounds=config))
    assert loss.search.known.bounds.low == 0.8


def test_a_pack_that_does_not_know_the_lengths_is_refused(samples: list[Sample]) -> None:
    batch = dataclasses.replace(packed(samples, 96)[0], trained_tokens=())
    with pytest.raises(ValueError, match="knows the lengths of 0 of 30 sequences"):
        contribution_fn(GROUPED)(stats_of(batch), batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bounds_tokens": 0, "scope": "micro_batch"}, "bounds_tokens=0 must be at least 1"),
        ({"bounds_tokens": 9}, "bounds_tokens=9 sizes the searches of scope=micro_batch; with scope=update"),
    ],
)
def test_sizes_that_make_no_sense_are_named(change: dict[str, object], message: str) -> None:
    problems = list(dataclasses.replace(balanced(), **change).problems())  # type: ignore[arg-type]
    assert any(problem.startswith(message) for problem in problems), problems


FIRST_PASS = dataclasses.replace(balanced(), negative_weight="first_pass")
TWO_BY_TWO = BoundsConfig(
    low_start=0.6, low_end=0.8, low_step=0.2, high_start=1.2, high_end=2.0, high_step=0.8, target=0.5
)


def fields(ratios: list[float], advantages: list[float]) -> tuple[torch.Tensor, ...]:
    log_ratio_T = torch.tensor(ratios, dtype=torch.float64).log()
    one_T = torch.ones_like(log_ratio_T)
    return log_ratio_T, torch.tensor(advantages, dtype=torch.float64), -one_T, one_T


@pytest.mark.parametrize(
    ("kind", "negative"),
    [
        ("present", [0.7 + 1.5, 1.5]),  # N(0.6), N(0.8): the token at 0.5 is clipped at both
        ("first_pass", [1.0 + 1.5, 1.5]),
    ],
)
def test_a_suppressed_negative_counts_as_in_the_first_pass(kind: str, negative: list[float]) -> None:
    """Negative tokens at ratios 0.5, 0.7 and 1.5, a positive one at 1.1: P is 1.1 at both c_high."""
    config = dataclasses.replace(TWO_BY_TWO, negative_weight=kind)
    tokens = fields([0.5, 0.7, 1.5, 1.1], [-1.0, -1.0, -1.0, 1.0])
    assert contribution_sums(*tokens, config).tolist() == pytest.approx([1.1, 1.1, *negative])


def test_the_share_of_a_stale_batch_no_longer_rises_by_suppression() -> None:
    """One positive and two negative tokens; a pass later the negative ones have ratio 0.8.

    Share at rest, first pass: 1 / 3. Then, with the present ratio: 1 / (1 + 1.6) = 0.385; repaired: 1 / 3.
    """
    for ratio, kind, share in [
        (1.0, "present", 1 / 3),
        (0.8, "present", 1 / 2.6),
        (0.8, "first_pass", 1 / 3),
    ]:
        config = dataclasses.replace(TWO_BY_TWO, negative_weight=kind)
        sums = contribution_sums(*fields([1.0, ratio, ratio], [1.0, -1.0, -1.0]), config).tolist()
        assert sums[0] / (sums[0] + sums[2]) == pytest.approx(share)


@pytest.mark.parametrize("weight", ["uniform", "rollout_probability"])
def test_the_repaired_sums_are_the_literal_ones(weight: str) -> None:
    config = dataclasses.replace(FIRST_PASS, weight=weight)
    generator = torch.Generator().manual_seed(4)
    log_ratio_T = torch.randn(300, generator=generator) * 0.5
    advantage_T = torch.randn(300, generator=generator)
    rollout_T = -torch.rand(300, generator=generator)
    mask_T = (torch.rand(300, generator=generator) > 0.2).float()
    tokens = [
        literal.Token(*(float(value) for value in row))
        for row in zip(log_ratio_T, advantage_T, rollout_T, mask_T, strict=True)
    ]
    expected = [literal.positive_sum(tokens, high, config) for high in high_values(config)]
    expected += [literal.negative_sum(tokens, low, config) for low in low_values(config)]
    sums = contribution_sums(log_ratio_T, advantage_T, rollout_T, mask_T, config)
    assert sums.tolist() == pytest.approx(expected, rel=1e-9)
    found, theirs = search_bounds(sums, config), literal.search_tokens(tokens, config)
    assert (found.low, found.high, found.rounds) == (theirs.low, theirs.high, theirs.rounds)


def test_the_logged_contributions_stay_those_of_the_paper() -> None:
    """The repair adds sums of its own before them, and changes none."""
    tokens = fields([0.5, 0.7, 1.5, 1.1], [-1.0, -1.0, -1.0, 1.0])
    plain, repaired = measured_sums(*tokens, balanced()), measured_sums(*tokens, FIRST_PASS)
    assert len(repaired) == len(plain) + 53
    row = all_measures(FIRST_PASS).index(balanced())
    torch.testing.assert_close(repaired[53 * row :][:53], plain[:53], rtol=1e-12, atol=0)
    found = search_bounds(repaired[:53], FIRST_PASS)
    logged = contributions(repaired, found, FIRST_PASS)
    assert logged == pytest.approx(contributions(plain, found, balanced()))
    assert not torch.equal(repaired[:53], plain[:53])


def test_a_held_search_begins_where_the_last_one_ended() -> None:
    """P = 1, 2 at c_high 1.2, 2.0 and N = 4, 3, at c_low 0.6, 0.8; the target is 1 / 2."""
    sums = [1.0, 2.0, 4.0, 1.5]
    assert search_bounds(sums, TWO_BY_TWO) == Bounds(0.8, 2.0, 2 / 3.5, 2, True)
    assert search_bounds([1.0, 2.0, 2.0, 1.5], TWO_BY_TWO) == Bounds(0.6, 2.0, 0.5, 1, True)
    # From 0.8 on, c_high still begins at its start: 1 / 2.5 = 0.4, then 2 / 3.5.
    assert search_bounds([1.0, 2.0, 2.0, 1.5], TWO_BY_TWO, 0.8) == Bounds(0.8, 2.0, 2 / 3.5, 1, True)
    assert search_bounds([3.0, 3.0, 2.0, 1.5], TWO_BY_TWO, 0.8) == Bounds(0.8, 1.2, 3 / 4.5, 0, True)
    assert search_bounds([0.0] * 4, TWO_BY_TWO, 0.8) == Bounds(0.8, 1.2, 0.0, 0, False)
    low_first = dataclasses.replace(TWO_BY_TWO, order="low_first")
    assert search_bounds([1.0, 2.0, 9.0, 9.0], low_first, 0.8) == Bounds(0.8, 2.0, 2 / 11, 1, False)


def test_a_held_search_is_the_literal_one() -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        rows = torch.randn(60, 2, generator=generator).tolist()
        tokens = [literal.Token(0.3 * log_ratio, advantage - 0.3, -1.0, 1.0) for log_ratio, advantage in rows]
        columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)]
        for lowest in (0.6, 0.7, 0.84, 0.9):
            found = search_bounds(contribution_sums(*columns, balanced()), balanced(), lowest)
            theirs = literal.search_tokens(tokens, balanced(), lowest)
            assert (found.low, found.high, found.rounds) == (theirs.low, theirs.high, theirs.rounds)


# At the ratio 2 of FakePolicy: nothing but negative tokens, so that the search runs to its ends; and as
# many of both signs.
SCARCE = [pack([-1.0], [-1.0], [1.0], [7])]
PLENTY = [pack([1.0, -1.0], [-1.0, -1.0], [1.0, 1.0], [7, 7])]
HELD = dataclasses.replace(balanced(), low_within_batch="held", target=0.3)


@pytest.mark.parametrize("hold", [False, True])
def test_c_low_never_falls_within_a_batch(hold: bool) -> None:
    """Also where the update searches itself, and after a resume within the batch; the next begins anew."""
    policy = FakePolicy()
    clipping = UpdateLoss(AlgorithmConfig(bounds=HELD), hold)
    lows = []
    for packs, step_version in [(PLENTY, 7), (SCARCE, 7), (PLENTY, 7), (PLENTY, 9)]:
        loss, _ = clipping.loss(policy, packs, False, step_version)  # type: ignore[arg-type]
        if isinstance(loss, SearchedLoss):
            loss = loss.loss_of(policy.losses(packs, loss.measure))
        sums = policy.losses(packs, loss)
        clipping.observe(sums)
        metrics = clipping.objective.metrics(sums, clipping.found)
        lows.append(metrics["bapo/clip_low"])
        resumed = UpdateLoss(AlgorithmConfig(bounds=HELD), hold)
        resumed.load_state(json.loads(json.dumps(clipping.state())))
        clipping = resumed
    assert lows == [0.6, 0.9, 0.9, 0.6]


def test_a_held_c_low_counts_as_a_moved_bound() -> None:
    """The second search makes no move: its share is 1/2 at once. But its c_low is 0.9, the first one's."""
    policy = FakePolicy()
    clipping = UpdateLoss(AlgorithmConfig(bounds=dataclasses.replace(HELD, high_start=2.5)))
    rows = []
    for packs, step_version in [(SCARCE, 7), (PLENTY, 7), (PLENTY, 9)]:
        loss, _ = clipping.loss(policy, packs, False, step_version)  # type: ignore[arg-type]
        sums = policy.losses(packs, loss)  # type: ignore[arg-type]
        clipping.observe(sums)
        metrics = clipping.objective.metrics(sums, clipping.found)
        names = ("clip_low", "rounds", "bounds_moved", "moved_tokens")
        rows.append([metrics[f"bapo/{name}"] for name in names])
    assert rows == [[0.9, 25.0, 1.0, 1.0], [0.9, 0.0, 1.0, 1.0], [0.6, 0.0, 0.0, 0.0]]


def test_a_search_without_held_bounds_has_no_state() -> None:
    clipping = UpdateLoss(AlgorithmConfig(bounds=balanced()))
    policy = FakePolicy()
    loss, _ = clipping.loss(policy, PLENTY, False, 7)  # type: ignore[arg-type]
    clipping.observe(policy.losses(PLENTY, loss))  # type: ignore[arg-type]
    assert clipping.state() is None


def test_the_floor_is_a_start() -> None:
    assert low_values(floored()) == [0.8, 0.82, 0.84, 0.86, 0.88, 0.9]
    assert dataclasses.replace(floored(), low_start=0.6) == balanced()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            dataclasses.replace(eq8_literal(), negative_weight="first_pass"),
            "negative_weight=first_pass leaves out clipped tokens, measure=surrogate",
        ),
        (
            dataclasses.replace(balanced(), low_within_batch="held", scope="micro_batch"),
            "low_within_batch=held needs one c_low for the update, and scope=micro_batch has many",
        ),
    ],
)
def test_repairs_that_make_no_sense_are_named(config: BoundsConfig, message: str) -> None:
    assert any(problem.startswith(message) for problem in config.problems()), list(config.problems())


def test_sound_repairs_have_no_problems() -> None:
    both = dataclasses.replace(FIRST_PASS, low_within_batch="held")
    grouped = dataclasses.replace(FIRST_PASS, scope="micro_batch", bounds_tokens=100)
    lagged = dataclasses.replace(both, scope="lagged")
    assert not any(problem for config in (both, grouped, lagged) for problem in config.problems())
    assert math.isclose(FIRST_PASS.target, 0.4)
