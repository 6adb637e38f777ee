"""Weight sync through the trainer's own memory, for engines that share its GPUs: CUDA IPC, or shared memory.

When weights are gathered every rank sees each tensor of its replica whole. It copies a bucket of them to
memory that other processes may read, and the engine on its GPU loads them from there:

    rank of GPU g    bucket -> handles -> rank 0 -> the sampler's process -> the engine's process on GPU g

Nothing is written to disk unless an engine did not get its weights so: then all are, once, for it to load.
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
from bapo_megatron.rollout.engines.sent_weights import DigestingIterator, MakeDigester, SentDigests
from bapo_megatron.rollout.weight_sync.buckets import Bucket, Buckets
from bapo_megatron.rollout.weight_sync.disk import DiskSync
from bapo_megatron.rollout.weight_sync.handles import handles_of, remove_leftovers, shareable
from bapo_megatron.runtime.distributed import all_gather, broadcast_from_main, on_all_ranks

T = TypeVar("T")

_MOST_FAILURES = 2
"""An engine that so many times in a row did not get its weights by handles gets them by disk for a while."""

_PAUSE = 20
"""Hand-overs until such an engine is tried again."""


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

    def confirm_weights(self, names: Sequence[str], version: int, sent: SentDigests | None) -> list[str]:
        """Compare the digests of engines that have all weights of ``version`` with those ``sent``."""


class IpcSync:
    """The ``WeightSync`` (see interfaces.py) of colocated engines, which get the weights when they wake.

    ``push`` notes that there are new weights. ``hand_over``, and ``write`` for engines that it left out, come
    when the GPUs change hands (``trainer/gpu_handover.py``). All are collective.
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
        """``engines`` and ``gpus``, those of each engine by its name, are rank 0's. ``make_digester``: of
        what engines must report; None: nothing is compared."""
        self._make_digester = make_digester if engines is not None else None
        self._disk, self._engines, self._gpus, self._on_event = disk, engines, gpus, on_event
        self._device = device
        if device.type == "cpu":
            remove_leftovers()
        empty = partial(shareable, device=device)
        self._buckets = Buckets(int(bucket_mb * 2**20), device, empty)
        self._failures = Counter[str]()
        """How often in a row an engine went without, less than nothing where it is not to be tried. Equal on
        all ranks."""
        self._step = 0

    def push(self, policy: Policy, step: int) -> None:
        """Note that ``step`` has made the weights that engines are to wake with."""
        self._step = step
        self._disk.discard()
        self._call_engines(lambda engines: engines.expect_handles(policy.version, step))

    def write(self, policy: Policy) -> None:
        """Write the weights to disk, for engines that load them from there."""
        self._disk.push(policy, self._step)

    def takers(self, names: Sequence[str]) -> list[str]:
        """Those of the engines that are to get the weights by handles."""
        return [name for name in names if self._failures[name] >= 0]

    def hand_over(self, policy: Policy, names: Sequence[str]) -> list[str]:
        """Give the weights to sleeping engines; the names of those that have them, on every rank.

        They do not sample yet. The others must be ended.
        """
        try:
            taken = self._hand_over(policy, names)
        except Exception as error:  # whatever it is, there is another way
            taken = []
            self._record_event({"kind": "handover_failed", "version": policy.version, "reason": str(error)})
        for name in self._failures:
            self._failures[name] += self._failures[name] < 0
        for name in names:
            self._failures[name] = 0 if name in taken else self._failures[name] + 1
            if self._failures[name] == _MOST_FAILURES:
                self._failures[name] = -_PAUSE
                self._record_event(
                    {"kind": "handover_given_up", "engine": name, "reason": "its weights go by disk"}
                )
        return taken

    def _hand_over(self, policy: Policy, names: Sequence[str]) -> list[str]:
        going = self._call_engines(lambda engines: engines.begin_wake(names))
        if not going:
            return []
        readers = self._readers(going)
        weights = policy.hf_weights()
        try:
            watched = DigestingIterator(weights, self._make_digester)
            lent = _handles_by_bucket(self._buckets.cut(self._disk.checked(iter(watched))), readers)
            while going and (found := on_all_ranks(lambda: next(lent, None)))[0] is not None:
                handles = {reader: one for some in found for reader, one in (some or {}).items()}
                going = self._call_engines(partial(self._deliver, going, handles))
            if not going:
                return []
            return self._call_engines(
                lambda engines: engines.confirm_weights(going, policy.version, watched.sent())
            )
        finally:
            self._buckets.release()
            for _ in weights:  # the other ranks take part in the gathering
                pass

    def _record_event(self, event: dict[str, Any]) -> None:
        """Record an event. All ranks raise if rank 0 cannot."""
        on_all_ranks(lambda: self._on_event(event))

    def _deliver(
        self, names: Sequence[str], handles: Mapping[_Reader, bytes], engines: HandleReceivers
    ) -> list[str]:
        """Send the engines their processes' handles; the names of those that took them."""
        return engines.receive_handles(
            {name: [handles[name, index] for index in range(len(self._gpus[name]))] for name in names}
        )

    def _call_engines(self, call: Callable[[HandleReceivers], T]) -> T:
        """What rank 0's ``call`` returns, on every rank; all raise if it fails."""
        engines = self._engines
        found: list[Any] = on_all_ranks(lambda: call(engines) if engines is not None else None)
        return found[0]  # type: ignore[no-any-return]

    def _readers(self, names: Sequence[str]) -> list[_Reader]:
        """The engines' processes that read this rank's memory: those on its GPU, or on a CPU of its number.

        ConfigError, on every rank, if a GPU of an engine has no rank.
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
    """Handles of one bucket after the other, for each of the ``readers`` of its own.

    The memory of a bucket lasts until the next but one is asked for. All processes of an engine have read it
    when they have answered for the next one: one may answer for the others before they are done.
    """
    before: Bucket | None = None
    for bucket in buckets:
        yield {reader: handles_of(bucket.tensors()) for reader in readers}
        before = bucket
    del before
