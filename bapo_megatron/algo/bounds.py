"""Clipping bounds of BAPO: settings (``BoundsConfig``), presets, and the search of Algorithm 1.

``search_bounds`` maps contribution sums, one per candidate bound (53 with the paper's ranges), to ``Bounds``.
``surrogate.py`` computes the sums; reduced over ranks they give equal bounds on every rank. Raises ValueError
for a wrong number of sums, FloatingPointError for non-finite ones (a broken policy).
``BoundsConfig.problems`` yields invalid settings. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

Measure = Literal["surrogate", "gradient"]
Share = Literal["absolute", "signed", "ratio"]
Weight = Literal["rollout_probability", "uniform"]
Order = Literal["high_first", "low_first"]

PAPER_TOKENS = 16384
"""Tokens per micro-batch in the authors' example script: verl's default for dynamic batches
(``ppo_max_token_len_per_gpu``). In October 2025 each GPU searched its own micro-batches (WooooDyy/BAPO at
820d9c0); since 3b8389c of January 2026 all GPUs search theirs together."""


@dataclass(frozen=True)
class BoundsConfig:
    """Settings of the clipping bounds: ranges, target, and the search (Eq. 8, Algorithm 1). Equal start and
    end make a bound fixed; with both fixed the loss is PPO's. Defaults are those of a bare
    ``BoundsConfig()``; a recipe without ``bounds`` gets ``paper()``.

    Section ``algorithm.bounds`` of a recipe; ``ClipLoss`` passes it to the search.
    """

    measure: Measure = "gradient"
    """``surrogate``: clipped tokens count with their clipped value (Eq. 8). ``gradient``: only unclipped
    tokens count, which have a gradient (Eq. 5)."""
    share: Share = "absolute"
    """``absolute``: P / (P + N). ``signed``: P / abs(P - N), Eq. 8 to the letter. ``ratio``: P / N, the
    authors' published code."""
    weight: Weight = "uniform"
    """``rollout_probability``: a token counts with pi_rollout(y_t) (Eq. 8). ``uniform``: with 1."""
    order: Order = "high_first"
    """Which bound moves first: Algorithm 1 raises c_high first, the published code c_low."""
    scope: Literal["update", "lagged", "micro_batch"] = "update"
    """Tokens of one search. ``update``: all of the update, on all ranks. ``lagged``: those of the previous
    update, at the weights before it (saves a forward pass). ``micro_batch``: a part of the update, see
    ``bounds_tokens``."""
    target: float = 0.4  # rho_0
    """Contribution of positive tokens at which the search stops."""
    low_start: float = 0.6  # a-
    """First value of c_low."""
    low_end: float = 0.9  # b-
    """Last value of c_low."""
    low_step: float = 0.02  # delta_2
    """Step of c_low."""
    high_start: float = 1.2  # a+
    """First value of c_high."""
    high_end: float = 3.0  # b+
    """Last value of c_high."""
    high_step: float = 0.05  # delta_1
    """Step of c_high."""
    dual_clip: float | None = None
    """Largest ratio at which a token with negative advantage counts in the loss (none in the paper, 3 in the
    published code)."""
    bounds_tokens: int | None = None
    """With scope ``micro_batch``: about how many trained tokens one search sees, in groups of the update's
    sequences that are the same in every layout. None: the packs that all ranks process at the same time."""

    @property
    def grouped(self) -> bool:
        """Whether an update has several searches, one per group of about ``bounds_tokens`` tokens."""
        return self.scope == "micro_batch" and self.bounds_tokens is not None

    @property
    def sums_over(self) -> Literal["update", "lagged", "micro_batch"]:
        """Scope of the sums for the search: search groups need sums of the whole update."""
        return "update" if self.grouped else self.scope

    @property
    def searches_update(self) -> bool:
        """Whether the loss needs a whole update's sums before its backward passes."""
        return sum_count(self) > 2 and self.sums_over == "update"

    def problems(self) -> Iterator[str]:
        """Yield invalid fields as ``field=value`` with the fix."""
        yield from _range_problems("low", self.low_start, self.low_end, self.low_step)
        yield from _range_problems("high", self.high_start, self.high_end, self.high_step)
        if self.low_end >= self.high_start:
            yield f"low_end={self.low_end} must be below high_start={self.high_start}"
        if not math.isfinite(self.target) or self.target <= 0:
            yield f"target={self.target} must be a finite number above 0"
        elif self.share == "absolute" and self.target >= 1:
            yield f"target={self.target} must be below 1 for share=absolute: P / (P + N) never exceeds 1"
        if self.dual_clip is not None and not self.dual_clip > 1:
            yield f"dual_clip={self.dual_clip} must be above 1, or None for no dual clip"
        if self.bounds_tokens is not None and self.bounds_tokens < 1:
            yield f"bounds_tokens={self.bounds_tokens} must be at least 1, or None for the packs"
        if self.bounds_tokens is not None and self.scope != "micro_batch":
            yield (
                f"bounds_tokens={self.bounds_tokens} sizes the searches of scope=micro_batch; with "
                f"scope={self.scope} set it to None"
            )


