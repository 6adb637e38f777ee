"""Losses of an update against literal loops, autograd and numbers by hand; however the update is split."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bapo_megatron.algo import surrogate, tokens
from bapo_megatron.algo.losses import Loss, build_loss
from bapo_megatron.algo.measurements import effective_sample_size
from bapo_megatron.algo.objective import Objective
from bapo_megatron.algo.sequences import PerSequence, sequence_means, sequence_sums
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.types import MicroBatch, TokenStats
from tests.support.host_waits import HostWaits
from tests.unit.algo.test_diagnostics import random_tokens

SEQUENCES = 30


def update(seed: int, drift: float = 0.02) -> tuple[TokenStats, MicroBatch]:
    """An update of 30 sequences in one pack, masked tokens with nan among them, the last sequence empty."""
    stats, batch = random_tokens(900, seed)
    rng = np.random.default_rng(seed)
    sequence_T = torch.tensor(np.sort(rng.integers(0, SEQUENCES - 1, 900)))
    sign_T = torch.tensor(rng.choice([-1.5, 0.0, 0.7, 2.0], SEQUENCES)).float()[sequence_T]
    shift_T = torch.tensor(rng.normal(0, drift, SEQUENCES)).float()[sequence_T]
    noise_T = torch.tensor(rng.normal(0, drift, 900)).float()
    live_T = batch.mask_T != 0
    nan = torch.tensor(math.nan)
    log_prob_T = torch.where(live_T, batch.old_log_prob_T + shift_T + noise_T, nan)
    batch = dataclasses.replace(
        batch,
        sequence_T=torch.where(live_T, sequence_T, -1),
        advantage_T=torch.where(live_T, sign_T, nan),
        weight_T=torch.where(live_T, batch.weight_T, nan),
        sequences=SEQUENCES,
    )
    return TokenStats(log_prob_T, stats.entropy_T), batch


def loss_of(name: str, **settings: Any) -> Loss:
    """A registered loss with settings of its constructor."""
    return type(build_loss(AlgorithmConfig(loss=name)))(AlgorithmConfig(loss=name), **settings)


def found_by(loss: Loss, stats: TokenStats, batch: MicroBatch) -> Any:
    assert loss.search is not None
    return loss.search.find(loss.search.measure(stats, batch))


def derivative(loss: Loss, stats: TokenStats, batch: MicroBatch, found: Any) -> Tensor:
    log_prob_T = stats.log_prob_T.clone().requires_grad_()
    loss.terms(TokenStats(log_prob_T, stats.entropy_T), batch, found).loss.backward()
    assert log_prob_T.grad is not None
    return log_prob_T.grad


def members(batch: MicroBatch) -> dict[int, list[int]]:
    """The live tokens of each sequence, in a plain loop."""
    found: dict[int, list[int]] = {}
    for t in range(len(batch.mask_T)):
        if batch.mask_T[t]:
            found.setdefault(int(batch.sequence_T[t]), []).append(t)
    return found


def log_ratio(stats: TokenStats, batch: MicroBatch, t: int) -> float:
    return float(stats.log_prob_T[t] - batch.old_log_prob_T[t])


def literal_gspo(stats: TokenStats, batch: MicroBatch, low: float, high: float) -> tuple[float, list[float]]:
    """The loss and its derivative by each token's log-prob."""
    loss, slopes = 0.0, [0.0] * len(batch.mask_T)
    for inside in members(batch).values():
        mean = sum(log_ratio(stats, batch, t) for t in inside) / len(inside)
        s = math.exp(mean)
        for t in inside:
            advantage, weight = float(batch.advantage_T[t]), float(batch.weight_T[t])
            clipped = min(max(s, 1 - low), 1 + high)
            loss -= weight * min(s * advantage, clipped * advantage)
            dead = (advantage > 0 and s >= 1 + high) or (advantage < 0 and s <= 1 - low)
            slopes[t] = 0.0 if dead else -weight * advantage * s
    return loss, slopes


