"""The digest quorum of a weight version: which digest is right when engines report different ones.

A digest is a hash of all weights that an engine has loaded; no engine samples before its digest is known to
be right. The engine pool makes one for each version that engines load from a folder or by memory handles.
Used in this folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress


class DigestMismatch(RuntimeError):
    """A wrong digest: an engine's weights differ from the others', or from those that were sent.

    The engine may not sample: the pool puts it in quarantine, or a broadcast fails.
    """


IsSent = Callable[[str, str], bool]
"""A check of an engine's digest against those sent (``sent_weights.SentCheck``): True if equal, False if they
cannot be compared, DigestMismatch if they differ."""


class DigestQuorum:
    """The digest quorum of one weight version, in the event loop of the engine pool.

    For each engine: ``expect`` before its load; ``confirm`` with its digest; ``release`` after the load, also
    after an error. The right digest is that of the sent weights. Where that is unknown, it is the first that
    two engines report; an engine alone with its digest waits for those that still load, and is right if no
    other digest was reported. If no two agree, no engine is right: all must load again. Made by
    ``EnginePool`` and ``ColocatedPool``.
    """

    def __init__(self, wait_s: float, is_sent: IsSent | None = None) -> None:
        """``wait_s``: the longest wait of an engine for others that still load."""
        self._wait_s = wait_s
        self.is_sent = is_sent
        self._digest: str | None = None
        self._reported: dict[str, str] = {}
        self._loading: set[str] = set()
        self._changed = asyncio.Condition()

    def expect(self, engine: str) -> None:
        """Note that the engine begins to load: others wait for its digest."""
        self._loading.add(engine)
        self._reported.pop(engine, None)

    def withdraw(self, engine: str) -> None:
        """Remove the digest of an engine that failed afterwards."""
        self._reported.pop(engine, None)

    async def release(self, engine: str) -> None:
        """Note that the engine's load is over, whether or not it has reported a digest."""
        self._loading.discard(engine)
        async with self._changed:
            self._changed.notify_all()

    async def confirm(self, engine: str, digest: str) -> None:
        """Report the engine's ``digest``; returns when it is known to be right. DigestMismatch if wrong."""
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
