"""Stand-in receiver of a weight broadcast: a process that makes SGLang 0.5.23's torch.distributed calls.

It replaces a server whose start would take too long. Commands arrive through a pipe instead of HTTP; the
calls and their order are SGLang's.
"""

from __future__ import annotations

import multiprocessing
import threading
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from bapo_megatron.types import BroadcastGroup, BucketSpec


class ReceiverProcess:
    """Handle of a receiver process. Methods that return a future start an operation in it."""

    def __init__(self, keep: bool = False, method: Literal["spawn", "fork"] = "spawn") -> None:
        """``keep``: store received tensors for ``weights``. ``method``: of its start."""
        self._pipe, remote = multiprocessing.Pipe()
        context: Any = multiprocessing.get_context(method)
        self.process = context.Process(target=_serve, args=(remote, keep), daemon=True)
        self.process.start()
        remote.close()
        self._one = threading.Lock()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def stop(self) -> None:
        self.process.kill()
        self.process.join()

    def join(self, group: BroadcastGroup, rank: int) -> Future[None]:
        """Join the sender's process group."""
        return self._ask("join", group, rank)

    def leave(self) -> Future[None]:
        """Leave the sender's process group."""
        return self._ask("leave")

    def receive(self, bucket: BucketSpec) -> Future[None]:
        """Receive one bucket."""
        return self._ask("receive", bucket)

    def receive_raw(self, sizes: list[int], reuse: bool) -> Future[None]:
        """Receive a message of each size, into one buffer (``reuse``) or each into new memory."""
        return self._ask("receive_raw", sizes, reuse)

    def weights(self) -> Future[dict[str, Tensor]]:
        """Return the stored weights and clear them."""
        return self._ask("weights")

    def _ask(self, what: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def ask() -> None:
            try:
                with self._one:
                    self._pipe.send((what, arguments))
                    answer = self._pipe.recv()
            except (EOFError, OSError) as error:
                future.set_exception(RuntimeError(f"the receiver is gone: {error}"))
                return
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

        threading.Thread(target=ask, daemon=True).start()
        return future


def _serve(pipe: Any, keep: bool) -> None:
    torch.set_num_threads(1)
    receiver = _Receiver(keep)
    while True:
        try:
            what, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = getattr(receiver, what)(*arguments)
        except Exception as error:
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        pipe.send(answer)


class _Receiver:
    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._kept: dict[str, Tensor] = {}
        self._group: Any = None
        self._name = ""

    def join(self, group: BroadcastGroup, rank: int) -> None:
        size, timeout = group.world_size, timedelta(minutes=30)
        meeting = c10d.rendezvous(f"tcp://{group.address}:{group.port}", rank, size, timeout=timeout)
        store, _, _ = next(meeting)
        store.set_timeout(timeout)
        self._group, _ = c10d._new_process_group_helper(
            size,
            rank,
            [],
            c10d.Backend(group.backend),
            c10d.PrefixStore(group.name, store),
            group_name=group.name,
            timeout=timeout,
        )
        c10d._world.pg_group_ranks[self._group] = {number: number for number in range(size)}

    def leave(self) -> None:
        dist.destroy_process_group(self._group)
        self._group = None

    def receive(self, bucket: BucketSpec) -> None:
        memory_B = torch.empty(bucket.nbytes, dtype=torch.uint8)
        dist.broadcast(memory_B, src=0, group=self._group)
        start = 0
        for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
            kind = getattr(torch, dtype)
            end = start + torch.Size(shape).numel() * kind.itemsize
            tensor = memory_B[start:end].view(kind).reshape(shape)
            start = end
            if self._keep:
                self._kept[name] = tensor.clone()

    def receive_raw(self, sizes: list[int], reuse: bool) -> None:
        memory_B = torch.empty(max(sizes), dtype=torch.uint8)
        for size in sizes:
            if not reuse:
                memory_B = torch.empty(size, dtype=torch.uint8)
            dist.broadcast(memory_B[:size], src=0, group=self._group)

    def weights(self) -> dict[str, Tensor]:
        weights, self._kept = self._kept, {}
        return weights
