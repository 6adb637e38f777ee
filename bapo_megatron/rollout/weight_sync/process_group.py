"""Rank 0 of a process group whose other ranks are outside this run: the receivers of weights.

The group stands beside the trainer's own. Whatever may block on a receiver happens in a thread of its own,
so that the caller can stop waiting. gloo ends a wait at the group's timeout. NCCL waits for ever in a
kernel, so there the thread watches the clock and aborts the group.
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
    """``call`` in a thread that the end of the program does not wait for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class SendingGroup:
    """The meeting point and, once all have joined, the group."""

    def __init__(self, address: str, name: str, receivers: int, device: torch.device, timeout_s: float):
        """Listen at a free port. ``address``: this machine, as the receivers reach it.

        ``receivers``: how many ranks there are besides this one. ``timeout_s``: the longest wait for all to
        join, and for one broadcast.
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
        """Done when all have joined."""
        return in_thread(self._form, "weights-form")

    def broadcast(self, payload_B: Tensor) -> Future[None]:
        """Done when the payload may be overwritten; the receivers may not have all of it yet."""
        ready = torch.cuda.current_stream(self._device).record_event() if self._stream else None
        return in_thread(lambda: self._broadcast(payload_B, ready), "weights-broadcast")

    def close(self) -> Future[None]:
        """End the group, also in the middle of a broadcast; receivers that wait for its data fail."""
        self._closing.set()
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
        if self._closing.is_set():  # the last one joined too late
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
            work.wait()  # the stream waits, not this thread
            sent = self._stream.record_event()
        deadline = time.monotonic() + self._timeout_s
        while not sent.query():
            if self._closing.is_set():
                raise RuntimeError("the group was closed")
            if time.monotonic() > deadline:
                group.abort()  # not left to the caller, who may wait for work of the GPU that is behind this
                raise TimeoutError(f"the broadcast did not end within {self._timeout_s:g} s")
            time.sleep(0.001)

    def _close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            end = c10d._abort_process_group if self._stream else dist.destroy_process_group
            end(group)


@contextmanager
def _without_nccl_watchdog() -> Iterator[None]:
    """NCCL's watchdog ends a process whose receiver is gone; a group reads this variable when it is made."""
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
