"""Whether engines that were given the same weights have the same, by the digests that they tell."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Disagreement(RuntimeError):
    """An engine's weights are not those of the others."""


class DigestQuorum:
    """On the digest of one version of the weights.

    It is the one that two engines tell. An engine whose digest nobody shares waits for those that still load,
    and its digest counts if no other was told. Where no two agree nobody knows who is right: all must load
    again.
    """

    def __init__(self, patience_s: float) -> None:
        """``patience_s``: the longest that an engine waits for others that load."""
        self._patience_s = patience_s
        self._digest: str | None = None
        self._told: dict[str, str] = {}
        self._loading: set[str] = set()
        self._changed = asyncio.Condition()

    def expect(self, engine: str) -> None:
        """The engine begins to load."""
        self._loading.add(engine)
        self._told.pop(engine, None)

    async def release(self, engine: str) -> None:
        """Nobody waits for the engine any more, whether it has told its digest or not."""
        self._loading.discard(engine)
        async with self._changed:
            self._changed.notify_all()

    async def confirm(self, engine: str, digest: str) -> None:
        """Return when ``digest`` is known to be right. Disagreement if it is not."""
        self._told[engine] = digest
        if self._digest is None and list(self._told.values()).count(digest) > 1:
            self._digest = digest
        await self.release(engine)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s), self._changed:
                await self._changed.wait_for(lambda: self._digest or not self._loading)
        if self._digest is None and set(self._told.values()) == {digest}:
            self._digest = digest
        if self._digest != digest:
            told = ", ".join(f"{name}: {one[:12]}" for name, one in self._told.items())
            raise Disagreement(f"the engines have different weights: {told}")
