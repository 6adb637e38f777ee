"""``open_pool``, which builds a run's ``EnginePool``, and ``ColocatedPool`` for engines on the policy's GPUs.

A pool lives in the sampler process or `bapo eval`. The trainer's GPU hand-over (``trainer/gpu_handover.py``)
calls ``ColocatedPool`` through ``SamplerClient``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from bapo_megatron.config import RunConfig
from bapo_megatron.config.transports import TRANSPORTS
from bapo_megatron.errors import ConfigError
from bapo_megatron.interfaces import ReleasesMemory
from bapo_megatron.rollout.engines.backend import engine_backend
from bapo_megatron.rollout.engines.pool import EnginePool, Report
from bapo_megatron.rollout.engines.pool_state import EngineSlot, EngineTimeouts
from bapo_megatron.rollout.engines.sent_weights import DigestQuorum, SentDigests

_ASLEEP = "its memory is released"


async def open_pool(
    config: RunConfig,
    urls: Sequence[str],
    device: str,
    report: Report,
    opened: AsyncExitStack,
    max_in_flight: int | None = None,
) -> EnginePool:
    """Return a run's engine pool, which ``opened`` closes; arguments as in `EngineBackend.open`. Raises
    ConfigError if the engines cannot be colocated or lack the weight transport. ``max_in_flight``: most
    requests in flight on each engine, in place of the backend's setting."""
    rollout = config.rollout
    backend = engine_backend(rollout.engine)
    engines = await backend.open(config, urls, device, opened)
    colocated = rollout.engine_config.colocated
    if colocated and not all(isinstance(engine, ReleasesMemory) for engine in engines):
        raise ConfigError(
            f"rollout.engine={rollout.engine} with colocated=true: its engines cannot release their memory "
            f"(interfaces.ReleasesMemory); leave colocated out"
        )
    sync = rollout.engine_config.sync
    for engine in engines:
        if TRANSPORTS[sync].protocol and sync not in getattr(engine, "transports", ()):
            raise ConfigError(
                f"rollout.engine={rollout.engine}, sync={sync}: {type(engine).__name__}.transports does not "
                f"name it: use sync=disk, or take WeightParts (interfaces.{TRANSPORTS[sync].protocol})"
            )
    timeouts = EngineTimeouts(update_s=60 * rollout.engine_config.update_minutes)
    most = max_in_flight or backend.max_in_flight(rollout)
    kind = ColocatedPool if colocated else EnginePool
    pool = kind(engines, most, report, timeouts, backend.has_prefix_cache(rollout))
    opened.push_async_callback(pool.close)
    return pool


class ColocatedPool(EnginePool):
    """``EnginePool`` of engines that sleep while the policy trains on their GPUs; the GPU hand-over calls it.

        admit -> sample -> release -> (the policy trains) -> wake, or WeightUpdates for IPC -> admit -> ...

    A held engine gets no requests, health checks or recovery; initially all are held. ``release`` holds all,
    aborts their requests and frees their GPU memory. ``wake`` takes it back, loads the weights, and lets an
    engine sample. Both return the names of the engines on which they succeeded; the memory of the others is
    in an unknown state, so kill their servers before ``admit``, which ends the hold on all. An engine lost
    between two hand-overs recovers only if the weights are in a folder; IPC leaves them in none.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        for slot in self._slots:
            slot.is_held = True
        self.down_since = None  # held engines do not count as lost
        self._ipc_weights: tuple[int, DigestQuorum] | None = None
        """Version of the weights sent by memory handles (CUDA IPC), with its digest quorum."""

    async def release(self) -> list[str]:
        """Hold all engines, abort requests, release memory; return the names of those that released it. A
        lost one that can release it gets the next weights like the others."""
        # Hold all before the first await: a releasing engine must get no request and no weights.
        for slot in self._slots:
            slot.is_held = True
        awake = [slot for slot in self._slots if slot.is_up or not (slot.is_busy or slot.reason == _ASLEEP)]
        released = await asyncio.gather(*(self._release(slot) for slot in awake))
        self.down_since = None
        return [slot.engine.name for slot, done in zip(awake, released, strict=True) if done]

    async def wake(self, names: Collection[str]) -> list[str]:
        """Wake engines with the current weights from their folder; return the names of those that sample."""
        sleeping = self.named(names)
        # Expect all before the first loads: the digest quorum waits for engines that still load.
        for slot in sleeping:
            self._begin_load(slot)
        woken = await asyncio.gather(*(self._wake(slot) for slot in sleeping))
        return [slot.engine.name for slot, done in zip(sleeping, woken, strict=True) if done]

    def expect_handles(self, version: int) -> None:
        """Announce weights that are in no folder: ``WeightUpdates`` wakes engines with them, by handles."""
        self._weights = None
        self._ipc_weights = version, DigestQuorum(self._timeouts.silent_s)

    def resumed(self, version: int, slots: Collection[EngineSlot]) -> None:
        """Let the receivers of weights by handles sample; the other engines stay held until ``admit``."""
        for slot in slots:
            self._resume_sampling(slot, version)

    async def admit(self) -> None:
        """End the hold on all engines; one that is down returns once it answers and has the weights."""
        for slot in self._slots:
            slot.is_held = False
            self._restart_timeouts(slot)
        self.down_since = None if self.up else self._clock.now()

    def _restart_timeouts(self, slot: EngineSlot) -> None:
        # Sleep must not count as silence.
        self._worked_at = slot.last_answer_at = self._clock.now()
        slot.hang_reported_at, slot.hang_report_backoff_s = -math.inf, 0.0

    async def _wake(self, slot: EngineSlot) -> bool:
        assert isinstance(slot.engine, ReleasesMemory)
        assert self._weights is not None
        weights = self._weights
        confirm = partial(weights.quorum.confirm, slot.engine.name)
        try:
            call = slot.engine.wake(weights.folder, weights.version, confirm)
            woken = await self.or_quarantine(slot, call, weights.load_s)
        finally:
            await self._end_load(slot, weights)
        if woken:
            self._resume_sampling(slot, weights.version)
        return woken

    def _resume_sampling(self, slot: EngineSlot, version: int) -> None:
        # Up first: each step's wake-up is not an event `engine_ready`.
        slot.is_up, slot.is_held, self.down_since = True, False, None
        self._restart_timeouts(slot)
        slot.ready_since = self._clock.now()
        self._mark_ready(slot, version)
        self.changed.set()

    def quorum(self, version: int, sent: SentDigests | None) -> DigestQuorum:
        """Return the digest quorum of a version, shared by its handle transfers and disk loads."""
        if self._ipc_weights is not None and self._ipc_weights[0] == version:
            if sent is not None:
                self._ipc_weights[1].is_sent = partial(self.sent_check.is_sent, sent)
            return self._ipc_weights[1]
        return super().quorum(version, sent)

    async def _release(self, slot: EngineSlot) -> bool:
        assert isinstance(slot.engine, ReleasesMemory)
        released = await self.or_quarantine(slot, slot.engine.release_memory())
        if released:
            slot.is_up, slot.reason = False, _ASLEEP
        return released
