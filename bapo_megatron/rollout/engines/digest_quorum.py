"""The quorum on a weight version: do engines that loaded the same weights report the digest that is right?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress


class DigestMismatch(RuntimeError):
    """An engine's weights are not those of the others, or not those that were sent."""


IsSent = Callable[[str, str], bool]
"""Whether it is known that an engine, with this digest, has the weights that were sent. DigestMismatch if it is
known to have others (``sent_weights.SentCheck``)."""


class DigestQuorum:
    """The quorum on the digest of one weight version: that of what was sent, else the one that two engines
    report.

    Where it is not known what digest the sent weights have, an engine whose digest nobody shares waits for
    those that still load; its digest counts if no other was reported. Where no two agree nobody knows which
    is right: all must load again.
    """

    def __init__(self, wait_s: float, is_sent: IsSent | None = None) -> None:
        """``wait_s``: the longest that an engine waits for others that load."""
        self._wait_s = wait_s
        self.is_sent = is_sent
        self._digest: str | None = None
        self._reported: dict[str, str] = {}
        self._loading: set[str] = set()
        self._changed = asyncio.Condition()

    def expect(self, engine: str) -> None:
        """Note that the engine begins to load."""
        self._loading.add(engine)
        self._reported.pop(engine, None)

    def withdraw(self, engine: str) -> None:
        """Forget the digest of an engine that is not used."""
        self._reported.pop(engine, None)

    async def release(self, engine: str) -> None:
        """Stop waiting for the engine, whether it has reported its digest or not."""
        self._loading.discard(engine)
        async with self._changed:
            self._changed.notify_all()

    async def confirm(self, engine: str, digest: str) -> None:
        """Return when ``digest`` is known to be right. DigestMismatch if it is not."""
        if self.is_sent is not None and self.is_sent(engine, digest):
            self._digest = digest
        self._reported[engine] = digest
        if self._digest is None and list(self._reported.values()).count(digest) > 1:
            self._digest = digest
        await self.release(engine)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._wait_s), self._changed:
                await self._changed.wait_for(lambda: self._digest or not self._loading)
        if self._digest is None and set(self._reported.values()) == {digest}:
            self._digest = digest
        if self._digest != digest:
            reported = ", ".join(f"{name}: {one[:12]}" for name, one in self._reported.items())
            raise DigestMismatch(f"the engines have different weights: {reported}")