def _range_problems(bound: str, start: float, end: float, step: float) -> Iterator[str]:
    if not start > 0:
        yield f"{bound}_start={start} must be above 0: it bounds a ratio of probabilities"
    if end < start:
        yield f"{bound}_end={end} is below {bound}_start={start}; make them equal for a fixed bound"
    if end > start and not step > 0:
        yield f"{bound}_step={step} must be above 0, or set {bound}_end={start} for a fixed bound"


@dataclass(frozen=True)
class Bounds:
    """Result of ``search_bounds``: c_low and c_high, the positive tokens' contribution at them, number of
    moves, whether the target was reached, and whether all advantages had one sign; with the dual clip for the
    loss. Equal on every rank."""

    low: float  # c_low
    """Clips tokens with negative advantage at ratios up to this."""
    high: float  # c_high
    """Clips tokens with positive advantage at ratios from this on."""
    contribution: float = 0.0  # rho
    """Contribution of the positive tokens at these bounds; ``inf`` if its denominator is zero."""
    rounds: int = 0
    """Number of moves in the search."""
    reached: bool = False
    """Whether the contribution is at least the target."""
    dual_clip: float | None = None
    """The config's dual clip: used by the loss, not by the search."""
    one_sign: bool = False
    """Whether all advantages in the search had one sign, with nothing to balance."""

    def metrics(self) -> dict[str, float]:
        """Bounds, contribution and outcome by metric name, for each of the search's tokens."""
        return {
            "bapo/clip_low": self.low,
            "bapo/clip_high": self.high,
            "bapo/contribution": self.contribution,
            "bapo/rounds": float(self.rounds),
            "bapo/reached": float(self.reached),
            "bapo/one_sign_tokens": float(self.one_sign),
            "bapo/moved_tokens": float(self.rounds > 0),
        }


def low_values(config: BoundsConfig) -> list[float]:
    """Candidates of c_low, ascending; one for a fixed bound."""
    return _grid(config.low_start, config.low_end, config.low_step)


def high_values(config: BoundsConfig) -> list[float]:
    """Candidates of c_high, ascending; one for a fixed bound."""
    return _grid(config.high_start, config.high_end, config.high_step)


def _grid(start: float, end: float, step: float) -> list[float]:
    """Candidates ``start + k step``, k = 0, 1, ..., rounded to twelve digits.

    A range that the step does not divide ends on the last whole step. Multiplies, because repeated addition
    drifts and stops short of the end.
    """
    if end <= start:
        return [start]
    steps = math.floor((end - start) / step + 1e-9)
    return [float(f"{start + k * step:.12g}") for k in range(steps + 1)]


def sum_count(config: BoundsConfig) -> int:
    """Length H + L of the contribution sums, one per candidate: 37 + 16 = 53 with the paper's ranges."""
    return len(high_values(config)) + len(low_values(config))


def positive_share(positive: float, negative: float, kind: Share) -> float:
    """Contribution rho of the positive tokens (Eq. 8), ``P / (P + N)``, from the sums P and N of both signs.

    ``absolute``: as above. ``signed``: P / abs(P - N) (Eq. 8 to the letter). ``ratio``: P / N. A positive sum
    over 0 is ``inf``; 0 over 0 is 0.
    """
    denominator = {
        "absolute": positive + negative,
        "signed": abs(positive - negative),
        "ratio": negative,
    }[kind]
    if denominator == 0:
        return math.inf if positive > 0 else 0.0
    return positive / denominator


def search_bounds(sums: Any, config: BoundsConfig) -> Bounds:
    """Search the bounds (Algorithm 1, lines 9 to 17): the first pair with ``rho >= target``.

    Args:
        sums: [H + L], ``[P(c_high_0), ..., P(c_high_H-1), N(c_low_0), ..., N(c_low_L-1)]``: the sum over
            positive tokens and the magnitude over negative ones at every candidate; numbers or a 1-D tensor.
        config: candidates, target, share and order of the moves.

    Returns:
        The first pair of bounds that reaches the target, or the last pair; the starts if all sums are zero.

    Raises:
        ValueError: unless there are ``sum_count(config)`` sums.
        FloatingPointError: if a sum is not finite.
    """
    positive, negative = _checked(sums, config)
    lows, highs = low_values(config), high_values(config)
    if not any(positive) and not any(negative):
        return Bounds(lows[0], highs[0], dual_clip=config.dual_clip)
    one_sign = any(positive) != any(negative)
    for moves, (low, high) in enumerate(search_path(config)):
        contribution = positive_share(positive[high], negative[low], config.share)
        reached = contribution >= config.target
        bounds = Bounds(lows[low], highs[high], contribution, moves, reached, config.dual_clip, one_sign)
        if reached:
            break
    return bounds


