"""Gates of a study: preconditions on GRPO's own runs, without which no method is compared with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from bapo_megatron.evaluation.scoring import standard_deviation
from benchmarks.study.measures import ArmRecord
from benchmarks.study.methods import BASELINE, PRIMARY


@dataclass(frozen=True)
class Gate:
    """Precondition: the allowed range of a figure's mean over GRPO's runs, at a number of passes.

    Another ``method`` than GRPO only where a gate is about that method itself.
    """

    text: str
    figure: str
    """A key of ``ArmRecord.figures``."""
    passes: int
    low: float
    high: float
    paper: str
    """What the paper shows, and where."""
    method: str = BASELINE
    says: str = ""
    """What it says if the gate fails."""

    @property
    def range(self) -> str:
        """The range in words."""
        if self.high == math.inf:
            return f"at least {self.low:g}"
        return f"at most {self.high:g}" if self.low == -math.inf else f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class GateResult:
    """A gate with its measured value."""

    gate: Gate
    value: float
    """Mean over the seeds; NaN if no run has the figure."""
    seeds: int
    error: float = math.nan
    """Standard error of ``value``; NaN of fewer than two seeds. It is shown, and decides nothing."""

    @property
    def shown(self) -> str:
        """The value with its standard error, in words."""
        if not math.isfinite(self.value):
            return "not measured"
        return f"{self.value:.3g}" + (f" ± {self.error:.2g}" if math.isfinite(self.error) else "")

    @property
    def passed(self) -> bool:
        """Whether the mean lies in the range, ends included. What was not measured has not passed."""
        return self.gate.low <= self.value <= self.gate.high

    @property
    def failure(self) -> str:
        """Failure of the gate as one line of text."""
        return f"gate {self.gate.text} ({self.gate.passes}x) failed: {self.shown}, must be {self.gate.range}"


GATES = (
    Gate("entropy kept on-policy", "entropy_kept", 1, 0.8, math.inf, "0.98 (Fig. 2)"),
    Gate("entropy lost with reuse", "entropy_kept", 4, -math.inf, 0.7, "0.25 (Fig. 2)"),
    Gate(
        "share of seeds that collapse",
        "collapsed",
        PRIMARY,
        0.5,
        math.inf,
        "the 8x run: 0.449 at step 63, 0.229 at step 118 (Fig. 2)",
    ),
    Gate("clipped tokens", "clipped", PRIMARY, 0.02, 0.06, "0.022 at 8x (Fig. 2)"),
    Gate("positive share of the gradient", "positive_share", 2, 0.38, 0.45, "mean 0.427 at 2x (Figs. 4, 9)"),
    Gate("tokens with a ratio above 1.2", "raised_tokens", PRIMARY, 0.01, math.inf, "0.033 (Fig. 10)"),
    Gate(
        "mean probability of those tokens when sampled",
        "raised_probability",
        PRIMARY,
        -math.inf,
        0.4,
        "0.28 (Fig. 10)",
    ),
)
"""All gates. Figures other than the reward and its entropy are of the stale updates."""


def gate_results(records: Sequence[ArmRecord], gates: Sequence[Gate] = GATES) -> list[GateResult]:
    """The result of each gate, from the runs of its method."""
    results = []
    for gate in gates:
        values = [
            record.figures.get(gate.figure, math.nan)
            for record in records
            if (record.method, record.passes) == (gate.method, gate.passes)
        ]
        known = [value for value in values if math.isfinite(value)]
        error = standard_deviation(known) / math.sqrt(len(known)) if len(known) > 1 else math.nan
        results.append(GateResult(gate, fmean(known) if known else math.nan, len(known), error))
    return results
