"""The requests in flight at a server, and the gate that holds back those that are not sent yet."""

from __future__ import annotations

import asyncio
import uuid


class InflightRequest:
    """One request in flight. An abort ends those that have begun before it, and no later one."""

    def __init__(self) -> None:
        self.rid = uuid.uuid4().hex
        self.sent = False
        self.aborted = False
        self.newest: int | None = None
        """The last weight version that its tokens may have, if it was aborted while sampling was paused."""

    def renew(self) -> None:
        """Make it a request that was not sent yet: the server may still know the id that it had."""
        self.rid, self.sent = uuid.uuid4().hex, False


class InflightRequests:
    """All requests in flight, and the gate before the server. Lives in one event loop."""

    def __init__(self) -> None:
        self.all: set[InflightRequest] = set()
        self._changed = asyncio.Condition()
        self._open = True

    async def may_send(self, pending: InflightRequest) -> bool:
        """Wait until the gate is open; False if ``pending`` is aborted before."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._open or pending.aborted)
        return not pending.aborted

    @property
    def are_held(self) -> bool:
        """Whether requests are held back: the server is paused, or about to be."""
        return not self._open

    async def until_open(self) -> None:
        """Wait until the gate is open."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._open)

    async def abort(self) -> list[InflightRequest]:
        """Mark those that have begun; what of them waits at the gate is not sent any more."""
        for pending in self.all:
            pending.aborted = True
        async with self._changed:
            self._changed.notify_all()
        return list(self.all)

    def close_gate(self) -> None:
        """Send no more requests."""
        self._open = False

    async def open_gate(self) -> None:
        """Send requests again."""
        self._open = True
        async with self._changed:
            self._changed.notify_all()
