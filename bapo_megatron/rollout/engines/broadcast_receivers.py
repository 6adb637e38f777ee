"""The receivers of a weight broadcast: control calls to all engines in lockstep, and their membership.

In the sampler's process; the sender, on the trainer's rank 0, is ``rollout/weight_sync/broadcast.py``. Used
by ``rollout/sampler/process.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from bapo_megatron.config import EngineConfig
from bapo_megatron.interfaces import ReceivesBroadcast
from bapo_megatron.rollout.engines.backend import EngineError
from bapo_megatron.rollout.engines.digest_quorum import DigestMismatch, IsSent
from bapo_megatron.rollout.engines.pool import EnginePool
from bapo_megatron.rollout.engines.sent_weights import SentDigests
from bapo_megatron.types import BroadcastGroup, BucketSpec

T = TypeVar("T")

_TIMEOUT_SHARE = 0.9
"""The receivers' timeout as a share of the sender's: their error, which names the engine, must come first."""

_ERROR_GRACE_S = 0.5
"""Wait for the errors of other engines, after the first."""


class WeightReceivers:
    """The engines of one broadcast group, for ``PoolBroadcast``. All calls are async.

    In order: ``join`` once; then for each version ``begin``, ``receive`` for every bucket, ``finish``. All
    raise EngineError, which names the engines. After an error weights may be mixed. An engine that hangs must
    be ended: a broadcast passes data through it, so others may wait for it. The pool detects it when it does
    not load weights from disk (``engine_hangs``). Then new receivers must ``join`` a new group. Made by
    ``PoolBroadcast``.
    """

    def __init__(self, engines: Sequence[ReceivesBroadcast], timeout_s: float = 120.0) -> None:
        """``timeout_s``: longest wait for one bucket, in seconds."""
        self.engines, self._timeout_s = list(engines), timeout_s
        self._group_name = ""

    @property
    def ranks(self) -> int:
        """Number of ranks of all engines in the broadcast group."""
        return sum(engine.broadcast_ranks for engine in self.engines)

    async def join(self, group: BroadcastGroup) -> None:
        """Join the sender's group on all engines."""
        self._group_name = group.name
        # Leave first: a failed broadcast may have left a group of that name.
        await self._on_all_engines(lambda engine: engine.leave_group(group.name, self._timeout_s))
        first_ranks, rank = {}, 1
        for engine in self.engines:
            first_ranks[engine.name] = rank
            rank += engine.broadcast_ranks
        await self._on_all_engines(
            lambda engine: engine.join_group(group, first_ranks[engine.name], self._timeout_s)
        )

    async def begin(self) -> None:
        """Pause sampling and open a weight update on all engines."""
        await self._on_all_engines(lambda engine: engine.begin_update())

    async def receive(self, bucket: BucketSpec) -> None:
        """Receive and load one bucket on all engines."""
        await self._on_all_engines(lambda engine: engine.receive(bucket, self._group_name, self._timeout_s))

    async def finish(self, version: int, is_sent: IsSent | None = None) -> str:
        """Close the update, verify the digests, and resume sampling with ``version``; returns the digest.

        EngineError if the engines' weights differ, or are not those sent; then none samples from them.
        """
        # All digests are compared before any engine resumes: no token may come from wrong weights.
        digests = await self._on_all_engines(lambda engine: engine.end_update(self._timeout_s))
        for engine, digest in zip(self.engines, digests, strict=True):
            try:
                if is_sent is not None:
                    is_sent(engine.name, digest)
            except DigestMismatch as error:
                raise EngineError(f"{engine.name}: {error}") from error
        if len(set(digests)) != 1:
            all_digests = ", ".join(f"{e.name}: {d[:12]}" for e, d in zip(self.engines, digests, strict=True))
            raise EngineError(f"the engines have different weights after version {version}: {all_digests}")
        await self._on_all_engines(lambda engine: engine.set_version(version))
        await self._on_all_engines(lambda engine: engine.resume_after_update())
        return str(digests[0])  # without the digests of single tensors, which are not needed any more

    async def _on_all_engines(self, call: Callable[[ReceivesBroadcast], Coroutine[Any, Any, T]]) -> list[T]:
        """Run ``call`` on all engines at once; returns their results.

        EngineError at the first error, with those of other engines that follow within ``_ERROR_GRACE_S``.
        """
        tasks = [asyncio.create_task(call(engine)) for engine in self.engines]
        _, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if waiting:
            _, waiting = await asyncio.wait(waiting, timeout=_ERROR_GRACE_S)
        for task in waiting:
            task.cancel()
        if errors := [error for task in tasks if task not in waiting and (error := task.exception())]:
            raise EngineError("; ".join(map(str, errors))) from errors[0]
        return [task.result() for task in tasks]


class PoolBroadcast:
    """The engine pool as receiver of weight broadcasts: selects the engines, and updates their state.

    The trainer calls it by ``SamplerClient.tell``, in this order: ``gather``; ``join`` if the engines are not
    in a group; ``begin``; ``receive`` for every bucket; ``finish``. After an error ``fail``. Made by
    ``Service`` (``sampler/process.py``).
    """

    def __init__(self, pool: EnginePool, config: EngineConfig) -> None:
        self._pool, self._timeout_s = pool, _TIMEOUT_SHARE * 60 * config.update_minutes
        self._receivers = WeightReceivers([])
        self._is_joined = False
        self._ready_transitions = 0

    async def gather(self) -> tuple[int, bool]:
        """Select the receiving engines; returns their number of ranks, and whether they are in a group."""
        found = await self._pool.gather()
        # An engine that became ready again may be another process, which is in no group: all join anew.
        if found != self._receivers.engines or self._ready_transitions != self._pool.ready_transitions:
            self._is_joined = False
        if not self._is_joined:
            self._receivers = WeightReceivers(found, self._timeout_s)
        return self._receivers.ranks, self._is_joined

    async def join(self, group: BroadcastGroup) -> None:
        """Join all engines to the sender's broadcast group."""
        await self._receivers.join(group)
        self._is_joined = True

    async def begin(self) -> None:
        """Pause sampling and open a weight update on all engines."""
        await self._receivers.begin()

    async def receive(self, bucket: BucketSpec) -> None:
        """Receive and load one bucket on all engines."""
        await self._receivers.receive(bucket)

    async def finish(self, version: int, sent: SentDigests | None = None) -> str:
        """Verify the engines' weights against those ``sent``, and resume sampling; returns their digest."""
        digest = await self._receivers.finish(version, partial(self._pool.sent_check.is_sent, sent))
        self._pool.broadcast_succeeded(version)
        self._ready_transitions = self._pool.ready_transitions
        return digest

    async def fail(self, reason: str) -> None:
        """Put the engines in quarantine after a failed broadcast, until they have loaded weights."""
        self._is_joined = False
        self._pool.broadcast_failed(reason)