def algorithm_1(stats: TokenStats, batch: MicroBatch, tau: float) -> set[int]:
    """The tokens that M2PO's Algorithm 1 masks, one after the other."""
    moments = {}
    for t in range(len(batch.mask_T)):
        if batch.mask_T[t]:
            log_r, advantage = log_ratio(stats, batch, t), float(batch.advantage_T[t])
            if (advantage > 0 and log_r > 0) or (advantage < 0 and log_r < 0):
                moments[t] = log_r * log_r
    masked = set()
    while moments and sum(moments.values()) / len(moments) > tau:
        largest = max(moments, key=lambda t: moments[t])
        masked.add(largest)
        del moments[largest]
    return masked


def literal_m2po(stats: TokenStats, batch: MicroBatch, tau: float) -> tuple[float, list[float]]:
    """The unclipped surrogate of the tokens that Algorithm 1 leaves, and its derivative."""
    masked = algorithm_1(stats, batch, tau)
    assert 30 < len(masked) < 300
    loss, slopes = 0.0, [0.0] * len(batch.mask_T)
    for t in range(len(batch.mask_T)):
        if batch.mask_T[t] and t not in masked:
            slopes[t] = -float(batch.weight_T[t] * batch.advantage_T[t]) * math.exp(
                log_ratio(stats, batch, t)
            )
            loss += slopes[t]
    return loss, slopes


def literal_vespo(stats: TokenStats, batch: MicroBatch) -> tuple[float, list[float]]:
    """REINFORCE with phi(W) = W^k exp(lambda - lambda W), and its derivative."""
    loss, slopes = 0.0, [0.0] * len(batch.mask_T)
    for inside in members(batch).values():
        product = math.exp(sum(log_ratio(stats, batch, t) for t in inside))
        for t in inside:
            advantage = float(batch.advantage_T[t])
            k, rate = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
            phi = product**k * math.exp(rate) * math.exp(-rate * product)
            slopes[t] = -float(batch.weight_T[t]) * advantage * phi
            loss += slopes[t] * float(stats.log_prob_T[t])
    return loss, slopes


def literal_p3o(stats: TokenStats, batch: MicroBatch) -> tuple[float, list[float]]:
    """Score function with min(r, ESS), and (1 - ESS) times k3 of KL(pi || pi_old); its derivative."""
    live = [t for t in range(len(batch.mask_T)) if batch.mask_T[t]]
    ratios = [math.exp(log_ratio(stats, batch, t)) for t in live]
    ess = sum(ratios) ** 2 / (len(live) * sum(r * r for r in ratios))
    assert 0.5 < ess < 0.9
    loss, slopes = 0.0, [0.0] * len(batch.mask_T)
    for t, r in zip(live, ratios, strict=True):
        advantage, weight = float(batch.advantage_T[t]), float(batch.weight_T[t])
        score, pull = -weight * advantage * min(r, ess), (1 - ess) * weight
        loss += score * float(stats.log_prob_T[t]) + pull * (1 / r - 1 + math.log(r))
        slopes[t] = score + pull * (1 - 1 / r)
    return loss, slopes


def literal(name: str, stats: TokenStats, batch: MicroBatch) -> tuple[float, list[float]]:
    """Loss and derivative of a loss at its defaults."""
    if name == "p3o":
        return literal_p3o(stats, batch)
    if name == "gspo":
        return literal_gspo(stats, batch, 3e-4, 4e-4)
    return literal_m2po(stats, batch, 0.04) if name == "m2po" else literal_vespo(stats, batch)


