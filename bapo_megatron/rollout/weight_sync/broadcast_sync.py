"""Weights to the engines by broadcast, and from disk if that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol

from torch import Tensor

from bapo_megatron.interfaces import Policy
from bapo_megatron.rollout.weight_sync.broadcast import BroadcastError, WeightBroadcast
from bapo_megatron.rollout.weight_sync.disk import DiskSync
from bapo_megatron.runtime.distributed import share


class Engines(Protocol):
    """Who can be told of a broadcast: ``SamplerClient`` (methods: ``PoolBroadcast``)."""

    def tell(self, method: str, *arguments: Any) -> Future[Any]:
        """Begin to tell them; the future fails if one of them does."""


class BroadcastSync:
    """Implements ``interfaces.WeightSync``. On every rank but 0, ``engines`` and ``broadcast`` are None."""

    def __init__(
        self,
        engines: Engines | None,
        broadcast: WeightBroadcast | None,
        disk: DiskSync,
        on_event: Callable[[dict[str, Any]], None],
    ) -> None:
        self._engines, self._broadcast, self._disk, self._on_event = engines, broadcast, disk, on_event

    def push(self, policy: Policy, step: int) -> None:
        """Send the weights to every engine that answers; to all of them from disk if one fails on the way."""
        failed = None
        if policy.data_rank == 0:
            weights = policy.hf_weights()
            if self._engines is not None and self._broadcast is not None:
                failed = self._attempt(self._engines, self._broadcast, weights, policy.version, step)
            for _ in weights:  # the other ranks take part in the gathering
                pass
        if share(failed):
            self._disk.push(policy, step)

    def _attempt(
        self,
        engines: Engines,
        broadcast: WeightBroadcast,
        weights: Iterator[tuple[str, Tensor]],
        version: int,
        step: int,
    ) -> str | None:
        """Why it failed, or None."""
        try:
            ranks, are_joined = engines.tell("gather").result()
            if not ranks:
                raise BroadcastError("no engine answers")
            if not (are_joined and broadcast.is_open):
                broadcast.open(ranks, lambda group: engines.tell("join", group))
            engines.tell("begin", version).result()
            broadcast.send(weights, lambda bucket: engines.tell("receive", bucket))
            engines.tell("finish", version, step).result()
        except Exception as error:  # whatever it is, there is another way
            reason = f"a broadcast of weights failed: {error}"
            broadcast.close()
            _quietly(engines.tell("fail", reason))
            self._on_event({"kind": "broadcast_failed", "version": version, "reason": str(error)})
            print(f"{reason}; trying from disk", flush=True)
            return reason
        return None


def _quietly(told: Future[Any]) -> None:
    """A sampler that has died is started again by the next way."""
    told.exception()
