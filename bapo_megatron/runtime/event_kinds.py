"""Table of the event kinds in RUN/events.jsonl, ``EVENT_KINDS``: meaning, and whether it is shown or sent.

``is_trouble`` returns whether `bapo status` may show an event as the run's last error, ``is_sent`` whether
`logging.on_event` sends it, ``event_text`` an event as one line. An event of an unlisted kind is written, but
neither shown nor sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from bapo_megatron.errors import printable

OnEvent = Callable[[dict[str, Any]], None]
"""Records an event: its kind and fields."""

MOST_TEXT = 1000
"""Most characters of an event's text; chat services cut longer ones."""


class EventKind(NamedTuple):
    """Event kind: its meaning, whether `bapo status` shows it as the last error, and whether it is sent."""

    meaning: str
    is_trouble: bool = False
    is_sent: bool = False


_usual, _news = EventKind, partial(EventKind, is_sent=True)
_trouble = partial(EventKind, is_trouble=True, is_sent=True)

EVENT_KINDS = {
    # the run's start and end
    "start": _news("the run begins"),
    "resume": _news("the run continues from a checkpoint"),
    "done": _news("all steps are made and exported"),
    "preempted": _news("preempted: the run is saved, the same command continues it"),
    "stopped": _trouble("the run cannot continue now: a full disk, lost engines, Ctrl-C"),
    "failed": _trouble("an error ended the run, or its process was killed or hung"),
    # while it trains
    "stalled": _trouble("for a long time no step ended and nothing was sampled"),
    "progress_again": _news("a stalled run makes progress again"),
    "engine_gap": _trouble("log-probs of engine and trainer differ by more than a limit"),
    "routes_differ": _trouble("engine and trainer send the same tokens to different experts"),
    "bounds_idle": _usual("the search has not moved any clipping bound"),
    "episodes_cut": _usual("a limit of turns or tokens ended all episodes of a step before their reward"),
    "all_rejected": _usual("masks and corrections rejected all responses of an update"),
    "no_updates": _trouble("the run is done, and no step has changed the policy"),
    "evaluation": _usual("held-out problems were scored"),
    "config_changed": _usual("a start has other settings than the one before"),
    "threads_kept": _usual("the number of threads is that of the run's start"),
    "memory_kept": _usual("an engine on the trainer's GPU keeps memory"),
    # checkpoints and exports
    "saving": _usual("a checkpoint was begun"),
    "checkpoint": _usual("a checkpoint is complete"),
    "checkpoint_damaged": _trouble(
        "a damaged checkpoint was passed over; the run continues from an older one"
    ),
    "old_kept": _trouble("something old could not be deleted, with the reason; it is tried again"),
    "resume_check": _usual("a part of the resume check could not be compared"),
    "resume_mismatch_accepted": _usual("a difference from the checkpoint was accepted by a flag"),
    "export": _usual("the final Hugging Face folder is complete"),
    "export_started": _usual("a step's export was begun"),
    "export_done": _usual("a step's export is complete"),
    "export_skipped": _usual("a newer checkpoint took the place of a step's export"),
    "export_failed": _trouble("a step's export failed; the next start tries it again"),
    # the user's commands
    "after_export_started": _usual("checkpoint.after_export was begun"),
    "after_export_done": _usual("checkpoint.after_export has succeeded"),
    "after_export_failed": _trouble("checkpoint.after_export failed; the next start tries it again"),
    "on_event_failed": EventKind("an event could not be sent; it is tried again", is_trouble=True),
    # engines and sampler
    "engine_lost": _trouble("an engine does not answer any more"),
    "engine_ready": _usual("an engine has the current weights"),
    "engine_refused": _usual("an engine is not used, with the reason"),
    "engine_hangs": _usual("an engine does not answer in time"),
    "server_ended": _trouble("a server's process has ended"),
    "server_hangs": _usual("a server does not answer in time"),
    "server_refused": _usual("a server is not started again, with the reason"),
    "sampler_died": _trouble("the sampler's process has died; it is restarted"),
    "broadcast_failed": _trouble("new weights did not reach all engines by broadcast"),
    "handover_failed": _usual("new weights did not reach an engine on the trainer's GPU"),
    "digests_compared": _usual("the digest of an engine's weights is that of the sent weights"),
    "digests_not_compared": _usual("the digest of an engine's weights cannot be compared"),
    "request_refused": _usual("an engine refused a request, with the reason"),
    "reward_failed": _usual("a score failed"),
    "reward_outage": _trouble("one group after the other has no score"),
    "environment_failed": _usual("a step of an environment failed"),
    "episode_restarted": _usual("a response begins again: its environment could not be brought back"),
    "step_lost": _usual("a step's rollouts are missing; they are sampled again"),
    "journal_damaged": _usual("a part of the journal cannot be read"),
    "journal_missing": _usual("the journal is missing"),
    "tracker_failed": _trouble("a board does not take the run's metrics; it is tried again"),
    "tracker_back": _usual("a board that had failed takes metrics again"),
    "tracker_behind": _usual("a board lacks the last metrics at the end of the run"),
    "fork_position": _usual("where a fork continues in the dataset"),
    "forked": _usual("the run began with another run's checkpoint"),
    # the Slurm job
    "job_start": _usual("a job's start"),
    "job_ready": _usual("a job's nodes passed the probe"),
    "job_done": _usual("the run is done, and the job ends"),
    "job_cancelled": _news("the job was stopped on request"),
    "job_requeue": _trouble("the job requeued itself"),
    "job_requeued_by_slurm": _trouble("Slurm requeued the job"),
    "job_stopped": _trouble("the job ended for good, with the reason"),
    "signal": _usual("the job was told to save and stop"),
    "job_end_moved": _usual("the job's time limit was changed"),
    "save_given_up": _trouble("saving took too long before the job's end"),
    "ranks_ended": _trouble("a rank failed, and the others were ended"),
    "nodes_healthy": _usual("the probe found nothing"),
    "nodes_excluded": _trouble("the probe found bad nodes"),
    "engines_ready": _usual("the servers of the job are ready"),
    "engines_missing": _trouble("servers did not start in time"),
    "rollout_lost": _trouble("a server of the job is lost"),
    "rollout_back": _usual("a server of the job is back"),
    "rollout_start": _usual("a job of rollout servers begins"),
    "convert_done": _usual("a job of slurm/convert.sbatch has ended"),
    "evaluate_done": _usual("a job of slurm/evaluate.sbatch has ended"),
}

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
    return EVENT_KINDS.get(str(event.get("kind")), _usual("unknown")).is_trouble


def is_sent(event: dict[str, Any]) -> bool:
    """Whether `logging.on_event` sends this kind of event."""
    return EVENT_KINDS.get(str(event.get("kind")), _usual("unknown")).is_sent


def event_text(event: dict[str, Any]) -> str:
    """Return an event as one line: its kind, and its reason, message, engine or server."""
    told = [str(event[name]) for name in _WORDS if event.get(name) not in (None, "")]
    return " ".join(": ".join([str(event["kind"]).replace("_", " "), *told]).split())


def sent_text(run: str, event: dict[str, Any], count: int) -> str:
    """Return an event's chat message: the run, the event, and how many of its kind it stands for."""
    step = f" (step {event['step']})" if isinstance(event.get("step"), int) else ""
    more = f" [{count} of them]" if count > 1 else ""
    return printable(f"{run}: {event_text(event)}{step}{more}")[:MOST_TEXT]
