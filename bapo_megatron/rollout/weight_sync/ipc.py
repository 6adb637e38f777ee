"""Weight sync by CUDA IPC for colocated engines (shared memory on a CPU): no copy over network or disk.

``push`` only announces a version. Engines read it when they wake, in the GPU hand-over
(``trainer/gpu_handover.py``). The all-gather of the weights gives each rank every whole tensor. Each rank
copies a bucket of them to shareable memory, and the engine on its GPU loads it through memory handles, by
which a process maps the memory of another one:

    rank of GPU g    bucket -> handles -> rank 0 -> the sampler's process -> the engine's process on GPU g

Fallback: an engine that fails to receive is ended; the weights are written to disk once, and its new server
loads them. Used by ``trainer/build.py`` and ``trainer/gpu_handover.py``.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from bapo_megatron.errors import ConfigError
from bapo_megatron.interfaces import Policy
from bapo_megatron.rollout.engines.sent_weights import DigestingIterator, MakeDigester
from bapo_megatron.rollout.weight_sync.buckets import Bucket, Buckets
from bapo_megatron.rollout.weight_sync.disk import DiskSync
from bapo_megatron.rollout.weight_sync.handles import handles_of, remove_leftovers, shareable
from bapo_megatron.runtime.distributed import all_gather, broadcast_from_main, on_all_ranks

T = TypeVar("T")

_MOST_FAILURES = 2
"""Consecutive failed IPC transfers after which an engine gets its weights by disk for a while."""

_PAUSE = 20
"""Hand-overs by disk until IPC is tried again with such an engine."""


_Reader = tuple[str, int]
"""A reader of this process's memory: an engine's name, and one of its tensor-parallel ranks."""


class HandleReceivers(Protocol):
    """The engines' side of the transfer, as a protocol that ``SamplerClient`` implements; on rank 0.

    Calls block. ``update`` returns the names of the engines on which it succeeded; the others must be ended.
    """

    def expect_handles(self, version: int, step: int) -> None:
        """Announce that the weights of ``version``, made by ``step``, come by handles."""

    def update(self, call: str, *arguments: Any) -> list[str]:
        """Make a call of ``WeightUpdates``: ``begin``, ``receive`` or ``confirm``."""


class IpcSync:
    """The ``WeightSync`` of colocated engines by CUDA IPC: the weights arrive when the engines wake.

    ``push`` only announces them. In the GPU hand-over (``trainer/gpu_handover.py``) ``hand_over`` transfers
    them and names the engines that have them (the caller ends the others); then ``write`` sends them by disk
    to the engines without. These three are collective. A failed transfer is an event, no error; an engine
    that fails twice in a row gets its weights by disk for a while. Made by ``trainer/build.py``.
    """

    def __init__(
        self,
        disk: DiskSync,
        engines: HandleReceivers | None,
        gpus: Mapping[str, Sequence[int]],
        device: torch.device,
        bucket_mb: float,
        on_event: Callable[[dict[str, Any]], None],
        make_digester: MakeDigester | None = None,
    ) -> None:
        """``engines``, and ``gpus`` of each engine by its name, are known on rank 0 alone. ``make_digester``:
        makes the digests that engines must report; None: nothing is compared."""
        self._make_digester = make_digester if engines is not None else None
        self._disk, self._engines, self._gpus, self._on_event = disk, engines, gpus, on_event
        self._device = device
        if device.type == "cpu":
            remove_leftovers()
        empty = partial(shareable, device=device)
        self._buckets = Buckets(int(bucket_mb * 2**20), device, empty)
        self._failures = Counter[str]()
        """Consecutive failed transfers of each engine; negative: hand-overs until IPC is tried again. Equal
        on all ranks."""
        self._step = 0

    def push(self, policy: Policy, step: int) -> None:
        """Announce the weights that engines will wake with, made by ``step``."""
        self._step = step
        # Engines are held while the policy trains: none loads the folder of an earlier version any more.
        self._disk.discard()
        self._call_engines(lambda engines: engines.expect_handles(policy.version, step))

    def write(self, policy: Policy) -> None:
        """Fallback: write the weights to disk, and have the engines load them from there."""
        self._disk.push(policy, self._step)

    def takers(self, names: Sequence[str]) -> list[str]:
        """The engines that take part in the IPC transfer: all but those that failed too often. Local."""
        return [name for name in names if self._failures[name] >= 0]

    def hand_over(self, policy: Policy, names: Sequence[str]) -> list[str]:
        """Transfer the weights to sleeping engines; returns the names of those that have them, on every rank.

        They do not sample yet. The others must be ended.
        """
        try:
            taken = self._hand_over(policy, names)
        except Exception as error:  # of any kind: the fallback is the disk
            taken = []
            self._record_event({"kind": "handover_failed", "version": policy.version, "reason": str(error)})
        for name in self._failures:
            self._failures[name] += self._failures[name] < 0
        for name in names:
            self._failures[name] = 0 if name in taken else self._failures[name] + 1
            if self._failures[name] == _MOST_FAILURES:
                self._failures[name] = -_PAUSE
                self._record_event(
                    {
                        "kind": "handover_given_up",
                        "engine": name,
                        "reason": "its weights are sent by disk for a while",
                    }
                )
        return taken

    def _hand_over(self, policy: Policy, names: Sequence[str]) -> list[str]:
        going = self._call_engines(lambda engines: engines.update("begin", policy.version, names))
        if not going:
            return []
        readers = self._readers(going)
        weights = policy.hf_weights()
        try:
            watched = DigestingIterator(weights, self._make_digester)
            lent = _handles_by_bucket(self._buckets.cut(self._disk.checked(iter(watched))), readers)
            # In lockstep on all ranks: a server loads a bucket with the handles of all its GPUs at once.
            while going and (found := on_all_ranks(lambda: next(lent, None)))[0] is not None:
                handles = {reader: one for some in found for reader, one in (some or {}).items()}
                going = self._call_engines(partial(self._deliver, going, handles))
            if not going:
                return []
            return self._call_engines(lambda engines: engines.update("confirm", watched.sent()))
        finally:
            self._buckets.release()
            # To the end, also after an error: the other ranks wait in the same all-gathers.
            for _ in weights:
                pass

    def _record_event(self, event: dict[str, Any]) -> None:
        """Record an event. All ranks raise if rank 0 cannot."""
        on_all_ranks(lambda: self._on_event(event))

    def _deliver(
        self, names: Sequence[str], handles: Mapping[_Reader, bytes], engines: HandleReceivers
    ) -> list[str]:
        """Send the engines the handles of their ranks; returns the names of those that loaded them."""
        part = {name: [handles[name, index] for index in range(len(self._gpus[name]))] for name in names}
        return engines.update("receive", part)

    def _call_engines(self, call: Callable[[HandleReceivers], T]) -> T:
        """``call`` on rank 0, its result broadcast to every rank; all raise if it fails."""
        engines = self._engines
        found: list[Any] = on_all_ranks(lambda: call(engines) if engines is not None else None)
        return found[0]  # type: ignore[no-any-return]

    def _readers(self, names: Sequence[str]) -> list[_Reader]:
        """The readers of this rank's memory: the engine processes on its GPU; on a CPU, with its number.

        ConfigError, on every rank, if no rank trains on an engine's GPU.
        """
        gpus = broadcast_from_main(dict(self._gpus))
        own = self._device.index if self._device.type == "cuda" else dist.get_rank()
        places = all_gather((socket.gethostname(), own))
        ranks = {gpu: rank for rank, (host, gpu) in reversed([*enumerate(places)]) if host == places[0][0]}
        asked = {gpu for name in names for gpu in gpus[name]}
        if self._device.type != "cuda":
            ranks |= dict.fromkeys(asked - ranks.keys(), 0)
        if lack := sorted(asked - ranks.keys()):
            raise ConfigError(
                f"no process trains on GPU {lack[0]} of rank 0's machine, which a server has: start fewer "
                f"servers, or use sync=disk"
            )
        return [
            (name, index)
            for name in names
            for index, gpu in enumerate(gpus[name])
            if ranks[gpu] == dist.get_rank()
        ]


def _handles_by_bucket(
    buckets: Iterator[Bucket], readers: Sequence[_Reader]
) -> Iterator[dict[_Reader, bytes]]:
    """Handles of bucket after bucket, separate ones for each of the ``readers``.

    The memory of a bucket is kept until the next bucket has been received. A server's first rank answers for
    all its ranks, and others may still read; they have finished when they take part in the next call.
    """
    before: Bucket | None = None
    for bucket in buckets:
        yield {reader: handles_of(bucket.tensors()) for reader in readers}
        before = bucket
    del before
