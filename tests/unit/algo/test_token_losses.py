"""Losses of single tokens: numbers by hand, literal formulas in plain Python, their metrics and settings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bapo_megatron.algo.losses import Loss, LossTerms, build_loss
from bapo_megatron.algo.objective import Objective
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.tensor_types import MicroBatch, TokenStats
from tests.unit.algo.test_every_loss import TOKENS, update

LN = math.log
Literal = Callable[[float, float, float, float, float], float]
"""The objective of a token: of live log pi, stopped log pi, log pi_old, log pi_rollout and advantage."""


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def cispo(live: float, stopped: float, old: float, rollout: float, advantage: float) -> float:
    return min(max(math.exp(stopped - old), 0.0), 5.0) * advantage * live


def sapo(live: float, stopped: float, old: float, rollout: float, advantage: float) -> float:
    tau = 1.0 if advantage > 0 else 1.05
    return sigmoid(tau * (math.exp(live - old) - 1)) * 4 / tau * advantage


def dppo(divergence: Callable[[float, float], float], threshold: float) -> Literal:
    def objective(live: float, stopped: float, old: float, rollout: float, advantage: float) -> float:
        pi, mu = math.exp(stopped), math.exp(rollout)
        away = (advantage > 0 and pi > mu) or (advantage < 0 and pi < mu)
        return 0.0 if away and divergence(mu, pi) > threshold else math.exp(live - old) * advantage

    return objective


def binary_kl(mu: float, pi: float) -> float:
    return mu * LN(mu / pi) + (1 - mu) * LN((1 - mu) / (1 - pi))


def ce_gppo(live: float, stopped: float, old: float, rollout: float, advantage: float) -> float:
    delta, constant = math.exp(live - old), math.exp(stopped - old)
    if constant < 0.8 and advantage < 0:
        return 0.75 * 0.8 / constant * delta * advantage
    if constant > 1.2 and advantage > 0:
        return 1.0 * 1.2 / constant * delta * advantage
    return delta * advantage


def aspo(live: float, stopped: float, old: float, rollout: float, advantage: float) -> float:
    r, one = math.exp(stopped - old), math.exp(live - stopped)
    if advantage < 0:
        return (0.8 if r < 0.8 else min(r, 3.0) * one) * advantage
    if r > 1.2:
        return advantage / 1.2
    return min(math.exp(live) * math.exp(old) / math.exp(2 * stopped), 3.0 * one) * advantage


def maspo(live: float, stopped: float, old: float, rollout: float, advantage: float) -> float:
    r = math.exp(stopped - old)
    width = min(max(1.0 / math.exp(old) ** 0.3, 1.0), 10.0)
    risk = 1 + 0.03 * advantage if advantage > 0 else 1 / (1 - 0.03 * advantage)
    width *= min(max(risk, 0.1), 10.0)
    gated = (advantage > 0 and r > 1) or (advantage < 0 and r < 1)
    gate = math.exp(-((r - 1) ** 2) / 2 / width**2) if gated else 1.0
    return gate * math.exp(live - old) * advantage


LITERAL: dict[str, Literal] = {
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo(lambda mu, pi: abs(mu - pi), 0.15),
    "dppo_kl": dppo(binary_kl, 0.05),
    "ce_gppo": ce_gppo,
    "aspo": aspo,
    "maspo": maspo,
}


def build(name: str, **settings: Any) -> Loss:
    return build_loss(AlgorithmConfig(loss=name, loss_settings=settings))


def literal_loss(name: str, stats: TokenStats, batch: MicroBatch) -> tuple[float, list[float]]:
    """The loss, and its derivative by each live log pi as a central difference, in a plain loop."""
    loss, slopes, step = 0.0, [], 1e-6
    for t in range(len(batch.mask_T)):
        slope = 0.0
        if batch.mask_T[t]:
            columns = (batch.old_log_prob_T, batch.rollout_log_prob_T, batch.advantage_T)
            now, weight = float(stats.log_prob_T[t]), float(batch.weight_T[t])
            rest = (now, *(float(column[t]) for column in columns))
            loss -= weight * LITERAL[name](now, *rest)
            above, below = (LITERAL[name](now + side, *rest) for side in (step, -step))
            slope = -weight * (above - below) / (2 * step)
        slopes.append(slope)
    return loss, slopes


@pytest.mark.parametrize("name", LITERAL)
def test_a_loss_is_its_literal_loop(name: str) -> None:
    """At 900 tokens whose log-ratios have a standard deviation of 0.7, so that every branch is taken."""
    stats, batch = update(11)
    wide_T = torch.randn(TOKENS, generator=torch.Generator().manual_seed(1)) * 0.7
    stats = TokenStats((batch.old_log_prob_T + wide_T).clamp(max=-1e-3), stats.entropy_T)
    value, slopes = literal_loss(name, stats, batch)
    log_prob_T = stats.log_prob_T.clone().requires_grad_()
    terms = build(name).terms(TokenStats(log_prob_T, stats.entropy_T), batch, None)
    terms.loss.backward()
    assert log_prob_T.grad is not None
    assert float(terms.loss.detach()) == pytest.approx(value, rel=1e-6)
    assert log_prob_T.grad.tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-7)


def tokens(
    ratios: list[float], advantages: list[float], rollout: list[float] | None = None
) -> tuple[TokenStats, MicroBatch]:
    """Tokens of weight 1 at these ratios, sampled with probability 1/10 or those given."""
    count = len(ratios)
    old_T = torch.tensor(rollout or [0.1] * count, dtype=torch.float64).log()
    batch = MicroBatch.of(
        (0, count),
        mask_T=torch.ones(count),
        weight_T=torch.ones(count),
        advantage_T=torch.tensor(advantages),
        rollout_log_prob_T=old_T,
        old_log_prob_T=old_T,
    )
    return TokenStats(old_T + torch.tensor(ratios, dtype=torch.float64).log(), torch.zeros(count)), batch


def terms_of(loss: Loss, *args: Any) -> LossTerms:
    return loss.terms(*tokens(*args), None)


def metrics_of(loss: Loss, *args: Any) -> dict[str, float | None]:
    objective = Objective(loss)
    return objective.metrics(objective.token_fn(None, 0)(*tokens(*args)), None)


RATIOS, SIGNS = [0.5, 2.0, 0.5, 2.0], [1.0, 1.0, -1.0, -1.0]
"""A token in each quadrant of ratio and advantage."""


def test_cispo_bounds_the_weight_and_keeps_every_gradient() -> None:
    loss = build("cispo", ratio_low=0.8, ratio_high=1.2)
    terms = terms_of(loss, [0.5, 1.0, 2.0], [1.0, 1.0, -1.0])
    assert terms.gradient_T.tolist() == pytest.approx([0.8, 1.0, 1.2])
    assert terms.clipped_T.tolist() == [True, False, True]
    found = metrics_of(loss, [0.5, 1.0, 2.0], [1.0, 1.0, -1.0])
    assert found["cispo/weight"] == pytest.approx(1.0)
    assert found["bapo/clip_fraction_high"] == pytest.approx(1 / 3)
    assert terms_of(build("cispo"), [9.0, 0.01], [1.0, 1.0]).gradient_T.tolist() == pytest.approx([5.0, 0.01])


def test_sapo_has_a_gate_of_each_sign() -> None:
    """tau 2 and 4 at r = 3/2: p = sigmoid(1) and sigmoid(2)."""
    assert metrics_of(build("sapo"), [3.0], [-1.0])["sapo/gate"] == pytest.approx(
        4 * sigmoid(2.1) * sigmoid(-2.1), rel=1e-14
    )  # 1.05 is not rounded to float32
    loss = build("sapo", temperature_positive=2.0, temperature_negative=4.0)
    gates = [4 * sigmoid(1) * sigmoid(-1), 4 * sigmoid(2) * sigmoid(-2)]
    terms = terms_of(loss, [1.5, 1.5], [1.0, -1.0])
    assert terms.gradient_T.tolist() == pytest.approx([1.5 * gate for gate in gates])
    assert float(terms.loss) == pytest.approx(-(2 * sigmoid(1) - sigmoid(2)))
    assert metrics_of(loss, [1.5, 1.5], [1.0, -1.0])["sapo/gate"] == pytest.approx(sum(gates) / 2)


def test_dppo_masks_by_probability_and_not_by_ratio() -> None:
    """0.001 to 0.1 (r = 100) is kept, 0.5 to 0.7 (r = 1.4) is masked, and only the way A asks for.

    KL(0.001 || 0.1) = 0.0998, KL(0.5 || 0.7) = 0.0872, KL(0.5 || 0.6) = 0.0204.
    """
    ratios, rollout = [100.0, 1.4, 1.2, 1.4, 0.6], [0.001, 0.5, 0.5, 0.5, 0.5]
    signs = [1.0, 1.0, 1.0, -1.0, -1.0]
    terms = terms_of(build("dppo_tv"), ratios, signs, rollout)
    assert terms.clipped_T.tolist() == [False, True, False, False, True]
    assert terms.gradient_T.tolist() == pytest.approx([100.0, 0.0, 1.2, 1.4, 0.0])
    assert float(terms.loss) == pytest.approx(-(100 + 1.2 - 1.4))
    terms = terms_of(build("dppo_kl"), ratios, signs, rollout)
    assert terms.clipped_T.tolist() == [True, True, False, False, True]
    moved = [0.099, 0.2, 0.1, 0.2, 0.2]
    found = metrics_of(build("dppo_tv"), ratios, signs, rollout)
    assert found["dppo/divergence"] == pytest.approx(sum(moved) / 5)
    assert found["bapo/clip_fraction_high"] == found["bapo/clip_fraction_low"] == pytest.approx(1 / 5)
    found = metrics_of(build("dppo_kl"), ratios[1:3], signs[1:3], rollout[1:3])
    assert found["dppo/divergence"] == pytest.approx((binary_kl(0.5, 0.7) + binary_kl(0.5, 0.6)) / 2)
    assert not any(terms_of(build("dppo_tv", divergence_threshold=0.21), ratios, signs, rollout).clipped_T)
    capped = terms_of(build("dppo_tv", ratio_cap=5.0), ratios, signs, rollout)
    assert capped.gradient_T.tolist() == pytest.approx([5.0, 0.0, 1.2, 1.4, 0.0])


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_is_anchored_to_the_policy_that_sampled(name: str) -> None:
    """Against pi_old 0.7 nothing moved, against pi_rollout 0.4 the policy rose by 0.3: masked, with r = 1."""
    stats, batch = tokens([1.0], [1.0], [0.7])
    batch = dataclasses.replace(batch, rollout_log_prob_T=torch.tensor([LN(0.4)]))
    terms = build(name).terms(stats, batch, None)
    assert terms.clipped_T.tolist() == [True]
    fallen = dataclasses.replace(batch, old_log_prob_T=torch.tensor([LN(0.3)]))
    fallen = dataclasses.replace(fallen, rollout_log_prob_T=torch.tensor([LN(0.69)]))
    assert build(name).terms(stats, fallen, None).clipped_T.tolist() == [False]


def test_the_divergence_of_a_certain_token_is_finite() -> None:
    """log pi = 0 in float32 for a token that the rollout had at 1 - 1e-7: no divergence, no mask."""
    stats, batch = tokens([1.0, 1.0], [1.0, -1.0], [0.9999999, 1.0])
    stats.log_prob_T[:] = torch.tensor([0.0, math.log1p(-1e-7)])
    objective = Objective(build("dppo_kl"))
    assert objective.loss.terms(stats, batch, None).clipped_T.tolist() == [False, False]
    found = objective.metrics(objective.token_fn(None, 0)(stats, batch), None)
    assert 0 <= (found["dppo/divergence"] or 0) < 1e-6


def test_ce_gppo_by_hand() -> None:
    """Betas 1/2 and 1/4, bounds 0.9 and 1.5: 0.45 below and 0.375 above. With 0 it is PPO's gradient."""
    loss = build("ce_gppo", beta1=0.5, beta2=0.25, clip_low=0.1, clip_high=0.5)
    assert terms_of(loss, RATIOS, SIGNS).gradient_T.tolist() == pytest.approx([0.5, 0.375, 0.45, 2.0])
    found = metrics_of(loss, RATIOS, SIGNS)
    mass = 0.5 + 0.375 + 0.45 + 2.0
    assert found["ce_gppo/preserved_low"] == pytest.approx(0.45 / mass)
    assert found["ce_gppo/preserved_high"] == pytest.approx(0.375 / mass)
    assert found["bapo/clip_fraction_low"] == pytest.approx(1 / 4)
    ppo = build("ce_gppo", beta1=0.0, beta2=0.0)
    assert terms_of(ppo, RATIOS, SIGNS).gradient_T.tolist() == pytest.approx([0.5, 0.0, 0.0, 2.0])
    assert metrics_of(ppo, [1.0], [0.0])["ce_gppo/preserved_low"] is None


