"""The vectors behind an update's loss and metrics, by hand, and their sums where tokens are masked."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from bapo_megatron.algo.bapo import balanced, grpo
from bapo_megatron.algo.bounds import search_bounds
from bapo_megatron.algo.losses import build_loss
from bapo_megatron.algo.losses.clip import contribution_fn
from bapo_megatron.algo.measurements import PackView, token_mean
from bapo_megatron.algo.objective import Objective
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.tensor_types import MicroBatch, TokenStats
from tests.support.bapo_objective import loss_fn, objective, update_metrics

LN = math.log


def pack(
    advantages: list[float],
    rollout: list[float],
    weights: list[float],
    versions: list[int],
    old: list[float] | None = None,
) -> MicroBatch:
    """Tokens with these fields; a token counts if its weight is not 0. pi_old is pi_rollout, or ``old``."""
    count = len(advantages)
    weight_T = torch.tensor(weights)
    return MicroBatch.of(
        mask_T=(weight_T != 0).float(),
        weight_T=weight_T,
        advantage_T=torch.tensor(advantages),
        rollout_log_prob_T=torch.tensor(rollout),
        old_log_prob_T=torch.tensor(rollout if old is None else old),
        version_T=torch.tensor(versions, dtype=torch.int32),
        cu_seqlens=(0, count),
        rows=((0, 0, count),),
    )


# Three tokens that count and one that does not. Ratios 2, 1/2 and 1; sampled by versions 3, 5 and 4.
PACK = pack([1.0, -2.0, 3.0, 9.0], [-1.0, -1.0, -2.0, -7.0], [0.5, 2.0, 1.0, 0.0], [3, 5, 4, 0])
STATS = TokenStats(
    log_prob_T=torch.tensor([-1.0 + LN(2.0), -1.0 - LN(2.0), -2.0, -1.0]),
    entropy_T=torch.tensor([0.3, 0.6, 0.9, 99.0]),
)
DUMMY = pack([0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0, 0])
DUMMY_STATS = TokenStats(torch.tensor([-3.0, -4.0]), torch.tensor([5.0, 6.0]))


def test_loss_and_metrics_of_fixed_bounds_by_hand() -> None:
    """Bounds (0.8, 1.2): token 1 is clipped at 1.2, token 2 at 0.8.

    Loss: -(0.5 * 1 * 1.2 + 2 * -2 * 0.8 + 1 * 3 * 1) = -(0.6 - 3.2 + 3) = -0.4, over 3 tokens.
    KL: (2 - 1 - ln 2) + (0.5 - 1 + ln 2) + 0 = 0.5. |log r|: 2 ln 2. Staleness at version 6: 3, 1 and 2, so
    two tokens lie in one bucket, of which the first is clipped, and one, clipped, in another.
    """
    config = grpo()
    found = search_bounds(contribution_fn(config)(STATS, PACK), config)
    log_prob_T = STATS.log_prob_T.clone().requires_grad_()
    sums = loss_fn(found, config, version=6)(TokenStats(log_prob_T, STATS.entropy_T), PACK)
    sums[0].backward()  # d loss / d log pi = -w r A for the token that is not clipped, else 0
    assert log_prob_T.grad.tolist() == pytest.approx([0.0, 0.0, -3.0, 0.0])
    sums = sums.detach()
    metrics = update_metrics(sums, found, config)
    assert float(sums[0]) == pytest.approx(-0.4, abs=1e-6)
    assert objective(config).mean_entropy(sums) == pytest.approx(0.6)
    expected = {
        "policy/loss": -0.4 / 3,
        "policy/entropy": 0.6,
        "policy/kl": 0.5 / 3,
        "policy/ratio_gap": 2 * LN(2) / 3,
        "staleness/1/tokens": 1 / 3,
        "staleness/1/clipped": 1.0,
        "staleness/1/ratio_gap": LN(2),
        "staleness/1/entropy": 0.6,
        "staleness/2-3/tokens": 2 / 3,
        "staleness/2-3/clipped": 0.5,
        "staleness/2-3/ratio_gap": LN(2) / 2,
        "staleness/2-3/entropy": 0.6,
        "staleness/0/tokens": 0.0,
        "bapo/clip_fraction_high": 1 / 3,
        "bapo/clip_fraction_low": 1 / 3,
        "bapo/positive_token_fraction": 2 / 3,
        "bapo/clip_low": 0.8,
        "bapo/clip_high": 1.2,
        "bapo/rounds": 0.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert metrics["staleness/0/clipped"] is None
    assert metrics["rollout/engine_gap_mean"] is None  # version 6 sampled no token
    assert not {"bapo/bounds_moved", "bapo/moved_tokens"} & metrics.keys()  # fixed bounds cannot move
    # Alive are only the third token (positive) and none of the negatives.
    assert metrics["bapo/contribution"] == pytest.approx(1.0)


def test_engines_that_keep_keys_have_no_gap_at_tokens_behind_those_of_older_weights() -> None:
    """Of two tokens of version 5 one comes behind a token of version 3, whose keys its engine has kept."""
    tokens = pack([1.0] * 3, [-1.0, -1.0, -2.0], [1.0] * 3, [5, 3, 5])
    tokens = dataclasses.replace(tokens, oldest_version_T=torch.tensor([5, 3, 3], dtype=torch.int32))
    stats = TokenStats(torch.tensor([-1.25, -1.5, -2.5]), torch.zeros(3))
    for keeps_keys, gap in ((False, (0.25 + 0.5) / 2), (True, 0.25)):
        objective = Objective(build_loss(AlgorithmConfig(bounds=grpo())), keeps_keys=keeps_keys)
        found = objective.loss.search.known if objective.loss.search else None
        sums = objective.token_fn(found, 5)(stats, tokens)
        assert objective.metrics(sums, found)["rollout/engine_gap_mean"] == pytest.approx(gap)


def test_pi_old_is_in_the_ratio_and_pi_rollout_in_the_rest() -> None:
    """pi = 1/2, pi_old = 1/4, pi_rollout = 1/8: the ratio is 2, clipped at 1.2, the weight of Eq. 8 is 1/8.

    KL(rollout || policy): 4 - 1 - ln 4. Engine's gap: ln 4 = 1.386, whose bin ends at sqrt 2.
    """
    config = grpo()
    one = pack([1.0], [LN(1 / 8)], [1.0], [3], old=[LN(1 / 4)])
    stats = TokenStats(torch.tensor([LN(1 / 2)]), torch.zeros(1))
    sums = contribution_fn(config)(stats, one)
    metrics = update_metrics(loss_fn(search_bounds(sums, config), config, 3)(stats, one), None, config)
    assert metrics["policy/loss"] == pytest.approx(-1.2)
    assert (metrics["bapo/clip_fraction_high"], metrics["bapo/clip_fraction_low"]) == (1.0, 0.0)
    assert metrics["policy/ratio_gap"] == metrics["staleness/0/ratio_gap"] == pytest.approx(LN(2))
    assert metrics["policy/kl"] == pytest.approx(3 - LN(4))
    assert metrics["rollout/engine_gap_mean"] == pytest.approx(LN(4))
    assert metrics["rollout/engine_gap_max"] == pytest.approx(2**0.5)
    # measure surrogate, weight rollout_probability: P = 1.2 / 8. (grpo() itself: gradient, uniform.)
    weighted = dataclasses.replace(config, measure="surrogate", weight="rollout_probability")
    assert contribution_fn(weighted)(stats, one)[0].item() == pytest.approx(1.2 / 8)


def test_bounds_from_elsewhere_are_judged_by_the_tokens_of_the_update() -> None:
    """Bounds found on other sums (nothing clipped, so at their ends): three tokens at ratios 2, 1/2, 1.

    At c_high = 3 and c_low = 0.9: P = 0.5 * 2 + 3 = 4, N = 0 (1/2 is clipped), so the share is 1. The exact
    search stops at once: at c_high = 1.2 the third token is alive and no negative one is.
    """
    config = balanced()
    stale = search_bounds(torch.tensor([1.0] * 37 + [9.0] * 16, dtype=torch.float64), config)
    assert (stale.low, stale.high, stale.reached) == (0.9, 3.0, False)
    metrics = update_metrics(loss_fn(stale, config, 6)(STATS, PACK), stale, config)
    assert metrics["bapo/clip_high"] == 3.0
    assert metrics["bapo/contribution"] == 1.0
    assert metrics["bapo/reached"] == 1.0
    assert metrics["bapo/clip_high_distance"] == pytest.approx(3.0 - 1.2)
    assert metrics["bapo/clip_low_distance"] == pytest.approx(0.9 - 0.6)


def test_logged_bounds_of_an_update_are_candidates_to_the_bit() -> None:
    config = dataclasses.replace(balanced(), low_start=0.62, low_end=0.62)
    found = search_bounds(contribution_fn(config)(STATS, PACK), config)
    loss = loss_fn(found, config, 0)
    sums = sum(loss(STATS, PACK) for _ in range(15))
    assert update_metrics(sums, found, config)["bapo/clip_low"] == 0.62


def test_a_mean_takes_all_tokens_or_those_that_count() -> None:
    """The mean of 1, 2 and 4, whose other token is nan; a function may select for itself."""
    entropy_T, mask_T = torch.tensor([1.0, math.nan, 2.0, 4.0]), torch.tensor([1.0, 0.0, 1.0, 1.0])
    batch = MicroBatch.of((0, 4), mask_T=mask_T)
    view = PackView(TokenStats(entropy_T, entropy_T), batch, None, None, 0)  # type: ignore[arg-type]
    for values in (lambda v: v.stats.entropy_T, lambda v: v.stats.entropy_T[v.live_T]):
        assert token_mean("mine", values).sums(view).tolist() == [7.0]
