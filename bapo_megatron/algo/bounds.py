"""Clipping bounds: their configuration, the presets, and Algorithm 1 on 53 numbers. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class BoundsConfig:
    """How the clipping bounds of an update are found. Every reading of Eq. 8 is a setting here.

    Paper symbols stand beside their names. Equal start and end make a bound fixed: with both fixed
    nothing is searched, and the loss is that of PPO with asymmetric clipping.
    """

    measure: Literal["surrogate", "gradient"] = "gradient"
    """``surrogate``: clipped tokens count with their clipped value (Eq. 8). ``gradient``: only tokens
    whose gradient is alive count (Eq. 5)."""
    share: Literal["absolute", "signed", "ratio"] = "absolute"
    """``absolute``: P / (P + N). ``signed``: P / abs(P - N), Eq. 8 to the letter. ``ratio``: P / N, the
    authors' published code."""
    weight: Literal["rollout_probability", "uniform"] = "uniform"
    """``rollout_probability``: a token counts with pi_rollout(y_t) (Eq. 8). ``uniform``: with 1."""
    order: Literal["high_first", "low_first"] = "high_first"
    """Which bound moves first: Algorithm 1 raises c_high first, the published code c_low."""
    scope: Literal["update", "micro_batch"] = "update"
    """Over which tokens the bounds are searched: the whole update on all ranks, or each pack alone."""
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
    """Largest ratio at which a token with negative advantage still counts in the loss (none in the
    paper, 3 in the published code). The search does not see it."""