NAMES = ["gspo", "m2po", "p3o", "vespo"]
DRIFT = {"gspo": 0.02, "m2po": 0.5, "p3o": 0.4, "vespo": 0.1}


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_is_its_literal_loop(name: str) -> None:
    stats, batch = update(5, DRIFT[name])
    loss = build_loss(AlgorithmConfig(loss=name))
    found = found_by(loss, stats, batch)
    value, slopes = literal(name, stats, batch)
    terms = loss.terms(stats, batch, found)
    assert terms.loss.dtype == torch.float64
    assert float(terms.loss) == pytest.approx(value, rel=1e-6)
    assert derivative(loss, stats, batch, found).tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-12)
    live_T = batch.mask_T != 0
    said_T = torch.where(live_T, -batch.weight_T * batch.advantage_T * terms.gradient_T, 0.0)
    if name != "p3o":  # whose pull towards pi_old is not a part of the factor
        assert said_T.tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-12)
    assert bool(terms.gradient_T.isfinite().all())
    assert not bool((terms.clipped_T & ~live_T).any())
    assert not bool(terms.gradient_T[~live_T].any())


@pytest.mark.parametrize("name", NAMES)
def test_one_answer_however_the_update_is_split(name: str) -> None:
    """Chunks, packs and context-parallel shares: any split of the tokens gives the same sums and metrics."""
    stats, batch = update(6, DRIFT[name])
    objective = Objective(build_loss(AlgorithmConfig(loss=name)))
    search = objective.loss.search
    assert search is not None
    whole = search.measure(stats, batch)
    found = search.find(whole)
    vector = objective.token_fn(found, 6)(stats, batch)
    shares = [torch.arange(rank, 900, 3) for rank in range(3)]
    for split in (list(torch.arange(900).split(77)), shares):
        parts = [(TokenStats(*(column[i] for column in stats)), batch.take(i)) for i in split]
        measured = torch.stack([search.measure(*part) for part in parts]).sum(0)
        torch.testing.assert_close(measured, whole, rtol=1e-12, atol=1e-12)
        theirs = search.find(measured)
        total = torch.stack([objective.token_fn(theirs, 6)(*part) for part in parts]).sum(0)
        torch.testing.assert_close(total, vector, rtol=1e-9, atol=1e-9)
    assert any(metric.startswith(f"{name}/") for metric in objective.metrics(vector, found))


@pytest.mark.parametrize("name", NAMES)
def test_no_part_of_an_update_makes_the_host_wait(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tokens, surrogate):
        monkeypatch.setattr(module, "selects", lambda _device: False)
    stats, batch = update(7, DRIFT[name])
    objective = Objective(build_loss(AlgorithmConfig(loss=name)))
    search = objective.loss.search
    assert search is not None
    found = search.find(search.measure(stats, batch))
    objective.token_fn(found, 6)(stats, batch)  # constants go to the device once
    with HostWaits() as counted:
        search.measure(stats, batch)
        objective.token_fn(found, 6)(stats, batch)
    assert not counted.places


def test_sums_by_sequence_by_hand() -> None:
    """Sequence 0: log r 1 and 3; sequence 1: none; sequence 2: -2, and a masked token that holds nan."""
    batch = MicroBatch.of(
        (0, 4),
        sequences=3,
        mask_T=torch.tensor([1.0, 1.0, 1.0, 0.0]),
        sequence_T=torch.tensor([0, 2, 0, 2]),
        old_log_prob_T=torch.tensor([-1.0, -1.0, -4.0, math.nan]),
    )
    stats = TokenStats(torch.tensor([0.0, -3.0, -1.0, math.nan]), torch.zeros(4))
    totals = sequence_sums(stats, batch)
    assert totals.tolist() == [4.0, 0.0, -2.0, 2.0, 0.0, 1.0]
    means = PerSequence(sequence_means(totals))
    assert means.values_S.tolist() == [2.0, 0.0, -2.0]
    assert means.of_tokens(batch).tolist() == [2.0, -2.0, 2.0, 0.0]
    assert means.of_tokens(batch, outside=7.0).tolist() == [2.0, -2.0, 2.0, 7.0]


