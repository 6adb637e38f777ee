"""Weight sync by broadcast (NCCL on GPUs, gloo on a CPU): the sending side, on trainer rank 0.

``BroadcastSync`` is the ``WeightSync`` of ``sync=broadcast`` (``config/transports.py``). Every
tensor-parallel rank of every engine receives (``rollout/engines/weight_updates.py``), in a process group
separate from the trainer's own. Control calls go through the sampler process and HTTP; each returns a future
that is done when all engines have answered. If a broadcast fails, disk sync sends the weights.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from bapo_megatron.config import EngineConfig
from bapo_megatron.errors import printable
from bapo_megatron.interfaces import Policy
from bapo_megatron.rollout.engines.sent_weights import DigestingIterator
from bapo_megatron.rollout.weight_sync.buckets import Bucket, Buckets
from bapo_megatron.rollout.weight_sync.disk import SenderParts
from bapo_megatron.runtime.distributed import bound_store, broadcast_from_main
from bapo_megatron.runtime.http import LOOPBACK
from bapo_megatron.types import BroadcastGroup, BucketSpec

if TYPE_CHECKING:
    from bapo_megatron.rollout.sampler.client import SamplerClient

T = TypeVar("T")
StartCall = Callable[[T], "Future[Any]"]
"""A non-blocking call to all engines; its future is done when all have answered or one has failed."""

_GROUP_NAME = "bapo_weights"
_ERROR_GRACE_S = 2.0


class BroadcastError(RuntimeError):
    """A broadcast failed or could not begin; the process group, if any, is closed. ``BroadcastSync`` catches
    it and falls back to disk, because some engines may have partial weights."""


def _in_thread(call: Callable[[], T], name: str) -> Future[T]:
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class SendingGroup:
    """The sender's side of a broadcast group: rendezvous store, and process group once all have joined.

    Call order: ``form`` while the receivers join, sequential ``broadcast``s, ``close``. Each may block on a
    receiver, so it runs in a thread and returns a future. gloo stops waiting at the group's timeout; NCCL
    waits forever in a kernel, so the thread enforces a deadline and aborts the group.
    """

    def __init__(self, address: str, name: str, receivers: int, device: torch.device, timeout_s: float):
        """Open the rendezvous store at a free port. ``address``: this machine, as receivers reach it.
        ``receivers``: number of other ranks. ``timeout_s``: maximum wait for all to join, and per message."""
        timeout = timedelta(seconds=timeout_s)
        # Under torchrun, an init method would join the agent's store instead.
        self._store = bound_store(address, 0, None, timeout)
        backend = "nccl" if device.type == "cuda" else "gloo"
        self.place = BroadcastGroup(address, self._store.port, name, receivers + 1, backend)
        self._device, self._timeout_s = device, timeout_s
        self._group: dist.ProcessGroup | None = None
        self._closing = threading.Event()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def form(self) -> Future[None]:
        """Form the group; the future is done when all ranks have joined."""
        return _in_thread(self._form, "weights-form")

    def broadcast(self, payload_B: Tensor) -> Future[None]:
        """Broadcast the payload, which may be overwritten once the future is done."""
        # Recorded in the caller's thread, because the sending stream must wait for the caller's copies.
        ready = torch.cuda.current_stream(self._device).record_event() if self._stream else None
        return _in_thread(lambda: self._broadcast(payload_B, ready), "weights-broadcast")

    def close(self) -> Future[None]:
        """Close the group, even during a broadcast, which then fails."""
        self._closing.set()  # first, because pending broadcasts and forming groups check it
        return _in_thread(self._close, "weights-close")

    def _form(self) -> None:
        place = self.place
        with _without_nccl_watchdog() if self._stream else nullcontext():
            group, _ = c10d._new_process_group_helper(
                place.world_size,
                0,
                [],  # no ranks of another group
                c10d.Backend(place.backend),
                c10d.PrefixStore(place.name, self._store),
                group_name=c10d.GroupName(place.name),
                timeout=timedelta(seconds=self._timeout_s),
            )
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(place.world_size)}
        self._group = group
        if self._closing.is_set():  # the last rank joined too late
            self._close()

    def _broadcast(self, payload_B: Tensor, ready: torch.cuda.Event | None) -> None:
        group = self._group
        assert group is not None
        if self._stream is None or ready is None:
            dist.broadcast(payload_B, src=0, group=group)
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            work = dist.broadcast(payload_B, src=0, group=group, async_op=True)
            deadline = time.monotonic() + self._timeout_s
            while not work.is_completed():  # also true once NCCL has detected an error
                if self._closing.is_set():
                    raise RuntimeError("the group was closed")
                if time.monotonic() > deadline:
                    # Not left to the caller, which may itself wait for GPU work queued behind this.
                    group.abort()
                    raise TimeoutError(f"the broadcast did not end within {self._timeout_s:g} s")
                time.sleep(0.001)
            work.wait()  # raises that error and ends running work

    def _close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            end = c10d._abort_process_group if self._stream else dist.destroy_process_group
            end(group)


@contextmanager
def _without_nccl_watchdog() -> Iterator[None]:
    """Disable torch's NCCL watchdog for groups created within the block, by a variable that they read. When
    a receiver dies, the watchdog would kill this process, minutes after the disk sync: even with
    TORCH_NCCL_ASYNC_ERROR_HANDLING=0 it records the error for all groups (``shouldDump_`` in
    ProcessGroupNCCL.hpp), and the monitor of the trainer's own group then ends the process."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class WeightBroadcast:
    """Sender of weights on trainer rank 0: ``open`` a group once, then ``send`` each version. Calls block for
    at most their timeouts. An error, usually a BroadcastError, closes the group: ``open`` a new one."""

    def __init__(
        self,
        device: torch.device,
        address: str = "127.0.0.1",
        bucket_mb: float = 512,
        timeout_s: float = 120.0,
    ) -> None:
        """``device``: the weights' device, which selects NCCL or gloo. ``address``: this machine, as servers
        reach it. ``bucket_mb``: size of each of two buffers, in 2^20 bytes. ``timeout_s``: maximum wait for
        the group, and for sending and loading each bucket, the first with NCCL's connection setup."""
        self._device, self._address = device, address
        self._buckets = Buckets(int(bucket_mb * 2**20), device)
        self._timeout_s = timeout_s
        self._group: SendingGroup | None = None

    @property
    def is_open(self) -> bool:
        return self._group is not None

    def open(self, receivers: int, join: StartCall[BroadcastGroup]) -> None:
        """Form a process group with ``receivers`` other ranks. Raises BroadcastError if one cannot join."""
        self.close()
        group = SendingGroup(self._address, _GROUP_NAME, receivers, self._device, self._timeout_s)
        self._group = group
        try:
            # Concurrent: the group forms only when the servers join, and they join only when it forms.
            parts = {"the servers": join(group.place), "the group": group.form()}
        except BaseException:
            self._drop_group()
            raise
        self._wait_for(parts, self._deadline())

    def send(self, weights: Iterator[tuple[str, Tensor]], on_bucket: StartCall[BucketSpec]) -> None:
        """Broadcast all ``weights``. Raises BroadcastError on failure or timeout. Always exhausts the
        iterator, because other ranks take part in its all-gathers."""
        try:
            self._send(weights, on_bucket)
        except BaseException:
            self._drop_group()  # otherwise servers would wait for a broadcast that never comes
            raise
        finally:
            # CUDA's allocator caches the memory; on a CPU, reallocation takes as long as filling it.
            if self._device.type == "cuda":
                self._buckets.release()
            for _ in weights:
                pass

    def close(self) -> None:
        if closing := self._drop_group():
            self._wait_for({"the group": closing}, self._deadline())

    def _send(self, weights: Iterator[tuple[str, Tensor]], on_bucket: StartCall[BucketSpec]) -> None:
        if self._group is None:
            raise BroadcastError("there is no group: open one first")
        in_flight: Callable[[], None] | None = None
        for bucket in self._buckets.cut(weights):
            if in_flight:
                in_flight()
            in_flight = self._begin(bucket, on_bucket)
            if bucket.is_borrowed:  # the next all-gather overwrites its memory
                in_flight()
                in_flight = None
        if in_flight:
            in_flight()

    def _begin(self, bucket: Bucket, on_bucket: StartCall[BucketSpec]) -> Callable[[], None]:
        """Start to broadcast ``bucket``; return a function that waits until it is sent and loaded."""
        assert self._group is not None
        deadline = self._deadline()
        # Start both before waiting: a broadcast ends only when the servers take part in it.
        received = on_bucket(bucket.spec)
        parts = {"the servers": received, "the broadcast": self._group.broadcast(bucket.payload_B)}
        return lambda: self._wait_for(parts, deadline)

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s

    def _wait_for(self, parts: Mapping[str, Future[Any]], deadline: float) -> None:
        """Wait for all futures; on a failure or timeout, close the group and raise BroadcastError."""
        wait(parts.values(), max(0.0, deadline - time.monotonic()), FIRST_EXCEPTION)
        if all(_outcome(part) == "done" for part in parts.values()):
            return
        self._drop_group()
        # After one failure, the other future often fails too, with the server's name.
        wait(parts.values(), min(_ERROR_GRACE_S, max(0.0, deadline - time.monotonic())))
        raise BroadcastError("; ".join(f"{name}: {_outcome(part)}" for name, part in parts.items()))

    def _drop_group(self) -> Future[None] | None:
        group, self._group = self._group, None
        self._buckets.release()  # never reused: a hung broadcast still reads from them
        return None if group is None else group.close()


