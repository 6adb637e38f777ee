"""Sums of tokens that are masked, as on a GPU, against sums of tokens that are selected, as on a CPU."""

from __future__ import annotations

import math

import pytest
import torch

from bapo_megatron.algo import surrogate, tokens
from bapo_megatron.algo.bapo import balanced, eq8_literal, measured_sums
from bapo_megatron.algo.losses import build_loss
from bapo_megatron.algo.measurements import PackView, token_mean
from bapo_megatron.algo.objective import Objective
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.types import MicroBatch, TokenStats

TOKENS = 400
CPU = torch.device("cpu")


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tokens, surrogate):
        monkeypatch.setattr(module, "selects", lambda _device: False)


def pack(masked: float = 0.3) -> tuple[TokenStats, MicroBatch]:
    """Ratios of which candidates clip some, and masked tokens full of rubbish."""
    generator = torch.Generator().manual_seed(1)
    normal_T, old_T = (torch.randn(TOKENS, generator=generator) for _ in range(2))
    mask_T = (torch.rand(TOKENS, generator=generator) > masked).float()
    rubbish_T = torch.tensor([math.nan, math.inf, -math.inf, 7.0]).repeat(TOKENS // 4)
    log_prob_T = torch.where(mask_T == 0, rubbish_T, -3 + 0.4 * normal_T)
    batch = MicroBatch.of(
        (0, TOKENS),
        mask_T=mask_T,
        weight_T=mask_T * torch.rand(TOKENS, generator=generator),
        advantage_T=mask_T * torch.randn(TOKENS, generator=generator),
        rollout_log_prob_T=-3 + 0.1 * old_T,
        old_log_prob_T=-3 + 0.1 * old_T,
        version_T=torch.randint(0, 9, (TOKENS,), generator=generator, dtype=torch.int32),
    )
    return TokenStats(log_prob_T, torch.where(mask_T == 0, rubbish_T, normal_T.abs())), batch


def vector(config: AlgorithmConfig) -> torch.Tensor:
    stats, batch = pack()
    loss = build_loss(config)
    assert loss.search is not None
    found = loss.search.find(loss.search.measure(stats, batch))
    return Objective(loss).token_fn(found, 8)(stats, batch)


@pytest.mark.parametrize("bounds", [eq8_literal(), balanced()])
def test_the_vector_of_an_update_is_the_same(bounds: object, request: pytest.FixtureRequest) -> None:
    """To the rounding of float64 sums in another order, and finite."""
    selected = vector(AlgorithmConfig(bounds=bounds))
    request.getfixturevalue("as_on_a_gpu")
    masked = vector(AlgorithmConfig(bounds=bounds))
    assert masked.isfinite().all()
    assert len(masked.unique()) > 100
    torch.testing.assert_close(masked, selected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("bounds", [eq8_literal(), balanced()])
def test_the_sums_of_the_search_are_the_same_to_the_bit(
    bounds: object, request: pytest.FixtureRequest
) -> None:
    stats, batch = pack()
    fields = (stats.log_prob_T - batch.old_log_prob_T, batch.advantage_T, batch.rollout_log_prob_T)
    selected = measured_sums(*fields, batch.weight_T, bounds)
    request.getfixturevalue("as_on_a_gpu")
    assert torch.equal(measured_sums(*fields, batch.weight_T, bounds), selected)


def test_a_nan_in_a_token_of_the_loss_reaches_the_result(as_on_a_gpu: None) -> None:
    one_T = torch.ones(2)
    found = measured_sums(torch.tensor([0.1, math.nan]), one_T, -one_T, one_T, balanced())
    assert found.isnan().all()


@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_a_mean_takes_all_tokens_or_those_that_count(on_a_gpu: bool, request: pytest.FixtureRequest) -> None:
    """The mean of 1, 2 and 4, whose other token is nan; a function may select for itself."""
    if on_a_gpu:
        request.getfixturevalue("as_on_a_gpu")
    entropy_T, mask_T = torch.tensor([1.0, math.nan, 2.0, 4.0]), torch.tensor([1.0, 0.0, 1.0, 1.0])
    batch = MicroBatch.of((0, 4), mask_T=mask_T)
    view = PackView(TokenStats(entropy_T, entropy_T), batch, None, None, 0)  # type: ignore[arg-type]
    for values in (lambda v: v.stats.entropy_T, lambda v: v.stats.entropy_T[v.live_T]):
        assert token_mean("mine", values).sums(view).tolist() == [7.0]


def test_a_constant_is_made_once() -> None:
    assert tokens.constant_on(CPU, (1.0, 2.5)) is tokens.constant_on(CPU, (1.0, 2.5))
    assert tokens.constant_on(CPU, (1, 2), torch.int64).tolist() == [1, 2]


def test_a_cpu_selects_and_a_gpu_does_not() -> None:
    assert tokens.selects(CPU)
    assert not tokens.selects(torch.device("cuda", 0))
