"""Random batches against the literal Algorithm 1, under every reading of Eq. 8."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bapo_megatron.algo import bapo
from bapo_megatron.algo.bounds import (
    Bounds,
    BoundsConfig,
    Measure,
    Order,
    Share,
    Weight,
    high_values,
    low_values,
    search_bounds,
)
from tests.support import literal_bapo as literal
from tests.support.literal_bapo import Token

RANGES: list[dict[str, float]] = [
    {},  # the paper's
    {"low_start": 0.6, "low_end": 0.8, "low_step": 0.05, "high_start": 1.2, "high_end": 2.0},
    {"low_start": 0.8, "low_end": 0.8, "high_start": 1.2, "high_end": 1.2},
    {"low_start": 0.8, "low_end": 0.8, "high_start": 1.25, "high_end": 1.6, "high_step": 0.1},
    {"low_start": 0.5, "low_end": 0.9, "low_step": 0.15, "high_start": 1.5, "high_end": 1.5},
]
READINGS = list(itertools.product(get_args(Measure), get_args(Share), get_args(Weight), get_args(Order)))
FIELDS = ("log_ratio", "advantage", "rollout_log_prob", "mask")


def examples(number: int) -> Any:
    return settings(max_examples=number, derandomize=True)


@st.composite
def configs(draw: st.DrawFn) -> BoundsConfig:
    measure, share, weight, order = draw(st.sampled_from(READINGS))
    return BoundsConfig(
        measure=measure,
        share=share,
        weight=weight,
        order=order,
        target=draw(st.floats(0.05, 0.95)),
        dual_clip=draw(st.sampled_from([None, 3.0])),
        **draw(st.sampled_from(RANGES)),
    )


def bounds_of(config: BoundsConfig) -> list[float]:
    lows = literal.candidates(config.low_start, config.low_end, config.low_step)
    return lows + literal.candidates(config.high_start, config.high_end, config.high_step)


def tokens_for(config: BoundsConfig, signs: str) -> st.SearchStrategy[list[Token]]:
    """Tokens with ratios on and off the bounds, extreme ratios, and padding full of rubbish."""
    on_a_bound = st.sampled_from([math.log(bound) for bound in bounds_of(config)])
    extreme = st.sampled_from([0.0, 20.0, -20.0, 1e3, -1e3, math.inf, -math.inf])
    size = st.one_of(st.sampled_from([0.5, 1.0]), st.floats(0.01, 3.0))
    factor = {"both": [-1.0, 1.0, 0.0], "positive": [1.0], "negative": [-1.0], "zero": [0.0]}[signs]
    token = st.builds(
        lambda log_ratio, sign, size, log_prob, mask: Token(log_ratio, sign * size, log_prob, mask),
        st.one_of(st.floats(-1.5, 1.5), on_a_bound, extreme),
        st.sampled_from(factor),
        size,
        st.one_of(st.just(0.0), st.floats(-30.0, 0.0)),
        st.sampled_from([1.0, 1.0, 0.25]),
    )
    rubbish = st.sampled_from([math.nan, math.inf, -math.inf, 0.3])
    padding = st.builds(Token, rubbish, rubbish, rubbish, st.just(0.0))
    return st.lists(st.one_of(token, token, token, padding), max_size=8)


@st.composite
def cases(draw: st.DrawFn) -> tuple[BoundsConfig, dict[str, torch.Tensor], list[Token]]:
    """A config, a batch as tensors of either precision, and the same numbers as literal tokens."""
    config = draw(configs())
    signs = draw(st.sampled_from(["both", "both", "both", "positive", "negative", "zero"]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    tensors = tensors_of(draw(tokens_for(config, signs)), dtype)
    return config, tensors, tokens_of(tensors)


def tensors_of(tokens: list[Token], dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    return {
        f"{name}_T": torch.tensor([getattr(token, name) for token in tokens], dtype=dtype) for name in FIELDS
    }


def tokens_of(tensors: dict[str, torch.Tensor]) -> list[Token]:
    columns = [tensors[f"{name}_T"].tolist() for name in FIELDS]
    return [Token(*values) for values in zip(*columns, strict=True)]


def literal_sums(tokens: list[Token], config: BoundsConfig) -> list[float]:
    highs = literal.candidates(config.high_start, config.high_end, config.high_step)
    lows = literal.candidates(config.low_start, config.low_end, config.low_step)
    return [literal.positive_sum(tokens, c, config) for c in highs] + [
        literal.negative_sum(tokens, c, config) for c in lows
    ]


def outcome(found: Bounds | literal.Found) -> tuple[float, float, int, bool]:
    return found.low, found.high, found.rounds, found.reached


def close(values: list[float]) -> Any:
    return pytest.approx(values, rel=1e-12, abs=1e-300)


@examples(100)
@given(cases())
def test_sums_are_those_of_loops_over_tokens(case: Any) -> None:
    config, tensors, tokens = case
    assert bapo.contribution_sums(**tensors, config=config).tolist() == close(literal_sums(tokens, config))


@examples(80)
@given(st.data(), configs())
def test_search_on_given_sums_is_the_literal_loop(data: st.DataObject, config: BoundsConfig) -> None:
    """Small whole numbers: ties, zero denominators and a target that is met exactly are frequent."""
    config = dataclasses.replace(config, target=data.draw(st.sampled_from([0.25, 0.5, 0.75, config.target])))
    bounds = bounds_of(config)
    numbers = st.lists(st.integers(0, 4).map(float), min_size=len(bounds), max_size=len(bounds))
    sums = dict(zip(bounds, data.draw(numbers), strict=True))
    assume(any(sums.values()))
    found = search_bounds([sums[c] for c in high_values(config) + low_values(config)], config)
    expected = literal.search(sums.__getitem__, sums.__getitem__, config)
    assert found == Bounds(*expected, dual_clip=config.dual_clip)


@examples(100)
@given(cases())
def test_bounds_are_those_of_the_literal_algorithm(case: Any) -> None:
    config, tensors, tokens = case
    assume(not nearly_tied(tokens, config))
    found = search_bounds(bapo.contribution_sums(**tensors, config=config), config)
    expected = literal.search_tokens(tokens, config)
    assert outcome(found) == outcome(expected)
    assert found.contribution == pytest.approx(expected.contribution, rel=1e-6)


def nearly_tied(tokens: list[Token], config: BoundsConfig) -> bool:
    """Whether the order of a sum's terms could decide: a share at the target, or P - N that cancels."""
    sums = literal_sums(tokens, config)
    highs = len(literal.candidates(config.high_start, config.high_end, config.high_step))
    for positive, negative in itertools.product(sums[:highs], sums[highs:]):
        rho = literal.contribution(positive, negative, config.share)
        if math.isclose(rho, config.target, rel_tol=1e-7):
            return True
        cancels = abs(positive - negative) < 1e-6 * (positive + negative)
        if config.share == "signed" and cancels:
            return True
    return False