def sender_address(config: EngineConfig) -> str:
    """Return this sender's address as servers reach it: loopback if all of them are on this machine."""
    hosts = {urlsplit(url).hostname for url in config.urls}
    return config.address or ("127.0.0.1" if hosts <= {*LOOPBACK} else socket.gethostname())


class BroadcastSync:
    """``WeightSync`` by broadcast, with disk sync as fallback.

    ``push`` (collective) returns when the engines have the weights and their digests (hashes) match. A failed
    broadcast is a run event, not an error: all engines load from disk, and the next push forms a new group.
    """

    def __init__(self, parts: SenderParts) -> None:
        self._engines, self._disk, self._on_event = parts.client, parts.disk, parts.on_event
        self._make_digester, engine = parts.make_digester, parts.engine
        # Longer than the engines' timeout, because their error, which names the engine, must come first.
        timeout_s = 1.1 * 60 * engine.update_minutes
        address = sender_address(engine)
        self._broadcast = WeightBroadcast(parts.device, address, engine.bucket_mb, timeout_s)

    def push(self, policy: Policy, step: int) -> None:
        """Broadcast the weights to every engine that answers; if one fails, all load from disk."""
        failed, weights = None, policy.hf_weights()
        if self._engines is not None:
            failed = self._attempt(self._engines, weights, policy.version, step)
        # Even after a failure, because the other ranks wait in the same all-gathers.
        for _ in weights:
            pass
        # The disk sync is collective, but only rank 0 knows whether the broadcast failed.
        if broadcast_from_main(failed):
            self._disk.push(policy, step)

    def _attempt(
        self, engines: SamplerClient, weights: Iterator[tuple[str, Tensor]], version: int, step: int
    ) -> str | None:
        broadcast = self._broadcast
        try:
            ranks, are_joined = engines.submit("gather").result()
            if not ranks:
                raise BroadcastError("no engine answers that takes broadcasts")
            if not (are_joined and broadcast.is_open):
                broadcast.open(ranks, lambda group: engines.submit("join", group))
            # Sampling pauses until all digests match, so that no token comes from mixed weights.
            engines.submit("begin", version).result()
            watched = DigestingIterator(weights, self._make_digester)
            broadcast.send(iter(watched), lambda bucket: engines.submit("receive", bucket))
            engines.submit("confirm", watched.sent()).result()
            engines.submit("resume", version, step).result()
        except Exception as error:  # any kind: disk is the fallback
            reason = f"a broadcast of weights failed: {error}"
            # First, because the sampler handles one call at a time, and closing ends a pending `receive`.
            broadcast.close()
            engines.submit("fail", reason).exception()  # the disk sync restarts a dead sampler
            self._on_event({"kind": "broadcast_failed", "version": version, "reason": str(error)})
            print(printable(f"{reason}; falling back to disk"), flush=True)
            return reason
        return None


def _outcome(part: Future[Any]) -> str:
    if not part.done():
        return "not done in time"
    if part.cancelled():
        return "cancelled"
    error = part.exception()
    return f"{type(error).__name__}: {error}" if error else "done"
