"""The door for losses: metrics from CISPO's terms, users' losses, settings, refusals; and what TRL says."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pytest
import torch
from annotated_types import Gt
from torch import Tensor

from bapo_megatron.algo.bapo import BoundsConfig, balanced, clip_higher, fixed
from bapo_megatron.algo.corrections import is_off_policy
from bapo_megatron.algo.losses import Loss, LossTerms, Search, build_loss, load_loss
from bapo_megatron.algo.measurements import Measurement, token_mean
from bapo_megatron.algo.objective import Objective
from bapo_megatron.algo.papo_schedule import PapoConfig
from bapo_megatron.algo.sequences import sequence_means, sums_by_sequence
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.tensor_types import MicroBatch, SearchedLoss, TokenStats
from bapo_megatron.trainer.update_loss import UpdateLoss
from tests.support.small_steps import LN2, NotedPolicy
from tests.unit.algo.test_objective import DUMMY, DUMMY_STATS, PACK, STATS, pack

if TYPE_CHECKING:
    from bapo_megatron.config import RunConfig

PACKS = [pack([1.0, -3.0], [-1.0, -2.0], [1.0, 1.0], [7, 7])]


def algorithm(loss: str = "cispo", bounds: BoundsConfig | None = None, **rest: Any) -> AlgorithmConfig:
    """The settings of a run; CISPO's weight lies between 0.8 and 1.2."""
    if loss == "cispo":
        rest["loss_settings"] = {"ratio_low": 0.8, "ratio_high": 1.2}
    return AlgorithmConfig(loss=loss, bounds=BoundsConfig() if bounds is None else bounds, **rest)


