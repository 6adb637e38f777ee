"""Gates of the second study, their margins in the calibration, and the chance that the study is judged.

Legend: ``_D`` draws of the bootstrap, ``_S`` seeds, ``_G`` gates. Used in this folder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bapo_megatron.evaluation.scoring import standard_deviation
from benchmarks.study.contrasts import by_seed
from benchmarks.study.controller.arms import STALE
from benchmarks.study.gates import Gate, GateResult, gate_results
from benchmarks.study.measures import ArmRecord, entropy_offset
from benchmarks.study.paired import CONFIDENCE, paired_effect, t_quantile

MARGIN = 2.0
"""Standard errors by which the calibration must hold each gate."""
CHANCE = 0.8
"""Least chance to be judged with which the study is run."""
ACTS = 0.5
"""Least share of the stale updates in which a bound must move."""
_DRAWS = 2000

CONTROLLER = Gate(
    "the controller acts: updates whose bounds moved",
    "moved",
    STALE,
    ACTS,
    math.inf,
    "both bounds fluctuate (Fig. 8)",
    method="paper",
    says="In the other updates BAPO was fixed (0.6, 1.2): its arms say what these bounds do, not what a "
    "search does.",
)
ENTROPY = Gate(
    "entropy at equal reward, 4 minus 1: upper end of its interval",
    "entropy_at_equal_reward",
    4,
    -math.inf,
    0.0,
    "lower at every reward (Fig. 2)",
    says="Stale data cost no entropy here that learning does not cost anyway: there was nothing for a method "
    "to keep.",
)
GATES = (
    Gate(
        "entropy kept on-policy",
        "entropy_kept",
        1,
        0.7,
        math.inf,
        "0.98 (Fig. 2)",
        says="Learning alone takes most of what entropy there is to keep.",
    ),
    Gate(
        "on-policy seeds that collapse",
        "collapsed",
        1,
        -math.inf,
        0.0,
        "none (Fig. 2)",
        says="The task is unstable without staleness: the learning rate is too high to say anything of it.",
    ),
    ENTROPY,
    Gate(
        "clipped tokens",
        "clipped",
        STALE,
        0.02,
        0.06,
        "0.022 at 8 (Fig. 2)",
        says="All methods with bounds act on these tokens alone: with other shares they act otherwise.",
    ),
    Gate(
        "positive share of the gradient",
        "positive_share",
        STALE,
        0.2,
        0.4,
        "0.427 in the mean, the target is 0.4 (Figs. 4, 9)",
        says="Positive tokens hold BAPO's target anyway: there was nothing to balance.",
    ),
    Gate(
        "tokens with a ratio above 1.2",
        "raised_tokens",
        STALE,
        0.01,
        math.inf,
        "0.033 (Fig. 10)",
        says="c_high acts on the positive ones among them, and had next to none.",
    ),
    Gate(
        "mean probability of those tokens when sampled",
        "raised_probability",
        STALE,
        -math.inf,
        0.4,
        "0.28 (Fig. 10)",
        says="The Entropy-Clip Rule is about unlikely tokens, and these were likely.",
    ),
    CONTROLLER,
)
"""All gates, on the runs of GRPO but for the last. Figures are means over seeds, of the stale updates but for
entropy and collapses. Nothing is judged unless all hold."""


@dataclass(frozen=True)
class Calibration:
    """The gates at the calibration's seeds, and the chance that all hold at the study's. Plain data."""

    gates: tuple[GateResult, ...]
    chance: float
    """Share of bootstrap draws of as many seeds as the study has in which all gates hold."""

    @property
    def narrow(self) -> list[GateResult]:
        """Gates that failed, or held by less than ``MARGIN`` standard errors."""
        return [one for one in self.gates if not margin_of(one) >= MARGIN]

    @property
    def is_sound(self) -> bool:
        """Whether the study may run: every margin is wide enough, and the chance high enough."""
        return not self.narrow and self.chance >= CHANCE


def results_of(records: Sequence[ArmRecord], gates: Sequence[Gate] = GATES) -> list[GateResult]:
    """The result of each gate; that of the entropy is the upper end of the interval of the difference."""
    return [_entropy_result(records) if one.gate is ENTROPY else one for one in gate_results(records, gates)]


def _entropy_result(records: Sequence[ArmRecord]) -> GateResult:
    differences = list(_entropy_differences(records).values())
    effect = paired_effect(differences)
    if effect is None:
        return GateResult(ENTROPY, math.nan, 0)
    error = standard_deviation(differences) / math.sqrt(len(differences)) if effect.pairs > 1 else math.nan
    return GateResult(ENTROPY, effect.high, effect.pairs, error)


def _entropy_differences(records: Sequence[ArmRecord]) -> dict[int, float]:
    """Entropy of GRPO at staleness 4 minus on-policy, at equal reward, by seed."""
    stale, fresh = (
        {one.seed: one for one in records if (one.method, one.passes) == ("grpo", passes)}
        for passes in (ENTROPY.passes, 1)
    )
    found = {seed: entropy_offset(stale[seed], fresh[seed]) for seed in stale if seed in fresh}
    return {seed: value for seed, value in found.items() if math.isfinite(value)}


def margin_of(result: GateResult) -> float:
    """Distance of a gate's value from its nearer limit, in standard errors; negative if it failed.

    A value without spread, as of no collapse in any seed, has all the room or none. NaN of what was not
    measured.
    """
    room = min(result.value - result.gate.low, result.gate.high - result.value)
    if not math.isfinite(result.value) or result.seeds < 2:
        return math.nan
    if result.error == 0:
        return math.inf if room >= 0 else -math.inf
    return room / result.error


def calibrated(records: Sequence[ArmRecord], seeds: int) -> Calibration:
    """The calibration of a study of ``seeds`` seeds, from the records of the calibration's arms."""
    return Calibration(tuple(results_of(records)), chance_of(records, seeds))


def chance_of(records: Sequence[ArmRecord], seeds: int, draws: int = _DRAWS) -> float:
    """Chance that all gates hold in a study of ``seeds`` seeds: a bootstrap over the calibration's seeds.

    A draw takes whole seeds with replacement, so gates that fail together are counted once. 0 if a gate was
    measured at no seed that all gates share.
    """
    columns = [
        _entropy_differences(records)
        if gate is ENTROPY
        else by_seed(records, gate.method, gate.passes, gate.figure)
        for gate in GATES
    ]
    shared = sorted(set.intersection(*map(set, columns)))
    if len(shared) < 2:
        return 0.0
    table_SG = np.array([[column[seed] for column in columns] for seed in shared])
    drawn = np.random.default_rng(0).integers(0, len(shared), (draws, seeds))
    values_DG = _values(table_SG[drawn])
    low_G, high_G = (np.array([getattr(gate, end) for gate in GATES]) for end in ("low", "high"))
    return float(((values_DG >= low_G) & (values_DG <= high_G)).all(1).mean())


def _values(drawn_DSG: np.ndarray) -> np.ndarray:
    """Values of the gates in each draw: means over its seeds, and the upper end of the entropy's interval."""
    seeds = drawn_DSG.shape[1]
    values_DG: np.ndarray = drawn_DSG.mean(1)
    if seeds < 2:
        return np.full_like(values_DG, np.nan)
    place = GATES.index(ENTROPY)
    spread_D = drawn_DSG[..., place].std(1, ddof=1)
    values_DG[:, place] += t_quantile((1 + CONFIDENCE) / 2, seeds - 1) * spread_D / math.sqrt(seeds)
    return values_DG