def test_aspo_by_hand() -> None:
    """A lagging token (r = 1/2) weighs 2, one at r = 1/5 weighs 3, not 5; masked: r = 2 and, A < 0, 1/2."""
    signs = [1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 0.0]
    ratios = [0.5, 0.2, 2.0, 0.5, 2.0, 5.0, 0.1]
    terms = terms_of(build("aspo"), ratios, signs)
    assert terms.gradient_T.tolist()[:6] == pytest.approx([2.0, 3.0, 0.0, 0.0, 2.0, 3.0])
    assert terms.clipped_T.tolist() == [False, False, True, True, False, False, False]
    assert float(terms.loss) == pytest.approx(-(2 + 3 + 1 / 1.2 - 0.8 - 2 - 3))
    assert metrics_of(build("aspo"), ratios[:6], signs[:6])["aspo/dual_clipped"] == pytest.approx(2 / 6)
    free = build("aspo", clip_low=0.6, clip_high=1.5, dual_clip=10.0)
    assert terms_of(free, ratios, signs).gradient_T.tolist()[:6] == pytest.approx([2, 5, 0.5, 0.5, 2, 5])


def test_maspo_by_hand() -> None:
    """alpha 1, beta 1/2, sigma 1: width 2 * (1 + 1) for a token of probability 1/2 with A = 2, 2 / 2 for -2.

    Of one of probability 1e-6 it is 10, not 1e6. A token that moved against its advantage is not gated.
    """
    loss = build("maspo", sigma=1.0, alpha=1.0, beta=0.5)
    args = ([2.0, 0.5, 2.0, 0.5, 11.0], [2.0, -2.0, -2.0, 2.0, 2.0], [0.5, 0.5, 0.5, 0.5, 1e-6])
    gates = [math.exp(-1 / 2 / 4**2), math.exp(-0.25 / 2), 1.0, 1.0, math.exp(-100 / 2 / 20**2)]
    terms = terms_of(loss, *args)
    expected = [gate * r for gate, r in zip(gates, args[0], strict=True)]
    assert terms.gradient_T.tolist() == pytest.approx(expected)
    assert float(terms.loss) == pytest.approx(-sum(a * g for a, g in zip(args[1], expected, strict=True)))
    assert metrics_of(loss, *args)["maspo/gate"] == pytest.approx(sum(gates) / 5)
    narrow = terms_of(build("maspo", beta=1e3), [1.5, 0.9], [1.0, -1.0], [1.0, 1.0])
    assert narrow.gradient_T.tolist() == pytest.approx(
        [1.5 * math.exp(-0.25 / 2 / 10**2), 0.9 * math.exp(-0.01 / 2 / 0.1**2)]
    )