def test_metrics_follow_the_loss() -> None:
    """Ratios 2, 1/2 and 1 at bounds (0.8, 1.2): factors 1.2, 0.8 and 1 (BAPO's: 0, 0 and 1).

    Masses 0.5 * 1 * 1.2, 2 * 2 * 0.8 and 3: 0.6, 3.2 and 3. log pi + H of the tokens: ln 2 - 0.7, -0.4 - ln 2
    and -1.1, so the effects are -0.6 (ln 2 - 0.7), 3.2 (-0.4 - ln 2) and 3.3.
    """
    objective = Objective(build_loss(algorithm()))
    sums = objective.token_fn(None, 6)(STATS, PACK)
    metrics = objective.metrics(sums, None)
    assert float(sums[0]) == pytest.approx(-(0.5 * 1.2 * (LN2 - 1) - 4 * 0.8 * (-1 - LN2) + 3 * -2))
    expected = {
        "cispo/weight": 1.0,
        "bapo/clip_fraction_high": 1 / 3,
        "bapo/clip_fraction_low": 1 / 3,
        "staleness/1/clipped": 1.0,
        "quadrant/negative_low/contribution": 3.2 / 6.8,
        "quadrant/positive_low/contribution": 3.6 / 6.8,
        "entropy_rule/effect": (-0.6 * (LN2 - 0.7) + 3.2 * (-0.4 - LN2) + 3.3) / 3,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert not any(name.startswith(("contribution/", "bapo/clip_low")) for name in metrics)
    assert not objective.token_fn(None, 0)(DUMMY_STATS, DUMMY).any()


def test_a_loss_without_a_search_makes_no_pass_and_is_reweighted_by_papo() -> None:
    """Ratio 2, so factor 1.2: -1.2 (ln 2 - 1) + 3.6 (ln 2 - 2). Entropies are 0, so both tokens are unlikely:
    the first expands, the second contracts; far below its target PAPO weighs them 1.5 and 0.5."""
    policy: Any = NotedPolicy(entropy=0.0)
    clipping = UpdateLoss(algorithm(polarity=PapoConfig(True, memory=0.0, target_entropy=4.0)))
    losses = []
    for _ in range(2):
        loss = clipping.loss(policy, PACKS, False)
        sums = policy.sums(PACKS, loss)
        clipping.observe(sums)
        losses.append(float(sums[0]))
    assert (clipping.found, policy.calls) == (None, [])
    first, second = -1.2 * (LN2 - 1), 3.6 * (LN2 - 2)
    assert losses == pytest.approx([first + second, 1.5 * first + 0.5 * second])


class Bounded(Loss):
    """A user's loss that reads fixed bounds: REINFORCE with a weight between them."""

    bounds = "fixed"

    def __init__(self, algorithm: AlgorithmConfig, widening: Annotated[float, Gt(0)] = 1.0) -> None:
        self.low = algorithm.bounds.low_start / widening
        self.high = algorithm.bounds.high_start * widening

    def terms(self, stats: TokenStats, batch: MicroBatch, found: None) -> LossTerms:
        factor_T = (stats.log_prob_T - batch.old_log_prob_T).detach().exp().clamp(self.low, self.high)
        loss = -(batch.weight_T * batch.advantage_T * factor_T * stats.log_prob_T).double().sum()
        return LossTerms(loss, factor_T, torch.zeros_like(factor_T, dtype=torch.bool))


Wide = functools.partial(Bounded, widening=2.0)
BOUNDED, WIDE = f"{__name__}:Bounded", f"{__name__}:Wide"


class Untyped(Bounded):
    """A user's loss without annotations, or with one that only a type checker can look up."""

    def __init__(self, algorithm: RunConfig, width=2.0, name="a", needed=None, *, extra):  # type: ignore[no-untyped-def]
        self.given = width, name, needed, extra


UNTYPED = f"{__name__}:Untyped"


def test_settings_without_annotations_take_the_type_of_their_default() -> None:
    built: Any = build_loss(algorithm(UNTYPED, fixed(0.8, 1.2), loss_settings={"width": 3, "extra": [1]}))
    assert built.given == (3, "a", None, [1])


@pytest.mark.parametrize(
    ("loss", "settings", "message"),
    [
        (WIDE, {"widening": 0}, r"widening=0 must be above 0; .* default 2.0$"),
        (
            UNTYPED,
            {"extra": 1, "width": "x"},
            r"width='x' must be a number; .* width: a number, default 2.0$",
        ),
        (UNTYPED, {}, r"^algorithm.loss_settings.extra is missing: .* extra: Any, needed$"),
    ],
)
def test_a_constructors_settings_are_checked(loss: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_loss(algorithm(loss, fixed(0.8, 1.2), loss_settings=settings))


class SharedFactor(Loss):
    """REINFORCE with one factor for all tokens, the mean ratio of the update: a loss with a search."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self.search = Search(self.measure, lambda sums: float(sums[1] / sums[0]), "update", 2)

    @staticmethod
    def measure(stats: TokenStats, batch: MicroBatch) -> Tensor:
        ratio_T = (stats.log_prob_T - batch.old_log_prob_T).double().exp()
        return torch.stack([batch.mask_T.double().sum(), (batch.mask_T * ratio_T).sum()])

    def terms(self, stats: TokenStats, batch: MicroBatch, found: float) -> LossTerms:
        factor_T = torch.full_like(stats.log_prob_T, found).detach()
        loss = -(batch.weight_T * batch.advantage_T * found * stats.log_prob_T).double().sum()
        return LossTerms(loss, factor_T, torch.zeros_like(batch.mask_T, dtype=torch.bool))


@pytest.mark.parametrize(
    ("rest", "on_policy", "hold", "factor", "passes"),
    [
        ({}, False, False, 2.0, ["token_sums"]),
        ({}, True, False, 1.0, ["old_sums"]),
        ({"known_ratio": False}, True, False, 2.0, ["token_sums"]),
        ({}, False, True, 2.0, []),
    ],
)
def test_another_losss_search_has_the_same_scopes(
    rest: dict[str, Any], on_policy: bool, hold: bool, factor: float, passes: list[str]
) -> None:
    """All tokens at ratio 2: the factor is 2, or 1 where the ratio is taken as known."""
    policy: Any = NotedPolicy()
    clipping = UpdateLoss(AlgorithmConfig(loss=f"{__name__}:SharedFactor", **rest), hold)
    loss = clipping.loss(policy, PACKS, on_policy)
    assert clipping.found == (None if hold else pytest.approx(factor))
    assert policy.calls == passes
    if isinstance(loss, SearchedLoss):
        loss = loss.loss_of(policy.sums(PACKS, loss.measure))
    sums = policy.sums(PACKS, loss)
    assert clipping.objective.search_sums(sums).tolist() == pytest.approx([2.0, 4.0])
    value = -factor * float((PACKS[0].advantage_T * (PACKS[0].old_log_prob_T + LN2)).sum())
    assert clipping.objective.metrics(sums, None)["policy/loss"] == pytest.approx(value / 2)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("ppo", " is unknown: give .*cispo, .* package.module:n"),
        ("tests.support.nothing:Mine", "importing .* failed"),
        ("math:sqrt", "is not a subclass of bapo_megatron.algo.losses.Loss"),
        ("bapo_megatron.algo.losses:Loss", "Loss lacks terms"),
    ],
)
def test_an_unknown_loss_is_an_error(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"^algorithm.loss='?{name}.*{problem}"):
        load_loss(name)


@pytest.mark.parametrize(
    ("loss", "bounds", "fields"),
    [
        (BOUNDED, balanced(), "reads fixed bounds and searches none.*algorithm.bounds=fixed"),
        (
            BOUNDED,
            dataclasses.replace(clip_higher(), dual_clip=3.0, target=0.5),
            "^algorithm.bounds.target=0.5, algorithm.bounds.dual_clip=3.0: ",
        ),
        (f"{__name__}:SharedFactor", clip_higher(), ".*".join(["low_start=0.8", "low_end", "high_end=1.28"])),
    ],
)
def test_settings_of_bounds_must_be_read_by_a_loss(loss: str, bounds: BoundsConfig, fields: str) -> None:
    with pytest.raises(ConfigError, match=fields):
        build_loss(algorithm(loss, bounds))


def test_measurements_that_would_be_misread_are_refused() -> None:
    """The sums of the search come behind them."""
    loss = build_loss(algorithm())
    loss.measurements = (token_mean("policy/kl", lambda view: view.log_ratio_T),)
    with pytest.raises(ValueError, match="two measurements have the name 'policy/kl'"):
        Objective(loss)
    wrong = Measurement("mine", 2, lambda view: view.live_T.sum()[None].double(), lambda _sums, _update: {})
    loss.measurements = (wrong,)
    with pytest.raises(ValueError, match=r"measurement mine: sums \[1\], size=2"):
        Objective(loss).token_fn(None, 0)(STATS, PACK)


FIXTURES = Path(__file__).parents[2] / "fixtures"
TOLD = json.loads((FIXTURES / "trl/losses.json").read_text())

OURS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "clip": (AlgorithmConfig().loss, "token", {}),
    "cispo": ("cispo", "token", {}),
    "cispo_2": ("cispo", "token", {"ratio_high": 2.0}),
    "sapo": ("sapo", "sequence", {"temperature_negative": torch.tensor(1.05).item()}),
    "sapo_3_4": ("sapo", "sequence", {"temperature_positive": 3.0, "temperature_negative": 4.0}),
    "gspo": ("gspo", "sequence", {}),
    "vespo": ("vespo", "token", {}),
}
"""Our loss, the mean that TRL takes for it, and its settings (TRL holds SAPO's temperature in float32)."""


def float64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def trl_pack(
    mask: Any, log_prob: Any, old_log_prob: Any, advantage: Any, mean: str = "token"
) -> tuple[TokenStats, MicroBatch]:
    """TRL's batch as one pack: the tokens of its responses, padding as masked tokens, in float64."""
    mask_BT, old_T = float64(mask), float64(old_log_prob).flatten()
    lengths_B = mask_BT.sum(1, keepdim=True)
    mean_BT = mask_BT if mean == "token" else mask_BT * mask_BT.sum() / len(mask_BT) / lengths_B
    sequence_BT = torch.arange(len(mask_BT))[:, None].expand_as(mask_BT)
    batch = MicroBatch.of(
        (0, mask_BT.numel()),
        sequences=len(mask_BT),
        mask_T=mask_BT.flatten(),
        weight_T=mean_BT.flatten(),
        advantage_T=(float64(advantage)[:, None] * mask_BT).flatten(),
        old_log_prob_T=old_T,
        rollout_log_prob_T=old_T,
        sequence_T=torch.where(mask_BT != 0, sequence_BT, -1).flatten(),
    )
    return TokenStats(float64(log_prob).flatten(), torch.zeros_like(old_T)), batch


def assert_trls(loss: Loss, stats: TokenStats, batch: MicroBatch, tokens: float, expected: Any) -> None:
    """Loss and gradient, of a mean over so many tokens."""
    found = loss.search.find(loss.search.measure(stats, batch)) if loss.search else None
    log_prob_T = stats.log_prob_T.requires_grad_()
    value = loss.terms(TokenStats(log_prob_T, stats.entropy_T), batch, found).loss / tokens
    value.backward()
    assert log_prob_T.grad is not None
    assert value.item() == pytest.approx(expected["loss"], rel=1e-12)
    gradient_T = float64(expected["gradient"]).flatten()
    torch.testing.assert_close(log_prob_T.grad, gradient_T, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("case", OURS)
def test_loss_and_gradient_are_trls(case: str) -> None:
    name, mean, settings = OURS[case]
    bounds = fixed(0.8, 1.28) if case == "clip" else BoundsConfig()
    loss = build_loss(AlgorithmConfig(loss=name, loss_settings=settings, bounds=bounds))
    stats, batch = trl_pack(**TOLD["batch"], mean=mean)
    assert_trls(loss, stats, batch, float(batch.mask_T.sum()), TOLD["cases"][case])


def test_the_off_policy_mask_with_vespo_is_trls() -> None:
    """It rejects one response of the four, whose gradient is zero. TRL keeps it in its count of tokens, here
    it leaves it."""
    mask, *columns = (TOLD["batch"][name] for name in ("mask", "log_prob", "old_log_prob", "advantage"))
    stats, batch = trl_pack(mask, *columns)
    means = sequence_means(sums_by_sequence(batch.rollout_log_prob_T - stats.log_prob_T, batch)).tolist()
    kept = [not is_off_policy(*both, 0.02) for both in zip(columns[-1], means, strict=True)]
    expected = TOLD["cases"]["vespo_masked"]
    assert [any(row) for row in expected["gradient"]] == kept
    assert kept.count(False) == 1
    left = trl_pack((float64(mask) * float64(kept)[:, None]).tolist(), *columns)
    vespo = build_loss(AlgorithmConfig(loss="vespo"))
    assert_trls(vespo, *left, float(batch.mask_T.sum()), expected)
