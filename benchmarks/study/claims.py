"""The paper's claims that a study can speak to, each as a difference between two arms, and their verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

import numpy as np

from benchmarks.study.measures import ArmRecord
from benchmarks.study.methods import BAPO, BASELINE, MATCHED, METHODS, STALE, stand_in
from benchmarks.study.paired import Effect, Verdict, paired_effect, verdict

SMALLEST = {
    "final_reward": 0.05,
    "held_out": 0.05,
    "mean_reward": 0.05,
    "drawdown": 0.05,
    "entropy_kept": 0.1,
    "spikes": 1.0,
    "clipped": 0.005,
    "contribution": 0.05,
}
"""The least difference in a figure that matters, in its units."""

LEAST_MOVED = 0.05
"""Where fewer updates than this share move their bounds, BAPO clips at the bounds that it begins with."""

Needs = Literal["bounds that move", "bounds that do not move"]


@dataclass(frozen=True)
class Side:
    """One side of a claim: a method, averaged over staleness settings."""

    method: str
    settings: tuple[str, ...]

    @property
    def label(self) -> str:
        """Name of the side in a table."""
        return f"{self.method} ({', '.join(self.settings) or 'left out'})"


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, as a difference between two sides in one figure."""

    text: str
    source: str
    figure: str
    """The figure that is compared, a key of ``SMALLEST``."""
    sign: int
    """Claimed sign of the difference ``side - other``."""
    side: Side
    other: Side | None
    """The side compared with. None: the number 1/2."""
    needs: Needs | None = None
    """Property of ``side`` without which the claim does not apply."""


@dataclass(frozen=True)
class Finding:
    """A claim with its effect and its verdict."""

    claim: Claim
    effect: Effect | None
    verdict: Verdict
    moved: float | None = None
    """Share of the side's updates that moved their bounds; None if nothing was run."""


def findings(records: Sequence[ArmRecord], settings: Sequence[str]) -> list[Finding]:
    """The findings of a study: all claims, tested on its runs, within the settings that it has."""
    return [find(records, limited_to(claim, settings)) for claim in CLAIMS]


def find(records: Sequence[ArmRecord], claim: Claim) -> Finding:
    """The finding for one claim."""
    effect = paired_effect(side_differences(records, claim))
    shares = by_seed(records, claim.side, "moved").values()
    moved = fmean(shares) if shares else None
    unmoved = moved is not None and moved < LEAST_MOVED
    if claim.needs and moved is not None and unmoved != (claim.needs == "bounds that do not move"):
        return Finding(claim, effect, "does not apply", moved)
    return Finding(claim, effect, verdict(effect, claim.sign, SMALLEST[claim.figure]), moved)


def limited_to(claim: Claim, settings: Sequence[str]) -> Claim:
    """The claim restricted to the settings that a study has: a mean over fewer."""

    def cut(side: Side) -> Side:
        return replace(side, settings=tuple(name for name in side.settings if name in settings))

    return replace(claim, side=cut(claim.side), other=claim.other and cut(claim.other))


def best_preset(records: Sequence[ArmRecord], settings: Sequence[str]) -> list[tuple[str, Finding]]:
    """The preset of BAPO that answers most held-out problems over the stale settings, against each other one.

    On the seeds that all of them have; empty unless two presets were measured. The best of several noisy
    means looks better than it is.
    """
    sides = [Side(preset, tuple(name for name in STALE if name in settings)) for preset in BAPO]
    shares = {side: found for side in sides if (found := by_seed(records, side, "held_out"))}
    common = set.intersection(*map(set, shares.values())) if shares else set()
    if len(shares) < 2 or not common:
        return []
    means = {side: fmean(found[seed] for seed in common) for side, found in shares.items()}
    best = max(means, key=lambda side: means[side])
    rivals = [Claim("", "", "held_out", 1, best, side) for side in means if side != best]
    return [(best.method, find(records, claim)) for claim in rivals]


def side_differences(records: Sequence[ArmRecord], claim: Claim) -> list[float]:
    """``side - other`` in the claim's figure, one for each seed that has both sides.

    Settings are averaged within a seed first: they share its prompts and its luck.
    """
    side = by_seed(records, claim.side, claim.figure)
    if claim.other is None:
        return [value - 0.5 for value in side.values()]
    other = by_seed(records, claim.other, claim.figure)
    return [value - other[seed] for seed, value in side.items() if seed in other]


def by_seed(records: Sequence[ArmRecord], side: Side, figure: str) -> dict[int, float]:
    """A side's figure by seed, for each seed that has all its settings measured."""
    found: dict[int, float] = {}
    if not side.settings:
        return found
    cells = {(stand_in(side.method, setting), setting) for setting in side.settings}
    for seed in sorted({record.seed for record in records}):
        values = [
            record.figures[figure]
            for record in records
            if record.seed == seed and (record.method, record.setting) in cells
        ]
        if len(values) == len(cells) and np.isfinite(values).all():
            found[seed] = fmean(values)
    return found