def responses(log_ratios: list[float], sequence: list[int], advantages: list[float]) -> Any:
    """Tokens of weight 1 with these log-ratios."""
    count = len(log_ratios)
    batch = MicroBatch.of(
        (0, count),
        sequences=max(sequence) + 1,
        mask_T=torch.ones(count),
        weight_T=torch.ones(count),
        sequence_T=torch.tensor(sequence),
        advantage_T=torch.tensor(advantages),
        old_log_prob_T=torch.full((count,), -1.0),
    )
    return TokenStats(torch.tensor(log_ratios, dtype=torch.float64) - 1.0, torch.zeros(count)), batch


def test_gspo_by_hand() -> None:
    """Bounds 0.5 and 2 about ratios sqrt(2 * 1/2) = 1, 4 (clipped for A > 0) and 1/4 (alive for A > 0).

    Loss: -(2 * 1 * 3 + 2 * 1 + 1/4 * 1).
    """
    ln2 = math.log(2)
    loss = loss_of("gspo", clip_low=0.5, clip_high=1.0)
    stats, batch = responses([ln2, -ln2, 2 * ln2, -2 * ln2], [0, 0, 1, 2], [3.0, 3.0, 1.0, 1.0])
    terms = loss.terms(stats, batch, found_by(loss, stats, batch))
    assert float(terms.loss) == pytest.approx(-(6 + 2 + 0.25))
    assert terms.gradient_T.tolist() == pytest.approx([1, 1, 0, 0.25])
    assert terms.clipped_T.tolist() == [False, False, True, False]
    punished = dataclasses.replace(batch, advantage_T=-batch.advantage_T)
    terms = loss.terms(stats, punished, found_by(loss, stats, punished))
    assert float(terms.loss) == pytest.approx(6 + 4 + 0.5)
    assert terms.gradient_T.tolist() == pytest.approx([1, 1, 4, 0])
    assert terms.clipped_T.tolist() == [False, False, False, True]


def test_gspo_clips_at_the_bounds_of_its_paper() -> None:
    """1 - 3e-4 and 1 + 4e-4, with 1 % of their widths to either side."""
    means = [math.log1p(value) for value in (3.96e-4, 4.04e-4, -2.97e-4, -3.03e-4)]
    stats, batch = responses(means, [0, 1, 2, 3], [1.0, 1.0, -1.0, -1.0])
    loss = build_loss(AlgorithmConfig(loss="gspo"))
    terms = loss.terms(stats, batch, found_by(loss, stats, batch))
    assert terms.clipped_T.tolist() == [False, True, False, True]


def test_vespo_by_hand() -> None:
    """W = 2 of two tokens at sqrt 2 each, and W = 1/2.

    Weights for A > 0: 4 e^-3 and (1/4) e^(3/2), for A < 0: 8 e^-2 and (1/8) e. At W = 1 it is 1, far away 0.
    """
    half = math.log(2) / 2
    loss = loss_of("vespo")
    stats, batch = responses([half, half, -2 * half], [0, 0, 1], [1.0, 1.0, 1.0])
    terms = loss.terms(stats, batch, found_by(loss, stats, batch))
    above, below = 4 * math.exp(-3), 0.25 * math.exp(1.5)
    assert terms.gradient_T.tolist() == pytest.approx([above, above, below])
    assert float(terms.loss) == pytest.approx(-(2 * above * (half - 1) + below * (-2 * half - 1)))
    assert not bool(terms.clipped_T.any())
    punished = dataclasses.replace(batch, advantage_T=-batch.advantage_T)
    terms = loss.terms(stats, punished, found_by(loss, stats, punished))
    assert terms.gradient_T.tolist() == pytest.approx([8 * math.exp(-2)] * 2 + [math.e / 8])
    stats, batch = responses([0.0, 700.0, -700.0], [0, 1, 2], [1.0, 1.0, -1.0])
    terms = loss.terms(stats, batch, found_by(loss, stats, batch))
    assert terms.gradient_T.tolist() == pytest.approx([1.0, 0.0, 0.0], abs=1e-20)
    assert math.isfinite(float(terms.loss))