def _checked(sums: Any, config: BoundsConfig) -> tuple[list[float], list[float]]:
    numbers: list[float] = sums.tolist() if hasattr(sums, "tolist") else list(sums)
    expected = sum_count(config)
    if len(numbers) != expected:
        raise ValueError(f"expected {expected} sums (every c_high, then every c_low), got {len(numbers)}")
    if not all(map(math.isfinite, numbers)):
        raise FloatingPointError(
            "the contribution sums are not finite: a log-prob or an advantage is nan or inf"
        )
    highs = len(high_values(config))
    return numbers[:highs], numbers[highs:]


def search_path(config: BoundsConfig) -> Iterator[tuple[int, int]]:
    """Yield the search's candidate pairs as indices (c_low, c_high): one bound to its end, then the other."""
    lows, highs = len(low_values(config)), len(high_values(config))
    if config.order == "high_first":
        yield from ((0, high) for high in range(highs))
        yield from ((low, highs - 1) for low in range(1, lows))
    else:
        yield from ((low, 0) for low in range(lows))
        yield from ((lows - 1, high) for high in range(1, highs))


def paper(tokens: int = PAPER_TOKENS) -> BoundsConfig:
    """Preset of the paper as its figures read, the default: ``balanced`` in each micro-batch.

    Figs. 4, 8 and 9 determine the share (absolute) and the order, and favour the gradient measure and a
    search per micro-batch; docs/algorithm.md, "Which reading", rates the evidence. Ranges are those of Sec.
    5.1.

    Args:
        tokens: approximate tokens per search. The paper gives no number; 16384 is the per-GPU value of the
            authors' example script, with responses of up to 8k tokens. A search must see several responses to
            balance anything, so longer responses need more.
    """
    return replace(balanced(), scope="micro_batch", bounds_tokens=tokens)


def eq8_literal() -> BoundsConfig:
    """Preset of Eq. 8 and Algorithm 1 to the letter. The paper's own figures contradict its share."""
    return BoundsConfig(measure="surrogate", share="signed", weight="rollout_probability")


def balanced() -> BoundsConfig:
    """Preset that balances the gradient: the positive share of the unclipped tokens (Eq. 5)."""
    return BoundsConfig(measure="gradient", share="absolute", weight="uniform")


def floored() -> BoundsConfig:
    """Our own preset: ``balanced`` with c_low from 0.8, which clips every negative token that GRPO clips."""
    return replace(balanced(), low_start=0.8)


def published_code() -> BoundsConfig:
    """Preset of the authors' repository (WooooDyy/BAPO, recipe/bapo/config/bapo_trainer.yaml).

    The target 1.0 of P / N is from that file and its config class; the example script sets 0.5, c_low in
    [0.8, 0.95] and a c_high step of 0.1. Where a step does not divide a range, that code ends with a shorter
    step, this one on the last whole step. These ranges divide.
    """
    return BoundsConfig(
        measure="surrogate",
        share="ratio",
        weight="uniform",
        order="low_first",
        scope="micro_batch",
        target=1.0,
        low_start=0.6,
        low_end=0.8,
        low_step=0.05,
        high_start=1.2,
        high_end=2.0,
        high_step=0.05,
        dual_clip=3.0,
    )


def fixed(low: float, high: float, dual_clip: float | None = None) -> BoundsConfig:
    """Preset of fixed bounds: PPO with asymmetric clipping. The contribution is still measured."""
    return BoundsConfig(low_start=low, low_end=low, high_start=high, high_end=high, dual_clip=dual_clip)


def grpo() -> BoundsConfig:
    """Preset of GRPO: fixed symmetric bounds, ratios in [0.8, 1.2]."""
    return fixed(0.8, 1.2)


def clip_higher() -> BoundsConfig:
    """Preset of DAPO's clip-higher (arXiv 2503.14476): fixed bounds, ratios in [0.8, 1.28]."""
    return fixed(0.8, 1.28)


def describe(config: BoundsConfig) -> str:
    """One-line description of ``config``: fixed bounds, or the preset's name and search settings."""
    if sum_count(config) == 2:
        return f"fixed at {config.low_start:g} and {config.high_start:g}"
    size = f" of about {config.bounds_tokens} tokens" if config.grouped else ""
    parts = [config.measure, config.share, config.weight, config.order, config.scope + size]
    return f"{preset_name(config) or 'of no preset'} ({', '.join(parts)}, target {config.target:g})"


def preset_name(config: BoundsConfig) -> str | None:
    """Name of the preset equal to ``config``, or None."""
    if config.grouped and config.bounds_tokens and config == paper(config.bounds_tokens):
        return paper.__name__
    presets = (eq8_literal, balanced, floored, published_code, grpo, clip_higher)
    return next((preset.__name__ for preset in presets if preset() == config), None)
