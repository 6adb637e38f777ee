"""Kinds of events in RUN/events.jsonl that are errors (``TROUBLE``) or news; all others are only written.

``is_trouble`` returns whether `bapo status` may show an event as the run's last error, ``is_sent`` whether
`logging.on_event` sends it, ``event_text`` an event as one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from bapo_megatron.errors import printable

OnEvent = Callable[[dict[str, Any]], None]
"""Records an event: its kind and fields."""

MOST_TEXT = 1000
"""Most characters of an event's text; chat services cut longer ones."""

TROUBLE = frozenset(
    {
        *("stopped", "failed", "stalled", "no_updates"),
        *("engine_gap", "routes_differ", "reward_outage", "tracker_failed"),
        *("checkpoint_damaged", "old_kept", "export_failed"),
        *("engine_lost", "server_ended", "sampler_died", "broadcast_failed"),
        # the Slurm job
        *("job_requeue", "job_requeued_by_slurm", "job_stopped", "save_given_up", "ranks_ended"),
        *("nodes_excluded", "engines_missing", "rollout_lost"),
    }
)
"""Kinds that `bapo status` may show as the run's last error, and that `logging.on_event` sends."""

NEWS = frozenset({"start", "resume", "done", "preempted", "progress_again", "job_cancelled"})
"""Kinds that are sent and are no errors."""

NOT_SENT = "on_event_failed"
"""Kind of an event that could not be sent: shown as an error, but not sent, which could fail again."""

BEGINNINGS = ("start", "resume")
"""Kinds of a run's first event; one of ``ENDS`` follows unless the run is killed."""

ENDS = ("done", "preempted", "stopped", "failed")
"""Kinds of a run's last event."""


def event_time_s(event: dict[str, Any]) -> float | None:
    """Return when an event was logged, seconds since 1970; None if that is unknown."""
    try:
        return datetime.fromisoformat(str(event.get("time"))).timestamp()
    except ValueError:
        return None


def last_turn(newest_first: Iterable[dict[str, Any]]) -> str | None:
    """Return the newest kind among ``BEGINNINGS`` and ``ENDS`` in a run's events; None if there is none. A
    beginning means that the run is active or was killed."""
    kinds = (row.get("kind") for row in newest_first)
    return next((str(kind) for kind in kinds if kind in (*BEGINNINGS, *ENDS)), None)


_WORDS = ("reason", "cause", "why", "message", "engine", "server", "nodes")


def is_trouble(event: dict[str, Any]) -> bool:
    """Whether `bapo status` shows this kind of event as the last error."""
    return str(event.get("kind")) in TROUBLE | {NOT_SENT}


def is_sent(event: dict[str, Any]) -> bool:
    """Whether `logging.on_event` sends this kind of event."""
    return str(event.get("kind")) in TROUBLE | NEWS


def event_text(event: dict[str, Any]) -> str:
    """Return an event as one line: its kind, and its reason, message, engine or server."""
    told = [str(event[name]) for name in _WORDS if event.get(name) not in (None, "")]
    return " ".join(": ".join([str(event["kind"]).replace("_", " "), *told]).split())


def sent_text(run: str, event: dict[str, Any], count: int) -> str:
    """Return an event's chat message: the run, the event, and how many of its kind it stands for."""
    step = f" (step {event['step']})" if isinstance(event.get("step"), int) else ""
    more = f" [{count} of them]" if count > 1 else ""
    return printable(f"{run}: {event_text(event)}{step}{more}")[:MOST_TEXT]
