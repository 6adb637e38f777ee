"""The outbox of one target: events that wait until the target takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bapo_megatron.runtime.events.targets import Refused

QUIET_S = 60.0
"""Seconds after a message in which further events of its kind are held, and then sent as one."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0

Send = Callable[[dict[str, Any], int], None]
"""Sends an event, the newest of so many of its kind; Refused if it is not taken."""


@dataclass
class _Held:
    """Events of one kind that wait."""

    event: dict[str, Any]
    """The newest."""
    begin: int
    """Where the line of the oldest begins."""
    count: int = 1


class Outbox:
    """The events for one target. However long it is dead, there is at most one message of each kind."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held: dict[str, _Held] = {}
        self._not_before: dict[str, float] = {}
        self._failures: dict[str, int] = {}

    def add(self, event: dict[str, Any], begin: int) -> None:
        """Take an event, whose line begins at the byte ``begin`` of the log."""
        kind = str(event["kind"])
        if held := self._held.get(kind):
            held.event, held.count = event, held.count + 1
        else:
            self._held[kind] = _Held(event, begin)

    def position(self, read: int) -> int:
        """Where a later process goes on that finds the log read up to ``read``: before all that waits."""
        return min((held.begin for held in self._held.values()), default=read)

    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._held

    def is_failing(self) -> bool:
        """Whether the target has refused something that still waits."""
        return bool(self._failures)

    def deliver(self, now: float, at_once: bool = False) -> str | None:
        """Send what is due, oldest first; ``at_once``: all. The reason of a failure that is the first since a
        success."""
        was_failing, reason = any(self._failures.values()), None
        for kind, held in sorted(self._held.items(), key=lambda item: item[1].begin):
            if not at_once and now < self._not_before.get(kind, now):
                continue
            try:
                self._send(held.event, held.count)
            except Refused as refused:
                failures = self._failures[kind] = self._failures.get(kind, 0) + 1
                self._not_before[kind] = now + min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (failures - 1))
                reason = reason or str(refused)
                continue
            del self._held[kind]
            self._failures.pop(kind, None)
            self._not_before[kind] = now + QUIET_S
        return None if was_failing else reason