@pytest.mark.parametrize("name", LITERAL)
def test_a_token_beyond_the_log_ratio_limit_has_no_gradient_and_a_finite_loss(name: str) -> None:
    terms = terms_of(build(name), [math.exp(20.1), math.exp(-20.1)], [1.0, -1.0])
    assert terms.gradient_T.tolist() == [0.0, 0.0]
    assert math.isfinite(float(terms.loss))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "sapo",
            {"temperature": 2},
            r"^algorithm.loss_settings.temperature=2: .* no such setting; its settings: "
            r"temperature_positive: a number above 0, default 1.0; .* default 1.05$",
        ),
        ("sapo", {"temperature_positive": math.inf}, r"temperature_positive=inf is not a finite number; "),
        (
            "sapo",
            {"temperature_positive": "1"},
            r"temperature_positive='1' must be a number; .* a number above 0",
        ),
        ("dppo_kl", {"ratio_cap": "5"}, r"takes ratio_cap: a number or None above 0, default None$"),
        ("cispo", {"ratio_low": 2.0, "ratio_high": 2.0}, r"ratio_low=2.0 must be below ratio_high=2.0"),
        ("ce_gppo", {"beta1": -0.1, "gamma": 1}, r"(?s)beta1=-0.1 must be at least 0.*\n.*gamma=1: "),
    ],
)
def test_settings_that_no_loss_takes_are_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(name, **settings)
    assert terms_of(build("cispo", ratio_high=2), [3.0], [1.0]).gradient_T.tolist() == [2.0]
