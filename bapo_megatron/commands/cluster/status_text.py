"""Text of ``bapo status``: one line for each known field of a ``Status``, without reading any file.

``commands.py`` prints it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from bapo_megatron.commands.cluster.status import Status
from bapo_megatron.errors import printable

_WIDTH = 12


def status_text(status: Status) -> str:
    """The status as lines of text."""
    return "".join(f"{name:<{_WIDTH}}{printable(text)}\n" for name, text in _rows(status))


def _rows(status: Status) -> Iterator[tuple[str, str]]:
    yield "run", str(status.run)
    if status.forked is not None:
        yield "forked from", status.forked
    yield "job", _job(status)
    yield "step", _step(status)
    if status.checkpoint is None:
        yield "checkpoint", "none yet"
    else:
        yield "checkpoint", f"step {status.checkpoint}, {ago(status.checkpoint_age_s)}"
    if status.stalled_s is not None:
        yield "stalled", f"no step, evaluation or rollout for {clock(status.stalled_s)}"
    if status.moved is not None:
        share, steps = status.moved
        yield "bounds", f"moved in {share:.0%} of the stale updates of the last {steps} steps"
    if status.engines is not None:
        alive, known = status.engines
        yield "engines", f"{alive} of {known} alive"
    if status.job is not None:
        counts = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in status.job.requeues.items())
        yield "requeues", counts
        if status.job.excluded:
            yield "left out", status.job.excluded
    if status.trouble is not None:
        yield "last error", f"{ago(status.trouble_age_s)}: {' '.join(status.trouble.split())}"


def _job(status: Status) -> str:
    if status.job is None:
        return status.state
    parts = [status.job.job, status.state, f"restart {status.job.restart}"]
    if status.job.nodes:
        parts.append(f"on {status.job.nodes}")
    if status.seconds_left is not None:
        parts.append(f"{clock(max(0.0, status.seconds_left))} left")
    return ", ".join(parts)


def _step(status: Status) -> str:
    if not status.step:
        return f"0 of {status.steps}" if status.steps else "none yet"
    parts = [f"{status.step} of {status.steps}" if status.steps else str(status.step)]
    shown = (("reward/mean", "reward {:.3f}"), ("time/tokens_per_s", "{:,.0f} tokens/s"))
    parts += [form.format(value) for name, form in shown if (value := status.metrics.get(name)) is not None]
    seconds = status.metrics.get("time/step_s")
    if seconds and status.steps and status.steps > status.step:
        parts.append(f"{clock((status.steps - status.step) * seconds)} to go at {seconds:.1f} s a step")
    return ", ".join(parts)


def clock(seconds: float) -> str:
    """A duration as hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))


def ago(seconds: float | None) -> str:
    """An age as text, rounded to its largest unit."""
    if seconds is None:
        return "at an unknown time"
    for size, name in ((86400, "days"), (3600, "hours"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name} ago"
    return f"{max(0.0, seconds):.0f} s ago"