_GRPO_FRESH, _GRPO_7, _GRPO_15 = (Side(BASELINE, (name,)) for name in ("fresh", "stale_7", "stale_15"))
_GRPO, _HIGHER = Side(BASELINE, STALE), Side("clip_higher", STALE)
_GRPO_PARTIAL = Side(BASELINE, ("partial",))
_GRPO_MATCHED = Side(BASELINE, (MATCHED,))


def _of_staleness() -> Iterator[Claim]:
    fig_2 = "Sec. 3, Fig. 2"
    for text, figure, sign, fresh in (
        ("With staleness the training becomes unstable", "drawdown", 1, _GRPO_FRESH),
        ("With staleness the entropy falls further", "entropy_kept", -1, _GRPO_FRESH),
        ("With staleness the gradient norm spikes", "spikes", 1, _GRPO_MATCHED),  # updates of one size
    ):
        yield Claim(text, fig_2, figure, sign, _GRPO_15, fresh)
        yield Claim(f"{text}, at equal updates", fig_2, figure, sign, _GRPO_7, _GRPO_MATCHED)
    yield Claim(
        *("With staleness more tokens are clipped", "Sec. 3", "clipped", 1),
        *(_GRPO_15, Side(BASELINE, ("stale_3",))),
    )
    yield Claim(
        "Under GRPO negative tokens dominate the gradient", "Sec. 3, Fig. 4", "contribution", -1, _GRPO, None
    )


def _of_clip_higher() -> Iterator[Claim]:
    fig_7 = "Sec. 4.1, Fig. 7"
    yield Claim("A higher c_high holds back the fall of entropy", fig_7, "entropy_kept", 1, _HIGHER, _GRPO)
    yield Claim("A higher c_high improves performance", fig_7, "held_out", 1, _HIGHER, _GRPO)


def _of_a_lower_c_low() -> Iterator[Claim]:
    """BAPO whose bounds do not move clips at 0.6 and 1.2, GRPO at 0.8 and 1.2."""
    fig_7, side = "Sec. 4.1, Fig. 7", Side("balanced", STALE)
    needs: Needs = "bounds that do not move"
    yield Claim("A lower c_low degrades performance", fig_7, "held_out", -1, side, _GRPO, needs)
    yield Claim("A lower c_low speeds up the fall of entropy", fig_7, "entropy_kept", -1, side, _GRPO, needs)


def _of_bapo(preset: str) -> Iterator[Claim]:
    return (replace(claim, needs="bounds that move") for claim in _of_a_preset(preset))


def _of_a_preset(preset: str) -> Iterator[Claim]:
    fig_9, side = "Sec. 4.3, Fig. 9", Side(preset, STALE)
    bapo = f"BAPO (`{preset}`)"
    yield Claim(f"{bapo} raises the reward faster", fig_9, "mean_reward", 1, side, _GRPO)
    yield Claim(f"{bapo} keeps the entropy", fig_9, "entropy_kept", 1, side, _GRPO)
    yield Claim(f"{bapo} trains more stably", fig_9, "drawdown", -1, side, _GRPO)
    yield Claim(f"{bapo} steadies the gradient norm", fig_9, "spikes", -1, side, _GRPO)
    yield Claim(f"{bapo} raises the positive contribution", fig_9, "contribution", 1, side, _GRPO)
    for other in (_GRPO, _HIGHER):
        yield Claim(
            f"{bapo} outperforms {METHODS[other.method].name}",
            "Sec. 4.3, Fig. 11",
            "held_out",
            1,
            side,
            other,
        )
    fig_12, partial = "Sec. 5.3, Fig. 12", Side(preset, ("partial",))
    yield Claim(f"{bapo} performs better with partial rollout", fig_12, "held_out", 1, partial, _GRPO_PARTIAL)
    yield Claim(f"{bapo} is more stable with partial rollout", fig_12, "drawdown", -1, partial, _GRPO_PARTIAL)


def _of_papo() -> Iterator[Claim]:
    source = "arXiv 2605.11775, abstract; formulas ours"
    for method, base in (("papo_grpo", "grpo"), ("papo", "balanced")):
        papo, without = Side(method, STALE), Side(base, STALE)
        name = f"PAPO on `{base}`"
        yield Claim(f"{name} holds the entropy", source, "entropy_kept", 1, papo, without)
        yield Claim(f"{name} improves performance", source, "held_out", 1, papo, without)


CLAIMS = (
    *_of_staleness(),
    *_of_clip_higher(),
    *_of_a_lower_c_low(),
    *(claim for preset in BAPO for claim in _of_bapo(preset)),
    *_of_papo(),
)
