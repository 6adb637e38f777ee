"""Choice of rates and verdicts of the second study: contrasts if all gates hold, else what the failure says.

Used in this folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from benchmarks.study.contrasts import OUTCOME, Contrast, by_seed, contrast
from benchmarks.study.controller.arms import CLAIMED, RATE_SEEDS, RATES, STALE, START, Variant
from benchmarks.study.gates import GateResult
from benchmarks.study.measures import ArmRecord
from benchmarks.study.paired import holm

RIVALS = ("grpo", "grpo_sequence", "fixed_0.9_1.2")
"""Methods that BAPO is compared with, each at its best rate, as BAPO is."""


def chosen_rates(records: Sequence[ArmRecord]) -> dict[str, float] | None:
    """The rate of each claimed method with the best mean reward over ``RATE_SEEDS``; None unless all ran."""
    chosen: dict[str, float] = {}
    for method in CLAIMED:
        means = {}
        for rate in RATES:
            found = by_seed(records, Variant(method, rate).name, STALE, OUTCOME)
            values = [found[seed] for seed in RATE_SEEDS if seed in found]
            if len(values) < len(RATE_SEEDS):
                return None
            means[rate] = fmean(values)
        chosen[method] = max(means, key=lambda rate: means[rate])
    return chosen


def claims(records: Sequence[ArmRecord], chosen: dict[str, float]) -> list[Contrast]:
    """The primary contrasts in mean reward at staleness 8, with Holm's p-values."""
    best = {method: Variant(method, rate).name for method, rate in chosen.items()}
    pairs = [*((best["paper"], best[rival]) for rival in RIVALS), (best["paper"], "grpo"), ("paper", START)]
    found = [contrast(records, *pair, STALE) for pair in dict.fromkeys(pairs) if pair[0] != pair[1]]
    tested = [place for place, one in enumerate(found) if one.p is not None]
    adjusted = holm([p for one in found if (p := one.p) is not None])
    for place, p in zip(tested, adjusted, strict=True):
        found[place] = replace(found[place], p=p)
    return found


def verdicts(gates: Sequence[GateResult], found: Sequence[Contrast]) -> Iterator[str]:
    """The answer, one line each: the contrasts in words, or what each failed gate says, and nothing else."""
    failed = [one for one in gates if not one.passed]
    for one in failed:
        value = one.shown
        yield f"Not judged: {one.gate.text} is {value}, and must be {one.gate.range}. {one.gate.says}"
    if failed:
        return
    for claim in found:
        yield f"`{claim.method}` against `{claim.other}`: {claim.words}"
