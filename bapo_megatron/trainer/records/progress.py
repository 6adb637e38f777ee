"""Progress lines of a run on standard output, one per step (``Progress``); functions that format them."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import TextIO

from bapo_megatron.types import Metrics

_ETA_STEPS = 10
"""Number of latest step times in the estimate of the remaining time."""
_ABSENT = "-"


class Progress:
    """Printer of a run's progress lines: ``update`` prints a step's metrics and the estimated time left.
    ``stream`` None: standard output."""

    def __init__(self, total_steps: int, stream: TextIO | None = None) -> None:
        self._total_steps, self._stream = total_steps, stream or sys.stdout
        self._times_s: deque[float] = deque(maxlen=_ETA_STEPS)

    def update(self, step: int, metrics: Metrics) -> None:
        step_s = metrics.get("time/step_s")
        if step_s is not None:
            self._times_s.append(step_s)
        times_s, left_s = self._times_s, None
        if times_s:
            left_s = (self._total_steps - step) * sum(times_s) / len(times_s)
        print(plain_line(step, self._total_steps, metrics, left_s), file=self._stream, flush=True)


def plain_line(step: int, total_steps: int, metrics: Metrics, remaining_s: float | None) -> str:
    """Return a step's line, ``step 12/60  reward 0.53  entropy 0.81 ...``, with a dash for each None."""
    low = _number(metrics, "bapo/clip_low", ".2f", 4)
    high = _number(metrics, "bapo/clip_high", ".2f", 4)
    parts = [
        f"reward {_number(metrics, 'reward/mean', '.3f', 6)}",
        f"right {_number(metrics, 'reward/correct_fraction', '.1%', 6)}",
        f"entropy {_number(metrics, 'policy/entropy', '.3f', 6)}",
        f"clip {low}..{high}",
        f"contribution {_number(metrics, 'bapo/contribution', '.3f', 6)}",
        f"tokens/s {_number(metrics, 'time/tokens_per_s', '.0f', 6)}",
        f"step_s {_number(metrics, 'time/step_s', '.1f', 6)}",
        f"eta {_ABSENT if remaining_s is None else timedelta(seconds=round(remaining_s))}",
    ]
    return numbered_line(step, total_steps, [*parts, *notes(metrics)])


def numbered_line(step: int, total_steps: int, parts: Sequence[str]) -> str:
    """Return a step's line: its number, then ``parts``."""
    return "  ".join([f"step {step:>{len(str(total_steps))}}/{total_steps}", *parts])


_COUNTS = {
    "sampled/reward/failures": "scores failed",
    "sampled/environment/failures": "environments failed",
    "rollout/groups_dropped": "uniform groups",
    "rollout/groups_failed": "groups with too few scores",
    "rollout/groups_stale": "groups too old",
}
"""Metrics that a step's line has where they are not 0."""


def notes(metrics: Metrics) -> list[str]:
    """Return notes on a step: what failed or was dropped, and that it made no update."""
    environments, failures = (
        metrics.get(f"sampled/{of}/failures") or 0.0 for of in ("environment", "reward")
    )
    counts = {**metrics, "sampled/reward/failures": failures - environments}  # which counts both
    parts = [f"{count:.0f} {what}" for name, what in _COUNTS.items() if (count := counts.get(name))]
    scored = metrics.get("rollout/groups_sampled") or 0.0
    kept = scored - sum(metrics.get(f"rollout/groups_{how}") or 0.0 for how in ("dropped", "failed"))
    if 0 < kept < scored:
        right = number_text(metrics.get("sampled/reward/correct_fraction"), ".1%")
        parts.append(f"{kept:.0f} of {scored:.0f} groups kept (of all: right {right})")
    if metrics.get("policy/updates") == 0.0:
        parts.append("no update: all responses rejected" if metrics.get("rollout/groups") else "no update")
    return parts


_AVERAGE = re.compile(r"eval/(?P<suite>.+)/(?P<name>avg@\d+)")


def evaluation_line(step: int, metrics: Metrics) -> str:
    """Return the line of a held-out evaluation: each suite's avg@n with interval, and the mean if several."""
    parts = []
    for metric, value in metrics.items():
        if match := _AVERAGE.fullmatch(metric):
            text = f"{match['suite']} {match['name']} {number_text(value, '.1%')}"
            if (low := metrics.get(f"{metric}_low")) is not None:
                text += f" ({low:.1%} to {number_text(metrics.get(f'{metric}_high'), '.1%')})"
            if unjudged := metrics.get(f"eval/{match['suite']}/unjudged"):
                text += f", {unjudged:.1%} not judged"
            parts.append(text)
    if len(parts) > 1:
        parts.append(f"mean {number_text(metrics.get('eval/mean'), '.1%')}")
    return f"held-out problems after step {step}: " + "; ".join(parts)


def _number(metrics: Metrics, name: str, style: str, width: int) -> str:
    return number_text(metrics.get(name), style).rjust(width)


def number_text(value: float | None, style: str) -> str:
    """Return the formatted number; a dash for None."""
    return _ABSENT if value is None else format(value, style)
