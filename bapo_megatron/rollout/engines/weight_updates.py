"""Weight updates of engines in parts (broadcast buckets, IPC handles), as calls in a fixed order.

    begin(version) -> receive(part), for each part -> confirm(digests) -> resume

An engine has one long call, ``load`` or ``wake``, which pulls the parts from an iterator (``WeightParts``).
``EngineLoad`` splits this call of one engine into steps; ``WeightUpdates`` makes each step on all engines. It
lives in the sampler process, where the trainer's sender (``rollout/weight_sync/``) calls it through
``SamplerClient``. ``driver_class(sync)`` returns the class for a transport; for disk the pool calls ``load``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

from bapo_megatron.config.transports import TRANSPORTS
from bapo_megatron.interfaces import Confirm, ReceivesBroadcast, ReceivesHandles
from bapo_megatron.rollout.engines.backend import EngineError
from bapo_megatron.rollout.engines.pool import EnginePool
from bapo_megatron.rollout.engines.pool_state import EngineSlot
from bapo_megatron.rollout.engines.sent_weights import DigestMismatch, DigestQuorum, SentDigests
from bapo_megatron.runtime.dotted_path import load_dotted_path
from bapo_megatron.types import BroadcastGroup, WeightPart, WeightParts

Load = Callable[[WeightParts, int, Confirm], Coroutine[Any, Any, None]]
"""An engine's ``load`` or ``wake``."""

_ERROR_GRACE_S = 0.5
"""Time to collect other engines' errors after the first, in seconds."""


