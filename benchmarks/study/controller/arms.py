"""Arms of the second study: variants (a method at a share of the learning rate), staleness, stages, seeds.

*Staleness* is counted as the paper and the authors' script count it: passes times mini-batches, the updates
of a batch. 1 is on-policy. Used in this folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bapo_megatron.algo.bounds import grpo
from bapo_megatron.algo.losses import load_loss
from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from benchmarks.study.controller.options import ControllerOptions
from benchmarks.study.methods import METHODS, Method, work
from benchmarks.study.plan import Arm, StudyPlan, save_flags

DESIGN = "controller-2"
"""Name of the arms' design; folders and results of another one are refused."""
UPDATES = {1: (1, 1), 4: (2, 2), 8: (2, 4)}
"""Passes and mini-batches of each staleness."""
STALE = 8
"""Staleness at which all variants run."""
WARM_STEPS = 4
"""Steps of warm-up, at every staleness."""
RATES = (1.0, 0.7, 0.5, 0.35)
"""Shares of the recipe's learning rate."""
VARIANTS = {
    **METHODS,
    "grpo_sequence": Method("GRPO, sequence mean", grpo(), loss_mean="sequence"),
    "paper_sequence": Method("BAPO, sequence mean", METHODS["paper"].bounds, loss_mean="sequence"),
}
"""All methods: those of the first study, and GRPO and BAPO with the mean by response."""
TUNED = ("paper", "paper_sequence", "grpo", "grpo_sequence", "fixed_0.9_1.2", "gspo", "vespo")
"""Methods that also run at the best of ``RATES``."""
RIVALS = ("grpo", "grpo_sequence", "fixed_0.9_1.2")
"""Methods that BAPO is compared with."""
START = "fixed_0.6_1.2"
"""The bounds at which BAPO's search begins: what the search adds to them, both at the recipe's rate."""
CALIBRATION_SEEDS, RATE_SEEDS = range(100, 112), range(200, 204)
"""Seeds that choose; the study's own are 0, 1, ..."""
_CALIBRATION = (("grpo", 1), ("grpo", 4), ("grpo", 8), ("paper", 8))
QUICK = (("grpo", 1), ("grpo", 8), ("paper", 8))


@dataclass(frozen=True)
class Variant:
    """A method at a share of the recipe's learning rate. Made by ``variant_of``."""

    method: str
    rate: float

    @property
    def name(self) -> str:
        """``METHOD``, or ``METHOD@RATE`` at another rate than the recipe's."""
        return self.method if self.rate == 1 else f"{self.method}@{self.rate:g}"


def variant_of(name: str) -> Variant:
    """The variant of a name, such as ``grpo@0.7``."""
    method, _, rate = name.partition("@")
    return Variant(method, float(rate or 1))


def calibration_arms(options: ControllerOptions, base: RunConfig) -> list[Arm]:
    """The arms of the gates, at seeds of their own."""
    return [arm_of(options, base, *cell, seed) for seed in CALIBRATION_SEEDS for cell in _CALIBRATION]


def rate_arms(options: ControllerOptions, base: RunConfig) -> list[Arm]:
    """Each tuned method at each rate, at seeds of their own."""
    names = [Variant(method, rate).name for method in TUNED for rate in RATES]
    return [arm_of(options, base, name, STALE, seed) for seed in RATE_SEEDS for name in names]


def pairs_at_recipe_rate() -> list[tuple[str, str]]:
    """What claims compare at the recipe's rate. The last pair differs in nothing but the bounds."""
    return [*(("paper", other) for other in (*RIVALS, START)), ("paper_sequence", "grpo_sequence")]


def tuned_pairs(chosen: dict[str, float]) -> list[tuple[str, str]]:
    """The same but for the start, each method at its best rate; without what the recipe's rate compares."""
    best = {method: Variant(method, rate).name for method, rate in chosen.items()}
    pairs = [(best[one], best[other]) for one, other in pairs_at_recipe_rate() if other != START]
    return [pair for pair in pairs if pair not in pairs_at_recipe_rate()]


def judged_cells(chosen: dict[str, float]) -> list[tuple[str, int]]:
    """Variants and staleness that gates and claims need. ``chosen``: the best rate of each tuned method."""
    names = dict.fromkeys(name for pair in [*pairs_at_recipe_rate(), *tuned_pairs(chosen)] for name in pair)
    return [("grpo", 1), ("grpo", 4), *((name, STALE) for name in names)]


def main_cells(chosen: dict[str, float]) -> list[tuple[str, int]]:
    """All variants and staleness of the study itself, what is judged first."""
    best = [Variant(method, rate).name for method, rate in chosen.items()]
    controls = [Variant("grpo", rate).name for rate in RATES]
    others = ((name, STALE) for name in [*best, *controls, *VARIANTS])
    return list(dict.fromkeys([*judged_cells(chosen), *others]))


def main_arms(options: ControllerOptions, base: RunConfig, chosen: dict[str, float]) -> list[Arm]:
    """The arms of the study itself: what is judged, seed by seed, then the others, seed by seed."""
    judged = judged_cells(chosen)
    others = [cell for cell in main_cells(chosen) if cell not in judged]
    seeds = range(options.seeds)
    return [
        arm_of(options, base, *cell, seed) for cells in (judged, others) for seed in seeds for cell in cells
    ]


def quick_arms(options: ControllerOptions, base: RunConfig) -> list[Arm]:
    """Three arms, to see that the study works."""
    return [arm_of(options, base, *cell, seed) for seed in range(options.seeds) for cell in QUICK]


def make_plan(options: ControllerOptions, arms: list[Arm]) -> StudyPlan:
    """The plan of these arms. ConfigError if the recipe does not serve, or for a loss that does not exist."""
    base = base_of(options)
    for name in {variant_of(arm.method).method for arm in arms}:
        load_loss(VARIANTS[name].loss)
    return StudyPlan(options, base, tuple(arms), DESIGN)


def base_of(options: ControllerOptions) -> RunConfig:
    """The checked base recipe."""
    base = load_recipe(options.recipe, RunConfig)
    base.check()
    return base


def arm_of(options: ControllerOptions, base: RunConfig, name: str, staleness: int, seed: int) -> Arm:
    """One arm: a variant at a staleness with a seed."""
    steps = options.steps or base.steps
    variant = variant_of(name)
    rate = (options.lr or base.optimizer.lr) * variant.rate
    run_dir = options.folder / "arms" / f"{name}-{staleness}-seed{seed}"
    flags = (
        *(f"--name={run_dir.name}", f"--run-dir={run_dir}", f"--seed={seed}", f"--steps={steps}"),
        *VARIANTS[variant.method].flags,
        *staleness_flags(staleness),
        f"--optimizer.lr={rate:.6g}",
        *save_flags(base, steps),
    )
    command = ("train", str(options.recipe), *flags)
    evaluates = bool(base.evaluation.suites)
    return Arm(name, staleness, seed, steps, run_dir, command, work(staleness, steps), evaluates)


def staleness_flags(staleness: int) -> Iterator[str]:
    """Flags of a staleness, with a warm-up of ``WARM_STEPS`` steps."""
    passes, parts = UPDATES[staleness]
    yield f"--algorithm.reuse-epochs={passes}"
    yield f"--algorithm.updates-per-epoch={parts}"
    yield f"--optimizer.warmup-updates={WARM_STEPS * staleness}"