def test_p3o_by_hand() -> None:
    """Ratios 2, 1, 1/2, 4 and 5/4: ESS = (35/4)^2 / (5 * 365/16) = 49/73, which caps all but 1/2.

    The last token is masked. The loss and its derivatives are what the authors' code has for these tokens
    (FeynRL 4f7eafe, ``P3O.compute_policy_loss``), which adds 1e-8 to the sum of squares.
    """
    ratios, olds = [2.0, 1.0, 0.5, 4.0, 1.25, 9.0], [-2.0, -0.5, -1.0, -3.0, -1.5, -9.0]
    stats, batch = responses([0.0] * 6, [0, 0, 0, 1, 1, 1], [1.0, 1.0, 1.0, -0.5, -0.5, -0.5])
    old_T = torch.tensor(olds, dtype=torch.float64)
    mask_T = torch.tensor([1.0] * 5 + [0.0])
    batch = dataclasses.replace(batch, mask_T=mask_T, weight_T=mask_T.clone(), old_log_prob_T=old_T)
    stats = TokenStats(old_T + torch.tensor(ratios).double().log(), stats.entropy_T)
    loss = build_loss(AlgorithmConfig(loss="p3o"))
    found = found_by(loss, stats, batch)
    assert found == pytest.approx(49 / 73, rel=1e-14)
    terms = loss.terms(stats, batch, found)
    assert terms.gradient_T.tolist() == pytest.approx([49 / 73, 49 / 73, 0.5, 49 / 73, 49 / 73, 0])
    assert terms.clipped_T.tolist() == [True, True, False, True, True, False]
    assert float(terms.loss) == pytest.approx(1.4704575159301685, rel=1e-7)
    theirs = [-0.50684931874, -0.67123287916, -0.82876712081, 0.58219178021, 0.40136986971, 0.0]
    assert derivative(loss, stats, batch, found).tolist() == pytest.approx(theirs, rel=1e-7)
    by_hand = [-49 / 73 + 12 / 73, -49 / 73, -0.5 - 24 / 73, 24.5 / 73 + 18 / 73, 24.5 / 73 + 4.8 / 73, 0.0]
    assert derivative(loss, stats, batch, found).tolist() == pytest.approx(by_hand, rel=1e-12)
    metrics = Objective(loss).metrics(Objective(loss).token_fn(found, 6)(stats, batch), found)
    assert metrics["policy/ess"] == pytest.approx(49 / 73)
    assert metrics["p3o/behavior_kl"] == pytest.approx(0.2318875789642334, rel=1e-6)


def test_the_effective_sample_size_of_equal_ratios_and_of_nothing_is_1() -> None:
    assert effective_sample_size(torch.tensor([6.0, 12.0, 3.0])) == 1.0
    assert effective_sample_size(torch.zeros(3)) == 1.0
    assert effective_sample_size(torch.tensor([10.0, 100.0, 50.0])) == pytest.approx(1 / 50)


def test_p3o_needs_the_ratio_to_the_policy_that_sampled() -> None:
    with pytest.raises(ConfigError, match=r"old_log_probs=trainer.*set algorithm\.old_log_probs=rollout"):
        build_loss(AlgorithmConfig(loss="p3o", old_log_probs="trainer"))


@pytest.mark.parametrize("name", NAMES)
def test_an_update_without_sequences_is_nothing(name: str) -> None:
    """What is left where every response was rejected: a dummy pack."""
    objective = Objective(build_loss(AlgorithmConfig(loss=name)))
    stats, batch = TokenStats(torch.full((2,), -1.0), torch.ones(2)), MicroBatch.of((0, 2))
    found = found_by(objective.loss, stats, batch)
    assert not objective.token_fn(found, 0)(stats, batch).any()


