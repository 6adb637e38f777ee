"""Choice of rates and verdicts of the second study: contrasts if all gates hold, else what the failure says.

Used in this folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.study.contrasts import OUTCOME, Contrast, by_seed, contrast
from benchmarks.study.controller.arms import (
    RATE_SEEDS,
    RATES,
    STALE,
    TUNED,
    Variant,
    pairs_at_recipe_rate,
    tuned_pairs,
)
from benchmarks.study.controller.gates import GATES, results_of
from benchmarks.study.gates import GateResult
from benchmarks.study.measures import ArmRecord
from benchmarks.study.paired import holm


@dataclass(frozen=True)
class Claims:
    """The primary contrasts in mean reward at staleness 8, Holm's p-values over all. Made by ``claims``."""

    at_recipe_rate: list[Contrast]
    tuned: list[Contrast]
    """At the best rates."""


def rate_means(records: Sequence[ArmRecord]) -> dict[str, dict[float, float]]:
    """Mean reward of each tuned method at each rate, over ``RATE_SEEDS``; only where all of them have run."""
    means: dict[str, dict[float, float]] = {}
    for method in TUNED:
        for rate in RATES:
            found = by_seed(records, Variant(method, rate).name, STALE, OUTCOME)
            values = [found[seed] for seed in RATE_SEEDS if seed in found]
            if len(values) == len(RATE_SEEDS):
                means.setdefault(method, {})[rate] = fmean(values)
    return means


def chosen_rates(records: Sequence[ArmRecord]) -> dict[str, float] | None:
    """The rate of each tuned method with the best mean reward over ``RATE_SEEDS``; None unless all ran."""
    means = rate_means(records)
    if sum(map(len, means.values())) < len(TUNED) * len(RATES):
        return None
    return {method: max(RATES, key=means[method].__getitem__) for method in TUNED}


def claims(records: Sequence[ArmRecord], chosen: dict[str, float]) -> Claims:
    """The claims, judged or not: Holm's correction counts all of them."""
    first, second = pairs_at_recipe_rate(), tuned_pairs(chosen)
    found = [contrast(records, *pair, STALE) for pair in [*first, *second]]
    tested = [place for place, one in enumerate(found) if one.p is not None]
    adjusted = holm([p for one in found if (p := one.p) is not None])
    for place, p in zip(tested, adjusted, strict=True):
        found[place] = replace(found[place], p=p)
    return Claims(found[: len(first)], found[len(first) :])


def tuned_gates(records: Sequence[ArmRecord], chosen: dict[str, float]) -> list[GateResult]:
    """The gates at staleness 8 again, on GRPO and BAPO at their best rates."""
    return results_of(
        records,
        [
            replace(gate, method=Variant(gate.method, chosen[gate.method]).name)
            for gate in GATES
            if gate.passes == STALE
        ],
    )


def verdicts(gates: Sequence[GateResult], tuned: Sequence[GateResult], found: Claims) -> Iterator[str]:
    """The answer, one line each: the contrasts in words, or what each failed gate says, and nothing else.

    ``tuned``: the gates at the best rates; if one fails there, nothing is judged there.
    """
    failed = [one for one in gates if not one.passed]
    for one in failed:
        yield f"Not judged: {one.gate.text} is {one.shown}, and must be {one.gate.range}. {one.gate.says}"
    if failed:
        return
    for claim in found.at_recipe_rate:
        yield f"`{claim.method}` against `{claim.other}`: {claim.words}"
    if narrow := [one for one in tuned if not one.passed]:
        lacks = "; ".join(f"{one.gate.text} of `{one.gate.method}`: {one.shown}" for one in narrow)
        yield f"At the best rates nothing is judged: gates fail there ({lacks}). The differences are below"
        return
    for claim in found.tuned:
        yield f"`{claim.method}` against `{claim.other}`: {claim.words}"