@examples(100)
@given(cases(), st.data())
def test_loss_and_its_gradient_are_those_of_loops_over_tokens(case: Any, data: st.DataObject) -> None:
    config, tensors, tokens = case
    low = data.draw(st.sampled_from(low_values(config)))
    high = data.draw(st.sampled_from(high_values(config)))
    log_ratio_T = tensors["log_ratio_T"].double().requires_grad_()
    loss = bapo.policy_loss(
        log_ratio_T, tensors["advantage_T"], tensors["mask_T"], Bounds(low, high, dual_clip=config.dual_clip)
    )
    loss.backward()
    values = [literal.token_loss(token, low, high, config.dual_clip) for token in tokens]
    gradients = [literal.token_gradient(token, low, high, config.dual_clip) for token in tokens]
    assert log_ratio_T.grad is not None
    assert loss.item() == pytest.approx(sum(values), rel=1e-12, abs=1e-14 * sum(map(abs, values)))
    assert log_ratio_T.grad.tolist() == close(gradients)


@examples(80)
@given(cases(), st.data())
def test_sums_of_parts_add_up(case: Any, data: st.DataObject) -> None:
    config, tensors, tokens = case
    cut = data.draw(st.integers(0, len(tokens)))
    whole, first, second = (
        bapo.contribution_sums(**{name: field[span] for name, field in tensors.items()}, config=config)
        for span in (slice(None), slice(cut), slice(cut, None))
    )
    assert (first + second).tolist() == close(whole.tolist())


@examples(100)
@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_tokens_does_not_matter(case: Any, random: Any) -> None:
    config, tensors, tokens = case
    assume(not nearly_tied(tokens, config))
    shuffled = random.sample(range(len(tokens)), len(tokens))
    permuted = {name: field[shuffled] for name, field in tensors.items()}
    one = bapo.contribution_sums(**tensors, config=config)
    other = bapo.contribution_sums(**permuted, config=config)
    assert other.tolist() == close(one.tolist())
    assert outcome(search_bounds(one, config)) == outcome(search_bounds(other, config))


@examples(100)
@given(cases(), st.integers(1, 5))
def test_padding_changes_nothing(case: Any, padding: int) -> None:
    config, tensors, _ = case
    rubbish = {name: torch.full((padding,), math.nan, dtype=field.dtype) for name, field in tensors.items()}
    rubbish["mask_T"].zero_()
    padded = {name: torch.cat([field, rubbish[name]]) for name, field in tensors.items()}
    without, with_padding = (bapo.contribution_sums(**batch, config=config) for batch in (tensors, padded))
    assert torch.equal(without, with_padding)
