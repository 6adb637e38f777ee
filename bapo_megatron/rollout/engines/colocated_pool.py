"""The pool of engines that share their GPUs with the policy: it holds them back while the policy trains."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from bapo_megatron.interfaces import ReceivesHandles, ReleasesMemory
from bapo_megatron.rollout.engines.backend import EngineError
from bapo_megatron.rollout.engines.digest_quorum import DigestQuorum
from bapo_megatron.rollout.engines.pool import EnginePool
from bapo_megatron.rollout.engines.sent_weights import SentDigests
from bapo_megatron.rollout.engines.slot import EngineSlot


class ColocatedPool(EnginePool):
    """An ``EnginePool`` whose engines are ``ReleasesMemory``. All are held back at first.

        admit -> sample -> release -> (the policy trains; new weights are told) -> wake -> admit -> ...

    A held engine gets no request and no weights. A release or a wake that fails leaves it held: nobody knows
    what memory it has, and its server must be ended before ``admit``.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        for slot in self._slots:
            slot.is_held = True
        self.down_since = None  # held is not down
        self._ipc_weights: tuple[int, DigestQuorum] | None = None
        """The version whose weights engines get by handles, and the quorum on its digest."""
        self._without_weights = set[str]()
        """Engines that do not work, and have other weights than those."""

    async def release(self) -> list[str]:
        """Hold every engine back, and have those that work give up their memory: names of those that have.

        Requests in flight end with the tokens that they have. Of the other engines nobody knows what memory
        they hold: they must be ended.
        """
        for slot in self._slots:
            slot.is_held = True
        up = [slot for slot in self._slots if slot.is_up]
        released = await asyncio.gather(*(self._release(slot) for slot in up))
        self.down_since = None
        return [slot.engine.name for slot, done in zip(up, released, strict=True) if done]

    async def wake(self, names: Collection[str]) -> list[str]:
        """Let engines that have released their memory take it back, with the current weights, and sample.

        Names of those that do; the others of ``names`` must be ended. The rest waits for ``admit``.
        """
        sleeping = [slot for slot in self._slots if slot.engine.name in names]
        for slot in sleeping:
            self._begin_load(slot)
        woken = await asyncio.gather(*(self._wake(slot) for slot in sleeping))
        return [slot.engine.name for slot, done in zip(sleeping, woken, strict=True) if done]

    def expect_handles(self, version: int) -> None:
        """Note that the weights of ``version`` are in no folder: engines get them when they wake."""
        self._weights = None
        self._ipc_weights = version, DigestQuorum(self._timeouts.silent_s)
        self._without_weights.clear()

    # Instead of `wake`, for weights that come by handles. Each returns the names of the engines that can go
    # on; the others must be ended.

    async def begin_wake(self, names: Collection[str]) -> list[str]:
        """Let engines that have released their memory take back that of the weights."""
        return await self._on_engines(names, lambda engine: engine.begin_wake())

    async def receive_handles(self, handles: Mapping[str, Sequence[bytes]]) -> list[str]:
        """Let each of these engines load weights by its handles."""
        return await self._on_engines(handles, lambda engine: engine.receive_handles(handles[engine.name]))

    async def confirm_weights(
        self, names: Collection[str], version: int, sent: SentDigests | None = None
    ) -> list[str]:
        """Compare the digests of engines that have all weights of ``version`` with those ``sent``."""
        quorum = self._quorum(version, sent)
        for name in names:
            quorum.expect(name)

        async def confirm(engine: ReceivesHandles) -> None:
            try:
                await engine.confirm_weights(version, partial(quorum.confirm, engine.name))
            finally:
                await quorum.release(engine.name)

        confirmed = await self._on_engines(names, confirm)
        for name in names:
            if name not in confirmed:  # its digest counts no more: others may load from a folder
                quorum.withdraw(name)
        return confirmed

    async def finish_wake(self, names: Collection[str]) -> list[str]:
        """Let engines whose weights are confirmed take back the rest of their memory, and sample."""
        woken = await self._on_engines(names, lambda engine: engine.finish_wake())
        for slot in self._slots:
            if slot.engine.name in woken:
                self._resume_sampling(slot)
        return woken

    async def admit(self) -> None:
        """Hold no engine back any more: each comes when it answers and has loaded the current weights."""
        for slot in self._slots:
            slot.is_held = False
            self._restart_timeouts(slot)
        self.down_since = None if self.up else self._clock.now()

    def _restart_timeouts(self, slot: EngineSlot) -> None:
        """Count silence, and time without engines, from now: while the policy trains nobody is to answer."""
        self._worked_at = slot.last_answer_at = self._clock.now()
        slot.hang_reported_at, slot.hang_report_backoff_s = -math.inf, 0.0

    @property
    def needs_weights(self) -> bool:
        """Whether no engine works, and each was found to lack the weights that came by handles."""
        return super().needs_weights and self._without_weights >= {slot.engine.name for slot in self._slots}

    async def _bring_back(self, slot: EngineSlot) -> None:
        """Also without a folder: an engine that was lost while it sampled may still have the current weights.

        A server that was started since has others. So it is after a death of the sampler's process, too.
        """
        if self._weights is not None or self._ipc_weights is None:
            await super()._bring_back(slot)
            return
        version = self._ipc_weights[0]
        has_them = await self._or_quarantine(slot, self._check(slot, version), self._timeouts.abort_s)
        if has_them and not slot.is_held:
            self._mark_ready(slot, version)
        elif not has_them:
            self._without_weights.add(slot.engine.name)

    async def _check(self, slot: EngineSlot, version: int) -> None:
        """End what the engine does for nobody. EngineError if it has other weights than ``version``."""
        if (found := await slot.engine.weight_version()) != version:
            raise EngineError(f"{slot.engine.name}: has weights {found}, and {version} are in no folder")
        await slot.engine.abort()
        await slot.engine.resume()

    async def _wake(self, slot: EngineSlot) -> bool:
        """Whether an engine has its memory and the weights again. It may sample at once if so."""
        assert isinstance(slot.engine, ReleasesMemory)
        assert self._weights is not None
        weights = self._weights
        confirm = partial(weights.quorum.confirm, slot.engine.name)
        try:
            call = slot.engine.wake(weights.folder, weights.version, confirm)
            woken = await self._or_quarantine(slot, call, weights.load_s)
        finally:
            await self._end_load(slot, weights)
        if woken:
            self._resume_sampling(slot)
        return woken

    def _resume_sampling(self, slot: EngineSlot) -> None:
        slot.is_up, slot.is_held, self.down_since = True, False, None
        self._restart_timeouts(slot)
        slot.ready_since = self._clock.now()
        slot.loads += 1
        self.changed.set()

    async def _on_engines(
        self, names: Collection[str], call: Callable[[ReceivesHandles], Coroutine[Any, Any, None]]
    ) -> list[str]:
        """Run ``call`` on the engines named; the names of those on which it succeeds."""

        async def succeeds(slot: EngineSlot) -> bool:
            assert isinstance(slot.engine, ReceivesHandles)
            return await self._or_quarantine(slot, call(slot.engine), self._timeouts.update_s)

        slots = [slot for slot in self._slots if slot.engine.name in names]
        done = await asyncio.gather(*map(succeeds, slots))
        return [slot.engine.name for slot, succeeded in zip(slots, done, strict=True) if succeeded]

    def _quorum(self, version: int, sent: SentDigests | None) -> DigestQuorum:
        """That of the engines which get the version by handles, too."""
        if self._ipc_weights is not None and self._ipc_weights[0] == version:
            if sent is not None:
                self._ipc_weights[1].is_sent = partial(self.sent_check.is_sent, sent)
            return self._ipc_weights[1]
        return super()._quorum(version, sent)

    async def _release(self, slot: EngineSlot) -> bool:
        """Whether a working engine has released its memory. It does not work any more, either way."""
        assert isinstance(slot.engine, ReleasesMemory)
        released = await self._or_quarantine(slot, slot.engine.release_memory(), self._timeouts.update_s)
        if released:
            slot.is_up, slot.reason = False, "its memory is released"
        return released
