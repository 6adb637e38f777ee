"""Outbox of one `logging.on_event` target: events queue until it takes them; retries with backoff.

Kept in memory by the event sender (``sender.py``), which stores how far each target has got.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bapo_megatron.runtime.events.targets import Refused

QUIET_S = 60.0
"""Rate limit: for so many seconds after a message, events of its kind are held, and then sent as one."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0

Send = Callable[[dict[str, Any], int], None]
"""Sends an event and the number of events of its kind that it stands for; Refused if it is not taken."""


@dataclass
class _Queued:
    """Queued events of one kind, sent as one message. Plain data."""

    event: dict[str, Any]
    """The newest."""
    begin: int
    """Byte offset in events.jsonl of the oldest one's line."""
    count: int = 1


class Outbox:
    """Queue of events for one target, at most one message of each kind, however long the target is down.

    ``deliver`` is called again and again, and blocks while it sends; a failed send stays queued, and is due
    after 5 s, then twice as long each time, at most 300 s. Made by ``EventSender``, one for each target.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._queued: dict[str, _Queued] = {}
        self._not_before: dict[str, float] = {}
        self._failures: dict[str, int] = {}

    def add(self, event: dict[str, Any], begin: int) -> None:
        """Queue an event, whose line begins at the byte ``begin`` of events.jsonl."""
        kind = str(event["kind"])
        if queued := self._queued.get(kind):
            queued.event, queued.count = event, queued.count + 1
        else:
            self._queued[kind] = _Queued(event, begin)

    def position(self, read: int) -> int:
        """Resume offset in events.jsonl, read up to ``read``: before the oldest queued event."""
        return min((queued.begin for queued in self._queued.values()), default=read)

    def is_empty(self) -> bool:
        """Whether no event is queued."""
        return not self._queued

    def is_failing(self) -> bool:
        """Whether the target has refused something that still waits."""
        return bool(self._failures)

    def deliver(self, now: float, at_once: bool = False) -> str | None:
        """Send the events that are due, oldest first; ``at_once``: all of them. Blocks while it sends.

        Returns the reason of a failure, if it is the first since a success; a failed send raises nothing.
        """
        was_failing, reason = any(self._failures.values()), None
        for kind, queued in sorted(self._queued.items(), key=lambda item: item[1].begin):
            if not at_once and now < self._not_before.get(kind, now):
                continue
            try:
                self._send(queued.event, queued.count)
            except Refused as refused:
                failures = self._failures[kind] = self._failures.get(kind, 0) + 1
                self._not_before[kind] = now + min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (failures - 1))
                reason = reason or str(refused)
                continue
            del self._queued[kind]
            self._failures.pop(kind, None)
            self._not_before[kind] = now + QUIET_S
        return None if was_failing else reason
