"""Weight sync through the trainer's own memory, for engines that share its GPUs: CUDA IPC, or shared memory.

When weights are gathered every rank sees each tensor of its replica whole. It copies a bucket of them to
memory that other processes may read, and the engine on its GPU loads them from there:

    rank of GPU g    bucket -> handles -> rank 0 -> the sampler's process -> the engine's process on GPU g

Nothing is written to disk unless an engine did not get its weights so: then all are, once, for it to load.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from bapo_megatron.interfaces import Policy
from bapo_megatron.rollout.weight_sync.buckets import Bucket, Buckets
from bapo_megatron.rollout.weight_sync.disk import DiskSync
from bapo_megatron.rollout.weight_sync.handles import handles_of, shareable
from bapo_megatron.runtime.distributed import everywhere, share, together

_MOST_FAILURES = 2
"""So many times in a row no engine gets its weights by handles; then they go by disk for good."""


_Reader = tuple[str, int]
"""A process of an engine that reads this one's memory: the engine's name, and its tensor-parallel rank."""


class HandleReceivers(Protocol):
    """The engines' side: ``SamplerClient``. Names that a call returns are those of engines that can go on;
    the others must be ended."""

    def expect_handles(self, version: int, step: int) -> None:
        """Note that the weights of ``version``, which ``step`` has made, come by handles."""

    def begin_wake(self, names: Sequence[str]) -> list[str]:
        """Let sleeping engines take back the memory of their weights."""

    def receive_handles(self, handles: Mapping[str, Sequence[bytes]]) -> list[str]:
        """Let each of the engines named load a bucket: a pickle of handles for each of its GPUs."""

    def confirm_weights(self, names: Sequence[str], version: int) -> list[str]:
        """Compare the digests of engines that have all weights of ``version``."""


class IpcSync:
    """The ``WeightSync`` (see interfaces.py) of colocated engines, which get the weights when they wake.

    ``push`` notes that there are new weights. ``hand_over``, and ``write`` for engines that it left out, come
    when the GPUs change hands (``trainer/time_sharing.py``). All are collective.
    """

    def __init__(
        self,
        disk: DiskSync,
        engines: HandleReceivers | None,
        gpus: Mapping[str, Sequence[int]],
        device: torch.device,
        bucket_mb: float,
        on_event: Callable[[dict[str, Any]], None],
    ) -> None:
        """``engines`` and ``gpus``, those of each engine by its name, are rank 0's."""
        self._disk, self._engines, self._gpus, self._on_event = disk, engines, gpus, on_event
        self._device = device
        empty = partial(shareable, device=device)
        self._buckets = Buckets(int(bucket_mb * 2**20), device, empty, buffers=1)
        self._failures = 0
        self._step = 0

    @property
    def works(self) -> bool:
        """Whether engines take weights by handles on this machine, as far as was seen; equal on all ranks."""
        return self._failures < _MOST_FAILURES

    def push(self, policy: Policy, step: int) -> None:
        """Note that ``step`` has made the weights that engines are to wake with."""
        self._step = step
        self._disk.discard()
        if self._engines is not None:
            self._engines.expect_handles(policy.version, step)

    def write(self, policy: Policy) -> None:
        """Write the weights to disk, for engines that load them from there."""
        self._disk.push(policy, self._step)

    def hand_over(self, policy: Policy, names: Sequence[str]) -> list[str]:
        """Give the weights to sleeping engines; the names of those that have them, on every rank.

        They do not sample yet. The others must be ended.
        """
        try:
            taken = self._hand_over(policy, names)
        except Exception as error:  # whatever it is, there is another way
            taken = []
            self._on_event({"kind": "handover_failed", "version": policy.version, "reason": str(error)})
        self._failures = 0 if taken else self._failures + 1
        if not self.works:
            self._on_event({"kind": "handover_given_up", "reason": "weights go by disk from now on"})
        return taken

    def _hand_over(self, policy: Policy, names: Sequence[str]) -> list[str]:
        going: list[str] = self._ask(lambda engines: engines.begin_wake(names))
        if not going:
            return []
        readers = self._readers(going)
        weights = policy.hf_weights()
        try:
            buckets = self._buckets.cut(weights)
            while going:
                found = together(lambda: _handles_of_next(buckets, readers))
                if found[0] is None:
                    break
                handles = {reader: one for some in found for reader, one in (some or {}).items()}
                going = self._ask(partial(self._deliver, going, handles))
        finally:
            self._buckets.release()
            for _ in weights:  # the other ranks take part in the gathering
                pass
        return self._ask(lambda engines: engines.confirm_weights(going, policy.version)) if going else []

    def _deliver(
        self, names: Sequence[str], handles: Mapping[_Reader, bytes], engines: HandleReceivers
    ) -> list[str]:
        """Send the engines their processes' handles; the names of those that took them."""
        return engines.receive_handles(
            {name: [handles[name, index] for index in range(len(self._gpus[name]))] for name in names}
        )

    def _ask(self, call: Callable[[HandleReceivers], list[str]]) -> list[str]:
        """What rank 0's ``call`` returns, on every rank; all raise if it fails."""
        engines = self._engines
        return together(lambda: call(engines) if engines is not None else [])[0]

    def _readers(self, names: Sequence[str]) -> list[_Reader]:
        """The engines' processes that read this rank's memory: those on its GPU, for which a rank stands on a
        CPU."""
        gpus = share(dict(self._gpus))
        own = self._device.index if self._device.type == "cuda" else dist.get_rank()
        places = everywhere((socket.gethostname(), own))
        ranks = {gpu: rank for rank, (host, gpu) in reversed([*enumerate(places)]) if host == places[0][0]}
        return [
            (name, index)
            for name in names
            for index, gpu in enumerate(gpus[name])
            if ranks.get(gpu, 0) == dist.get_rank()
        ]


def _handles_of_next(buckets: Iterator[Bucket], readers: Sequence[_Reader]) -> dict[_Reader, bytes] | None:
    """Fill the next bucket; for each reader handles of its own: torch counts them. None after the last."""
    bucket = next(buckets, None)
    if bucket is None:
        return None
    return {reader: handles_of(bucket.tensors()) for reader in readers}
