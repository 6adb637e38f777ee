"""The requests in flight at one SGLang server, and the gate that holds unsent ones while it pauses or loads.

``SglangEngine`` has one set for its server; nothing here talks to the server. Used by ``engine.py``.
"""

from __future__ import annotations

import asyncio
import uuid


class InflightRequest:
    """One request in flight: its server-side id, and whether it was sent or aborted.

    Made by ``SglangEngine.generate``.
    """

    def __init__(self, routes: bool = False) -> None:
        """``routes``: whether its answer must have routes."""
        self.rid = uuid.uuid4().hex
        self.routes = routes
        self.sent = False
        self.aborted = False
        self.newest: int | None = None
        """The newest weight version that its tokens may have, if it was aborted during a pause; else None."""

    def renew(self) -> None:
        """Reset it for a retry, with a new id: the server may still know the old one."""
        self.rid, self.sent = uuid.uuid4().hex, False


class InflightRequests:
    """The requests in flight at a server, and the gate before it. Lives in one event loop.

    Made by ``SglangEngine``.
    """

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
        """Whether the gate is closed: the server is paused, or about to be."""
        return not self._open

    async def until_open(self) -> None:
        """Wait until the gate is open."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._open)

    async def abort(self) -> list[InflightRequest]:
        """Mark the current requests as aborted; returns them. Those that wait at the gate are not sent."""
        for pending in self.all:
            pending.aborted = True
        async with self._changed:
            self._changed.notify_all()
        return list(self.all)

    def close_gate(self) -> None:
        """Close the gate: new requests wait."""
        self._open = False

    async def open_gate(self) -> None:
        """Open the gate: waiting requests are sent."""
        self._open = True
        async with self._changed:
            self._changed.notify_all()