class EngineLoad:
    """One engine's ``load`` or ``wake`` call, as steps to await: ``begin``, ``receive`` each part, ``end``,
    ``confirm``, ``resume``. A step returns when the engine has done it, or raises the engine's error."""

    def __init__(self, slot: EngineSlot, load: Load, version: int) -> None:
        """Start ``load``: the engine pauses, or reclaims memory, and then asks for the first part."""
        self.slot, self.name = slot, slot.engine.name
        self._parts: asyncio.Queue[WeightPart | None] = asyncio.Queue()
        self._asked = asyncio.Event()
        self._reported: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._may_resume = asyncio.Event()
        self._call = asyncio.create_task(load(self._handed(), version, self._confirm))
        self._call.add_done_callback(lambda call: call.cancelled() or call.exception())

    async def begin(self) -> None:
        """Wait until the engine asks for the first part."""
        await self._until(self._asked.wait())

    async def receive(self, part: WeightPart) -> None:
        """Give the engine a part; returns when it asks for the next, i.e. has loaded this one."""
        self._asked.clear()
        self._parts.put_nowait(part)
        await self._until(self._asked.wait())

    async def end(self) -> None:
        """Signal the end of the parts; returns when the engine has reported its digest."""
        self._parts.put_nowait(None)
        await self._until(asyncio.wait({self._reported}))

    async def confirm(self, quorum: DigestQuorum) -> None:
        """Compare the reported digest. Raises EngineError if it is wrong."""
        try:
            await quorum.confirm(self.name, self._reported.result())
        except DigestMismatch as error:
            raise EngineError(f"{self.name}: {error}") from error
        finally:
            await quorum.release(self.name)  # also after an early mismatch

    async def resume(self) -> None:
        self._may_resume.set()
        await self._call

    def cancel(self) -> None:
        """Cancel an unfinished load, which leaves the engine's weights unknown."""
        self._call.cancel()

    async def _handed(self) -> AsyncIterator[WeightPart]:
        self._asked.set()
        while (part := await self._parts.get()) is not None:
            yield part
            self._asked.set()

    async def _confirm(self, digest: str) -> None:
        """The engine's ``confirm``: record its digest, and wait until it may sample from the new weights."""
        self._reported.set_result(digest)
        await self._may_resume.wait()

    async def _until(self, step: Coroutine[Any, Any, Any]) -> None:
        """Wait for ``step``. If the engine's call ends first, raise its error or EngineError."""
        waiting = asyncio.create_task(step)
        try:
            await asyncio.wait({waiting, self._call}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                if not self._call.cancelled():
                    await self._call
                raise EngineError(f"{self.name}: its load ended before its digest was compared")
        finally:
            waiting.cancel()


class WeightUpdates:
    """Weight update of colocated engines by memory handles, and base class of other transports' updates.
    Order of the calls: ``begin``; ``receive`` for every bucket; ``confirm``; ``resume``. Each returns the
    names of the engines on which it succeeded. It quarantines the others and drops them from the update; the
    caller must kill their servers."""

    calls: tuple[str, ...] = ()
    """Names of further methods that the trainer may call."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool, self._version = pool, 0
        self._loads: list[EngineLoad] = []

    async def begin(self, version: int, names: Collection[str] = ()) -> list[str]:
        """Start the update to ``version``. ``names``: sleeping engines, which reclaim their weight memory.
        Raises EngineError if no engine receives: a later ``resume`` would quarantine all of them."""
        self.cancel()
        self._version = version
        self._loads = [EngineLoad(slot, load, version) for slot, load in self._receivers(names)]
        if not self._loads:
            raise EngineError(f"{type(self).__name__}: no engine receives these weights in parts")
        return await self._on_all(lambda load: load.begin())

    async def receive(self, part: WeightPart | Mapping[str, WeightPart]) -> list[str]:
        """Load one bucket into the engines: ``part``, or its entry under the engine's name."""
        by_engine = part if isinstance(part, Mapping) else {load.name: part for load in self._loads}
        return await self._on_all(lambda load: load.receive(by_engine[load.name]))

    async def confirm(self, sent: SentDigests | None = None) -> list[str]:
        """End the parts and compare the engines' digests with ``sent`` and with each other."""
        quorum = self._pool.quorum(self._version, sent)
        # All digests arrive before the first comparison, and all comparisons finish before any resume.
        reported = await self._on_all(lambda load: load.end())
        for name in reported:
            quorum.expect(name)
        confirmed = await self._on_all(lambda load: load.confirm(quorum))
        for name in set(reported) - set(confirmed):
            quorum.withdraw(name)  # its digest must not count in the quorum of later disk loads
        return confirmed

    async def resume(self) -> list[str]:
        """Let the engines with confirmed weights sample; woken ones reclaim their remaining memory first."""
        resumed = await self._on_all(lambda load: load.resume())
        self._pool.resumed(self._version, [load.slot for load in self._loads])
        self._loads = []
        return resumed

    def cancel(self) -> None:
        """Cancel an update that was not resumed: it would block other calls to its engines."""
        for load in self._loads:
            load.cancel()
        self._loads = []

    def _receivers(self, names: Collection[str]) -> list[tuple[EngineSlot, Load]]:
        engines = [(slot, slot.engine) for slot in self._pool.named(names)]
        return [(slot, engine.wake) for slot, engine in engines if isinstance(engine, ReceivesHandles)]

    async def _on_all(self, step: Callable[[EngineLoad], Coroutine[Any, Any, None]]) -> list[str]:
        """Run a step on all loads concurrently; returns the names of the engines on which it succeeds."""
        done = await asyncio.gather(
            *(self._pool.or_quarantine(load.slot, step(load)) for load in self._loads)
        )
        for load, succeeded in zip(self._loads, done, strict=True):
            if not succeeded:
                load.cancel()
        self._loads = [load for load, succeeded in zip(self._loads, done, strict=True) if succeeded]
        return [load.name for load in self._loads]


def driver_class(sync: str) -> type[WeightUpdates]:
    """Return the driver class of weight transport ``sync`` (``config/transports.py``)."""
    driver: type[WeightUpdates] = load_dotted_path("sync", TRANSPORTS[sync].driver, "class")
    return driver


class BroadcastUpdates(WeightUpdates):
    """Weight update by broadcast, which all engines receive in lockstep. First ``gather`` selects the
    engines, and ``join``, unless they share a group, makes them join the sender's. The ``WeightUpdates``
    calls then succeed on all of them, or raise EngineError with the names of those that failed. As weights
    may then be mixed, the sender must call ``fail``: it quarantines all until they have loaded weights."""

    calls = ("gather", "join", "fail")

    def __init__(self, pool: EnginePool) -> None:
        super().__init__(pool)
        self._gathered: list[tuple[EngineSlot, ReceivesBroadcast]] = []
        self._members: tuple[list[Any], int] | None = None
        """Engines of the group, with the pool's ``ready_transitions`` after their last broadcast."""

    async def gather(self) -> tuple[int, bool]:
        """Select the receiving engines; return the number of their ranks, and whether they share a group."""
        engines = [(slot, slot.engine) for slot in await self._pool.gather()]
        self._gathered = [
            (slot, receiver) for slot, receiver in engines if isinstance(receiver, ReceivesBroadcast)
        ]
        # An engine that became ready again may be a new process, outside the group: all join anew.
        is_joined = self._members == (self._gathered, self._pool.ready_transitions)
        return sum(engine.broadcast_ranks for _, engine in self._gathered), is_joined

    async def join(self, group: BroadcastGroup) -> None:
        # Leave first: a failed broadcast may have left a group of this name. All leave before one joins: in
        # a join, a server that waits for a lost peer answers nothing for minutes.
        limit_s = self._pool.update_s
        await _all_or_none(
            [_within(limit_s, engine.name, engine.leave_group(group.name)) for _, engine in self._gathered]
        )
        calls, rank = [], 1
        for _, engine in self._gathered:
            calls.append(_within(limit_s, engine.name, engine.join_group(group, rank)))
            rank += engine.broadcast_ranks
        await _all_or_none(calls)

    async def resume(self) -> list[str]:
        resumed = await super().resume()
        self._members = self._gathered, self._pool.ready_transitions
        return resumed

    async def fail(self, reason: str) -> None:
        """Quarantine the gathered engines after a failed broadcast, until they have loaded weights again."""
        self.cancel()
        for slot, _ in self._gathered:
            self._pool.quarantine(slot, reason)
        self._gathered, self._members = [], None

    def _receivers(self, _names: Collection[str]) -> list[tuple[EngineSlot, Load]]:
        return [(slot, engine.load) for slot, engine in self._gathered]

    async def _on_all(self, step: Callable[[EngineLoad], Coroutine[Any, Any, None]]) -> list[str]:
        """Run a step on all loads concurrently; returns all names. Raises EngineError if one fails."""
        limit_s = self._pool.update_s
        await _all_or_none([_within(limit_s, load.name, step(load)) for load in self._loads])
        return [load.name for load in self._loads]


async def _within(limit_s: float, name: str, call: Coroutine[Any, Any, None]) -> None:
    """Await a call to an engine. Raises EngineError after ``limit_s``: nothing else ends a hanging call."""
    try:
        async with asyncio.timeout(limit_s) as limit:
            await call
    except TimeoutError as error:
        if limit.expired():
            raise EngineError(f"{name}: not done in {limit_s:g} s") from error
        raise


async def _all_or_none(calls: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run the calls concurrently. EngineError joins the errors up to ``_ERROR_GRACE_S`` after the first."""
    tasks = [asyncio.create_task(call) for call in calls]
    _, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    if waiting:
        _, waiting = await asyncio.wait(waiting, timeout=_ERROR_GRACE_S)
    for task in waiting:
        task.cancel()
    if errors := [error for task in tasks if task not in waiting and (error := task.exception())]:
        raise EngineError("; ".join(map(str, errors))) from errors[0]