def test_m2po_by_hand() -> None:
    """tau 0.3 over squares 1, 4 (A > 0) and 0.25 (A < 0): means 1.75, then 0.625, then 0.25.

    So both tokens with A > 0 and r > 1 are masked. log r = -3 with A > 0 and 3 with A < 0 are not candidates.
    Loss: -(-exp(-0.5) + exp(-3) - exp(3)); all five tokens stay in the count.
    """
    loss = loss_of("m2po", tau=0.3)
    stats, batch = responses([1.0, 2.0, -0.5, -3.0, 3.0], [0] * 5, [1.0, 1.0, -1.0, 1.0, -1.0])
    found = found_by(loss, stats, batch)
    assert (found.moment, found.kept) == pytest.approx((1.75, 0.25))
    assert 0.995 <= found.threshold <= 1.0
    terms = loss.terms(stats, batch, found)
    assert float(terms.loss) == pytest.approx(math.exp(-0.5) - math.exp(-3) + math.exp(3))
    assert terms.clipped_T.tolist() == [True, True, False, False, False]
    assert terms.gradient_T.tolist() == pytest.approx([0, 0, math.exp(-0.5), math.exp(-3), math.exp(3)])
    objective = Objective(loss)
    metrics = objective.metrics(objective.token_fn(found, 6)(stats, batch), found)
    assert metrics["policy/tokens"] == 5.0
    assert metrics["policy/loss"] == pytest.approx(float(terms.loss) / 5)
    assert metrics["bapo/clip_fraction_high"] == pytest.approx(2 / 5)
    assert metrics["m2po/second_moment_kept"] == pytest.approx(0.25)


def test_m2po_masks_nothing_within_its_bound() -> None:
    loss = loss_of("m2po", tau=2.0)
    stats, batch = responses([1.0, 1.7, 0.0], [0] * 3, [1.0, 1.0, 1.0])
    found = found_by(loss, stats, batch)
    assert (found.threshold, found.moment) == (math.inf, pytest.approx((1 + 1.7**2) / 2))
    assert not bool(loss.terms(stats, batch, found).clipped_T.any())
    metrics = Objective(loss).metrics(Objective(loss).token_fn(found, 6)(stats, batch), found)
    assert metrics["m2po/threshold"] is None


@pytest.mark.parametrize("seed", range(8))
def test_m2po_masks_what_algorithm_1_does_and_at_most_the_rest_of_a_bin(seed: int) -> None:
    stats, batch = update(seed, drift=0.4)
    loss = loss_of("m2po", tau=0.02)
    found = found_by(loss, stats, batch)
    ours = set(loss.terms(stats, batch, found).clipped_T.nonzero().flatten().tolist())
    theirs = algorithm_1(stats, batch, 0.02)
    assert theirs
    assert theirs <= ours
    last = min(abs(log_ratio(stats, batch, t)) for t in theirs)
    assert all(abs(log_ratio(stats, batch, t)) > last / 1.005 for t in ours - theirs)
    assert found.kept <= 0.02


def test_a_token_on_an_edge_is_in_the_bin_above() -> None:
    """tau 0.25: the first edge is 1/2, and the bin of 1/2 and 0.5004 has a mean above tau."""
    loss = loss_of("m2po", tau=0.25)
    stats, batch = responses([0.5, 0.5004], [0, 0], [1.0, 1.0])
    found = found_by(loss, stats, batch)
    assert (found.threshold, found.kept) == (0.5, 0.0)
    assert loss.terms(stats, batch, found).clipped_T.tolist() == [True, True]


def test_m2po_masks_all_that_lies_beyond_its_edges_and_hides_no_nan() -> None:
    loss = loss_of("m2po")
    stats, batch = responses([50.0, math.inf, 0.1], [0] * 3, [1.0, 1.0, 1.0])
    found = found_by(loss, stats, batch)
    assert loss.terms(stats, batch, found).clipped_T.tolist() == [True, True, False]
    stats, batch = responses([50.0, math.nan, 0.1], [0] * 3, [1.0, 1.0, 1.0])
    assert math.isnan(float(loss.terms(stats, batch, found_by(loss, stats, batch)).loss))
