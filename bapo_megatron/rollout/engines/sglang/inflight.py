"""Which requests are in flight at a server, and whether those that are not sent yet may be."""

from __future__ import annotations

import asyncio
import uuid


class InflightRequest:
    """One request on its way. An abort ends those that have begun before it, and no later one."""

    def __init__(self) -> None:
        self.rid = uuid.uuid4().hex
        self.sent = False
        self.aborted = False
        self.newest: int | None = None
        """The last weight version that its tokens may have, if it was aborted while sampling was paused."""


class InflightRequests:
    """All of them, and the gate before the server. Lives in one event loop."""

    def __init__(self) -> None:
        self.all: set[InflightRequest] = set()
        self._changed = asyncio.Condition()
        self._open = True

    async def may_send(self, request_task: InflightRequest) -> bool:
        """Wait until the gate is open; False if ``flight`` is aborted before."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._open or request_task.aborted)
        return not request_task.aborted

    @property
    def are_held(self) -> bool:
        """No request is sent now: the server is paused, or about to be."""
        return not self._open

    async def may_go_on(self) -> None:
        """Wait until the gate is open."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._open)

    async def abort(self) -> list[InflightRequest]:
        """Mark those that have begun; what of them waits at the gate is not sent any more."""
        for request_task in self.all:
            request_task.aborted = True
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
