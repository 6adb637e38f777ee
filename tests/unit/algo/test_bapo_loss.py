"""Sums, loss and counts on tokens that a reader can check by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bapo_megatron.algo import bapo, surrogate
from bapo_megatron.algo.bounds import Bounds, BoundsConfig, search_bounds
from bapo_megatron.algo.measurements import clip_fractions
from tests.support.bapo_objective import clip_sums

# c_high in 1.5, 2.0 and c_low in 0.5, 0.75.
GRID = BoundsConfig(
    low_start=0.5, low_end=0.75, low_step=0.25, high_start=1.5, high_end=2.0, high_step=0.5, target=0.5
)
# Five tokens: ratio, advantage, pi_rollout.
RATIOS = [1.0, 1.75, 4.0, 0.6, 1.0]
ADVANTAGES = [1.0, 1.0, 0.5, -1.0, -2.0]
PROBABILITIES = [0.5, 0.25, 0.1, 0.2, 0.4]


def float64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def batch(mask: list[float] | None = None) -> dict[str, Tensor]:
    return {
        "log_ratio_T": float64(RATIOS).log(),
        "advantage_T": float64(ADVANTAGES),
        "rollout_log_prob_T": float64(PROBABILITIES).log(),
        "mask_T": float64(mask or [1.0] * 5),
    }


def approx(values: Any) -> Any:
    return pytest.approx(values, rel=1e-12, abs=1e-15)


def sums(measure: str, weight: str, **changes: Any) -> list[float]:
    config = dataclasses.replace(GRID, measure=measure, weight=weight)
    return bapo.contribution_sums(**{**batch(), **changes}, config=config).tolist()


@pytest.mark.parametrize(
    ("measure", "weight", "expected"),
    [
        # P(1.5) = 1 * 1.0 + 1 * 1.5 + 0.5 * 1.5 = 3.25     P(2.0) = 1 * 1.0 + 1 * 1.75 + 0.5 * 2.0 = 3.75
        # N(0.5) = 1 * 0.6 + 2 * 1.0 = 2.6                  N(0.75) = 1 * 0.75 + 2 * 1.0 = 2.75
        ("surrogate", "uniform", [3.25, 3.75, 2.6, 2.75]),
        # P(1.5) = 1.0          P(2.0) = 1.0 + 1.75 = 2.75        (4.0 is clipped at both)
        # N(0.5) = 0.6 + 2.0    N(0.75) = 2.0                     (0.6 is clipped at 0.75)
        ("gradient", "uniform", [1.0, 2.75, 2.6, 2.0]),
        # P(1.5) = 0.5 * 1.0 + 0.25 * 1.5 + 0.1 * 0.75 = 0.95    P(2.0) = 0.5 + 0.25 * 1.75 + 0.1 = 1.0375
        # N(0.5) = 0.2 * 0.6 + 0.4 * 2.0 = 0.92                  N(0.75) = 0.2 * 0.75 + 0.8 = 0.95
        ("surrogate", "rollout_probability", [0.95, 1.0375, 0.92, 0.95]),
        # P(1.5) = 0.5    P(2.0) = 0.5 + 0.25 * 1.75 = 0.9375    N(0.5) = 0.12 + 0.8 = 0.92    N(0.75) = 0.8
        ("gradient", "rollout_probability", [0.5, 0.9375, 0.92, 0.8]),
    ],
)
def test_sums_by_hand(measure: str, weight: str, expected: list[float]) -> None:
    assert sums(measure, weight) == approx(expected)


def test_mask_is_a_weight() -> None:
    # Half of the first token: P loses 0.5; a quarter of the fourth: N(0.5) loses 0.45, N(0.75) 0.5625.
    halved = float64([0.5, 1.0, 1.0, 0.25, 1.0])
    assert sums("surrogate", "uniform", mask_T=halved) == approx([2.75, 3.25, 2.15, 2.1875])


def test_token_on_a_bound_is_clipped() -> None:
    on_bounds = {
        "log_ratio_T": float64([math.log(1.5), math.log(0.75)]),
        "advantage_T": float64([1.0, -1.0]),
        "rollout_log_prob_T": float64([0.0, 0.0]),
        "mask_T": float64([1.0, 1.0]),
    }
    gradient = dataclasses.replace(GRID, measure="gradient")
    assert bapo.contribution_sums(**on_bounds, config=gradient).tolist() == approx([0.0, 1.5, 0.75, 0.0])


@pytest.mark.parametrize(
    ("ratios", "surrogate", "gradient"),
    [
        # No candidate clips any: P = 1.0 + 0.1, N = 1.0 + 9.0.
        ([1.0, 0.1, 1.0, 9.0], [1.1, 1.1, 10.0, 10.0], [1.1, 1.1, 10.0, 10.0]),
        # Every candidate clips all.
        ([4.0, 4.0, 0.1, 0.1], [3.0, 4.0, 1.0, 1.5], [0.0] * 4),
        # The last candidate of c_high and the first of c_low clip none.
        ([1.75, 1.75, 0.6, 0.6], [3.0, 3.5, 1.2, 1.5], [0.0, 3.5, 1.2, 0.0]),
    ],
)
def test_batches_where_no_candidate_and_where_every_candidate_clips(
    ratios: list[float], surrogate: list[float], gradient: list[float]
) -> None:
    changes = {
        "log_ratio_T": float64(ratios).log(),
        "advantage_T": float64([1.0, 1.0, -1.0, -1.0]),
        "rollout_log_prob_T": torch.zeros(4),
        "mask_T": torch.ones(4),
    }
    assert sums("surrogate", "uniform", **changes) == approx(surrogate)
    assert sums("gradient", "uniform", **changes) == approx(gradient)


def test_sums_leave_their_input_alone() -> None:
    fields, before = batch([1.0, 0.0, 0.5, 1.0, 1.0]), batch([1.0, 0.0, 0.5, 1.0, 1.0])
    bapo.contribution_sums(**fields, config=GRID)
    assert all(torch.equal(fields[name], before[name]) for name in fields)


def test_log_ratio_is_limited_in_the_sums() -> None:
    extreme = {
        "log_ratio_T": float64([1e3, math.inf, -1e3]),
        "advantage_T": float64([-1.0, -1.0, 1.0]),
        "rollout_log_prob_T": float64([0.0] * 3),
        "mask_T": float64([1.0] * 3),
    }
    limit = math.exp(20.0)
    got = bapo.contribution_sums(**extreme, config=GRID).tolist()
    assert got == approx([1 / limit, 1 / limit, 2 * limit, 2 * limit])


def test_float32_fields_are_compared_as_float64() -> None:
    """float32(log 1.5) lies below log 1.5: alive, though a comparison in float32 would call them equal."""
    alive_T = torch.tensor([math.log(1.5)], dtype=torch.float32)
    clipped_T = torch.nextafter(alive_T, torch.ones(1))
    assert alive_T.item() < math.log(1.5) < clipped_T.item()
    one_T, zero_T = torch.ones(1), torch.zeros(1)
    config = dataclasses.replace(GRID, measure="gradient")
    assert bapo.contribution_sums(alive_T, one_T, zero_T, one_T, config)[0] > 1.4
    assert bapo.contribution_sums(clipped_T, one_T, zero_T, one_T, config)[0] == 0.0
    assert clip_sums(alive_T, one_T, one_T, Bounds(0.5, 1.5))[3] == 0
    assert clip_sums(clipped_T, one_T, one_T, Bounds(0.5, 1.5))[3] == 1


def test_empty_batch_has_zero_sums() -> None:
    empty_T = torch.zeros(0)
    assert bapo.contribution_sums(empty_T, empty_T, empty_T, empty_T, GRID).tolist() == [0.0] * 4
    assert clip_sums(empty_T, empty_T, empty_T, Bounds(0.5, 1.5)).tolist() == [0.0] * 5
    assert bapo.policy_loss(empty_T, empty_T, empty_T, Bounds(0.5, 1.5)).item() == 0.0


def test_sums_are_float64_and_carry_no_gradient() -> None:
    fields = {name: field.float() for name, field in batch().items()}
    fields["log_ratio_T"].requires_grad_()
    got = bapo.contribution_sums(**fields, config=GRID)
    assert got.dtype == torch.float64
    assert not got.requires_grad


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_masked_tokens_count_nowhere_whatever_they_hold(bad: float) -> None:
    mask = [1.0, 0.0, 1.0, 0.0, 1.0]
    clean = batch(mask)
    dirty = batch(mask)
    for name in ("log_ratio_T", "advantage_T", "rollout_log_prob_T"):
        dirty[name][1] = bad
        dirty[name][3] = bad
    for fields in (clean, dirty):
        fields["log_ratio_T"].requires_grad_()
    for weight in ("uniform", "rollout_probability"):
        config = dataclasses.replace(GRID, weight=weight)
        sums_of = [bapo.contribution_sums(**fields, config=config) for fields in (clean, dirty)]
        assert torch.equal(*sums_of)
    losses = []
    for fields in (clean, dirty):
        del fields["rollout_log_prob_T"]
        loss = bapo.policy_loss(**fields, bounds=Bounds(0.5, 1.5, dual_clip=3.0))
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    gradient_T = dirty["log_ratio_T"].grad
    assert gradient_T is not None
    assert torch.equal(gradient_T, clean["log_ratio_T"].grad)
    assert gradient_T[[1, 3]].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["log_ratio_T", "advantage_T", "rollout_log_prob_T"])
@pytest.mark.parametrize("measure", ["surrogate", "gradient"])
def test_nan_in_a_token_that_counts_is_not_lost(name: str, measure: str) -> None:
    for position in range(5):
        fields = batch()
        fields[name][position] = math.nan
        config = dataclasses.replace(GRID, measure=measure, weight="rollout_probability")
        got = bapo.contribution_sums(**fields, config=config)
        assert got.isnan().all()
        with pytest.raises(FloatingPointError, match="not finite"):
            search_bounds(got, config)
        if name != "rollout_log_prob_T":
            del fields["rollout_log_prob_T"]
            assert bapo.policy_loss(**fields, bounds=Bounds(0.5, 1.5)).isnan()


def test_rollout_log_prob_is_not_read_under_uniform_weight() -> None:
    assert sums("surrogate", "uniform", rollout_log_prob_T=float64([math.nan] * 5)) == sums(
        "surrogate", "uniform"
    )


@pytest.mark.parametrize("name", ["log_ratio_T", "advantage_T", "rollout_log_prob_T", "mask_T"])
def test_shapes_must_agree(name: str) -> None:
    fields = batch()
    fields[name] = fields[name][:1]  # would broadcast
    with pytest.raises(ValueError, match="shape"):
        bapo.contribution_sums(**fields, config=GRID)
    if name != "rollout_log_prob_T":
        del fields["rollout_log_prob_T"]
        with pytest.raises(ValueError, match="shape"):
            bapo.policy_loss(**fields, bounds=Bounds(0.5, 1.5))
        with pytest.raises(ValueError, match="shape"):
            clip_sums(**fields, bounds=Bounds(0.5, 1.5))


def test_overlapping_candidates_are_refused() -> None:
    with pytest.raises(ValueError, match="overlap"):
        bapo.contribution_sums(**batch(), config=bapo.fixed(1.2, 1.2))


def test_loss_and_gradient() -> None:
    # bounds 0.75, 1.5. ratio, A -> min(r A, clip(r) A), and d/d log r of it (r A where alive):
    # 1.0, 1.0 -> 1.0 (alive, 1.0)          1.75, 1.0 -> 1.5 (clipped)     4.0, 0.5 -> 0.75 (clipped)
    # 0.6, -1.0 -> min(-0.6, -0.75) = -0.75 (clipped)                      1.0, -2.0 -> -2.0 (alive, -2.0)
    # sum = 1.0 + 1.5 + 0.75 - 0.75 - 2.0 = 0.5
    log_ratio_T = float64(RATIOS).log().requires_grad_()
    loss = bapo.policy_loss(log_ratio_T, float64(ADVANTAGES), torch.ones(5), Bounds(0.75, 1.5))
    loss.backward()
    assert loss.item() == approx(-0.5)
    assert log_ratio_T.grad is not None
    assert log_ratio_T.grad.tolist() == approx([-1.0, 0.0, 0.0, 0.0, 2.0])
    assert log_ratio_T.grad[1:4].tolist() == [0.0, 0.0, 0.0]


BOUNDS = Bounds(0.75, 1.5)


def loss_and_gradient(
    log_ratios: list[float], advantages: list[float], bounds: Bounds = BOUNDS
) -> tuple[float, list[float]]:
    log_ratio_T = float64(log_ratios).requires_grad_()
    loss = bapo.policy_loss(log_ratio_T, float64(advantages), torch.ones(len(advantages)), bounds)
    loss.backward()
    assert log_ratio_T.grad is not None
    return loss.item(), log_ratio_T.grad.tolist()


def test_loss_clips_tokens_on_a_bound() -> None:
    loss, gradient = loss_and_gradient([math.log(1.5), math.log(0.75)], [1.0, -1.0])
    assert loss == approx(-0.75)  # -(1.5 - 0.75)
    assert gradient == [0.0, 0.0]


def test_loss_weighs_tokens_with_the_mask() -> None:
    # (0.5 * 1.0 + 1.5 + 0.75 - 0.25 * 0.75 - 2.0) = 0.5625
    weight_T = torch.tensor([0.5, 1.0, 1.0, 0.25, 1.0])
    loss = bapo.policy_loss(float64(RATIOS).log(), float64(ADVANTAGES), weight_T, Bounds(0.75, 1.5))
    assert loss.item() == approx(-0.5625)


def test_ratios_inside_the_other_bound_are_not_clipped() -> None:
    """A > 0 and r < c_low, or A < 0 and r > c_high: the minimum takes the unclipped side."""
    loss, gradient = loss_and_gradient([math.log(0.25), math.log(4.0)], [1.0, -1.0])
    assert loss == approx(3.75)  # -(0.25 - 4.0)
    assert gradient == approx([-0.25, 4.0])


def test_dual_clip() -> None:
    # A < 0: r = 4 counts as 3, without gradient; r = 2 is untouched. A > 0: r = 4 is clipped at 1.5 as ever.
    ratios, bounds = (4.0, 2.0, 4.0), Bounds(0.75, 1.5, dual_clip=3.0)
    loss, gradient = loss_and_gradient([math.log(ratio) for ratio in ratios], [-1.0, -1.0, 1.0], bounds)
    assert loss == approx(3.0 + 2.0 - 1.5)
    assert gradient == approx([0.0, 2.0, 0.0])


def test_loss_beyond_the_limit_is_finite_and_without_gradient() -> None:
    loss, gradient = loss_and_gradient([1e3, -1e3, math.inf, -math.inf], [-1.0, 1.0, -1.0, 1.0])
    assert loss == approx(2 * math.exp(20.0) - 2 * math.exp(-20.0))
    assert gradient == [0.0] * 4


def test_loss_of_float32_fields_is_float64_with_a_float32_gradient() -> None:
    log_ratio_T = torch.zeros(3, requires_grad=True)
    loss = bapo.policy_loss(log_ratio_T, torch.ones(3), torch.ones(3), Bounds(0.75, 1.5))
    loss.backward()
    assert loss.dtype == torch.float64
    assert log_ratio_T.grad is not None
    assert log_ratio_T.grad.dtype == torch.float32
    assert log_ratio_T.grad.tolist() == [-1.0] * 3


def test_clip_counts_and_fractions() -> None:
    # At 0.75, 1.5 of the five tokens: 3 positive, 2 negative; 1.75 and 4.0 clipped above, 0.6 below.
    log_ratio_T, advantage_T = float64(RATIOS).log(), float64(ADVANTAGES)
    counts = clip_sums(log_ratio_T, advantage_T, torch.ones(5), Bounds(0.75, 1.5))
    assert counts.dtype == torch.float64
    assert counts.tolist() == [5, 3, 2, 2, 1]
    assert clip_fractions(counts) == {
        "bapo/clip_fraction_high": 0.4,
        "bapo/clip_fraction_low": 0.2,
        "bapo/positive_token_fraction": 0.6,
    }


def test_clip_counts_ignore_weights_masked_tokens_and_zero_advantages() -> None:
    log_ratio_T = float64([4.0, 4.0, math.nan, 0.1, 4.0]).log()
    advantage_T = float64([1.0, 0.0, math.nan, -1.0, 1.0])
    counts = clip_sums(log_ratio_T, advantage_T, float64([0.25, 1.0, 0.0, 1.0, 0.0]), Bounds(0.75, 1.5))
    assert counts.tolist() == [3, 1, 1, 1, 1]


def test_clip_fractions_of_nothing_are_zero() -> None:
    assert set(clip_fractions([0.0] * 5).values()) == {0.0}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    fields = {
        "log_ratio_T": torch.randn(10_000, generator=generator),
        "advantage_T": torch.randn(10_000, generator=generator),
        "rollout_log_prob_T": -torch.rand(10_000, generator=generator),
        "mask_T": (torch.rand(10_000, generator=generator) < 0.7).float(),
    }
    on_gpu = {name: field.cuda() for name, field in fields.items()}
    got = bapo.contribution_sums(**on_gpu, config=bapo.eq8_literal()).cpu()
    torch.testing.assert_close(
        got, bapo.contribution_sums(**fields, config=bapo.eq8_literal()), rtol=1e-12, atol=0
    )


def test_the_public_names_of_bapo_are_all_there() -> None:
    """Recipes and users import them from ``algo.bapo``; those on tensors are served on demand."""
    assert {name for name in bapo.__all__ if getattr(bapo, name) is None} == set()
    assert bapo.policy_loss is surrogate.policy_loss
    with pytest.raises(AttributeError, match=r"'bapo_megatron.algo.bapo' has no attribute '_clipped'"):
        _ = bapo._clipped
