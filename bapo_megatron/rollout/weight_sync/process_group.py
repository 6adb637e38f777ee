"""The process group of a weight broadcast: this run is rank 0, the inference engines are the other ranks.

It is separate from the trainer's own groups. Its calls, for ``broadcast.py``, return futures: what may block
on a receiver runs in threads, so that the caller can time out. gloo ends a wait at the group's timeout. NCCL
waits for ever in a kernel, so the thread enforces a deadline, and aborts the group. Used by ``broadcast.py``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from bapo_megatron.runtime.distributed import bound_store
from bapo_megatron.types import BroadcastGroup

T = TypeVar("T")


def in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Run ``call`` in a daemon thread; returns its future."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class SendingGroup:
    """The sender's side of a broadcast group: its rendezvous store, and the group once all have joined.

    In order: ``form`` (the receivers join meanwhile), any number of ``broadcast``s one after the other,
    ``close``. An error is raised by the future of its call. Made by ``WeightBroadcast.open``.
    """

    def __init__(self, address: str, name: str, receivers: int, device: torch.device, timeout_s: float):
        """Open the rendezvous store at a free port. ``address``: of this machine, as the receivers reach it.

        ``receivers``: number of the other ranks. ``timeout_s``: longest wait for all to join, and for one
        broadcast.
        """
        timeout = timedelta(seconds=timeout_s)
        # Made here and not by an init method: under torchrun those would join the agent's store instead.
        self._store = bound_store(address, 0, None, timeout)
        backend = "nccl" if device.type == "cuda" else "gloo"
        self.place = BroadcastGroup(address, self._store.port, name, receivers + 1, backend)
        self._device, self._timeout_s = device, timeout_s
        self._group: dist.ProcessGroup | None = None
        self._closing = threading.Event()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def form(self) -> Future[None]:
        """Form the group; done when all ranks have joined."""
        return in_thread(self._form, "weights-form")

    def broadcast(self, payload_B: Tensor) -> Future[None]:
        """Broadcast the payload; done when it may be overwritten, perhaps before all receivers have it."""
        # Recorded here, not in the thread: the sending stream must wait for the caller's copies.
        ready = torch.cuda.current_stream(self._device).record_event() if self._stream else None
        return in_thread(lambda: self._broadcast(payload_B, ready), "weights-broadcast")

    def close(self) -> Future[None]:
        """Close the group, also during a broadcast: receivers that wait for its data fail."""
        self._closing.set()  # first: a broadcast that waits, and a group that still forms, look at it
        return in_thread(self._close, "weights-close")

    def _form(self) -> None:
        place = self.place
        with _without_nccl_watchdog() if self._stream else nullcontext():
            group, _ = c10d._new_process_group_helper(
                place.world_size,
                0,
                [],  # ranks of no other group
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
            work.wait()  # blocks the stream, not this thread
            sent = self._stream.record_event()
        deadline = time.monotonic() + self._timeout_s
        while not sent.query():
            if self._closing.is_set():
                raise RuntimeError("the group was closed")
            if time.monotonic() > deadline:
                # Not left to the caller, which may itself wait for GPU work that is queued behind this.
                group.abort()
                raise TimeoutError(f"the broadcast did not end within {self._timeout_s:g} s")
            time.sleep(0.001)

    def _close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            end = c10d._abort_process_group if self._stream else dist.destroy_process_group
            end(group)


@contextmanager
def _without_nccl_watchdog() -> Iterator[None]:
    """Disable NCCL's watchdog for a group that is made within the block: it would kill this process when a
    receiver dies. A group reads the variable when it is made."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
