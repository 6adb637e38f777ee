"""Methods and staleness levels (passes) of a study, each as flags of `bapo train`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, replace

from bapo_megatron.algo.bounds import (
    BoundsConfig,
    balanced,
    clip_higher,
    eq8_literal,
    fixed,
    floored,
    grpo,
    paper,
)

BASELINE = "grpo"
BAPO = "paper"
"""The BAPO of the primary contrasts: the reading that the paper's figures support."""
PASSES = (1, 2, 4, 8)
"""Passes over each batch, each one update with the whole batch: the paper's staleness."""
COMPARED = (4, 8)
"""Passes at which all methods run; at the others GRPO alone."""
PRIMARY = 8
"""Passes of the primary contrasts."""
SEARCH_TOKENS = 256
"""Tokens of one search of the micro-batch scope: an update of the study has thousands, the paper's millions.
Fig. 8 needs about 160 searches a step; fewer tokens than this often have one sign."""
_SAMPLING_UPDATES = 4
"""How many updates take as long as the sampling of a batch, roughly."""


@dataclass(frozen=True)
class Method:
    """A compared method: its loss, clipping bounds, and loss mean."""

    label: str
    bounds: BoundsConfig = field(default_factory=BoundsConfig)
    """Of the loss ``clip``; the others read none."""
    loss: str = "clip"
    loss_mean: str = "token"

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags that make it: all fields of the bounds, so that the recipe's own do not matter."""
        fields = dataclasses.asdict(self.bounds).items()
        bounds = (_flag(f"algorithm.bounds.{name}", value) for name, value in fields)
        loss = (f"--algorithm.loss={self.loss}", "--algorithm.loss-settings={}")
        return (*bounds, *loss, f"--algorithm.loss-mean={self.loss_mean}")


def _flag(name: str, value: object) -> str:
    section, _, last = name.rpartition(".")
    last = last.replace("_", "-")
    if isinstance(value, bool):
        return f"--{section}.{'' if value else 'no-'}{last}"
    return f"--{section}.{last}={value}"


def _pair(low: float, high: float) -> Method:
    return Method(f"clip [{low:g}, {high:g}]", fixed(low, high))


FIXED = {
    "fixed_0.8_1.5": _pair(0.8, 1.5),
    "fixed_0.5_1.2": _pair(0.5, 1.2),
    "fixed_0.9_1.2": _pair(0.9, 1.2),
    "fixed_0.9_3.0": _pair(0.9, 3.0),
    "fixed_0.6_1.2": _pair(0.6, 1.2),
}
"""Fixed bounds beside GRPO's and clip-higher's: Fig. 7's pairs, then corners of BAPO's ranges."""

REPAIRS = {
    "floored": Method("BAPO, c_low from 0.8", floored()),
    "first_pass": Method(
        "BAPO, negatives of the first pass", replace(balanced(), negative_weight="first_pass")
    ),
    "hold_low": Method("BAPO, c_low held in a batch", replace(balanced(), low_within_batch="held")),
}
"""Our changes of the search, all in update scope."""

METHODS = {
    "grpo": Method("GRPO [0.8, 1.2]", grpo()),
    "clip_higher": Method("clip-higher [0.8, 1.28]", clip_higher()),
    **FIXED,
    "paper": Method("BAPO, micro-batches", replace(paper(), bounds_tokens=SEARCH_TOKENS)),
    "balanced": Method("BAPO, whole update", balanced()),
    "eq8_literal": Method("BAPO, Eq. 8 to the letter", eq8_literal()),
    **REPAIRS,
    "cispo": Method("CISPO", loss="cispo"),
    "gspo": Method("GSPO", loss="gspo", loss_mean="sequence"),
    "dppo_tv": Method("DPPO (TV)", loss="dppo_tv"),
    "sapo": Method("SAPO", loss="sapo", loss_mean="sequence"),
    "vespo": Method("VESPO", loss="vespo"),
    "m2po": Method("M2PO", loss="m2po"),
}
FIXED_PAIRS = ("grpo", "clip_higher", *FIXED)
"""All methods with fixed bounds: a repair is compared with the best of them."""


def is_run(method: str, passes: int) -> bool:
    """Whether the method runs at these passes.

    On-policy every ratio is 1 and no method clips anything; at 2 passes GRPO alone shows the trend of Fig. 2.
    """
    return method == BASELINE or passes in COMPARED


def passes_flags(passes: int) -> tuple[str, ...]:
    """The flags of a staleness: so many passes over each batch, the whole batch in each update."""
    return f"--algorithm.reuse-epochs={passes}", "--algorithm.updates-per-epoch=1"


def work(passes: int, steps: int) -> float:
    """Rough duration of an arm, in updates: sampling takes as long as a few of them."""
    return steps * (_SAMPLING_UPDATES + passes)
