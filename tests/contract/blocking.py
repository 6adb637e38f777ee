"""A blocking engine for synchronous tests: an event loop in a thread, and calls that wait for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from bapo_megatron.interfaces import Engine, ReceivesHandles, ReleasesMemory
from bapo_megatron.rollout.engines.sglang.engine import SglangEngine
from bapo_megatron.rollout.weight_sync.buckets import Buckets
from bapo_megatron.rollout.weight_sync.ipc import handles_of, shareable
from bapo_megatron.types import GenerateRequest, Generation, WeightPart
from tests.support.models import SingleWriter

T = TypeVar("T")


class BlockingEngine:
    """The engine that ``make`` gives, for any thread. ``folder``: its model; ``staging``: for weights."""

    def __init__(self, make: Callable[[], Awaitable[Engine]], folder: Path, staging: Path) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.engine = self._wait(_awaited(make))
        self._staging = SingleWriter(staging, folder)
        self.weight_version = self._wait(self.engine.weight_version())
        self._closed = False
        self.tensor = 1
        """Tensor-parallel ranks of its server."""
        self.digests: list[str] = []
        """Of all weights that it took over."""
        self.awake = True
        """False from a release of memory until a wake has succeeded."""

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Answer every request, in order."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        return self._wait(self._generate(requests))

    def begin(self, requests: Sequence[GenerateRequest]) -> Future[list[Generation]]:
        """Send every request, before any other that is sent later; their answers come."""
        return asyncio.run_coroutine_threadsafe(self._generate(requests), self._loop)

    def abort(self) -> None:
        self._wait(self.engine.abort())

    def resume(self) -> None:
        assert isinstance(self.engine, SglangEngine)
        self._wait(self.engine.server.resume())

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Through a folder, as in a run."""
        folder = self._staging.write(weights, version)
        self._wait(self.engine.load(folder, version, self._confirm))
        self.weight_version = self._wait(self.engine.weight_version())

    def release_memory(self) -> None:
        self.awake = False
        self._wait(self._releasing.release_memory())

    def wake(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """With weights from a folder, as in a run."""
        folder = self._staging.write(weights, version)
        self._wait(self._releasing.wake(folder, version, self._confirm))
        self.awake = True
        self.weight_version = self._wait(self.engine.weight_version())

    def wake_by_handles(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """With weights that the server reads from this process's memory, bucket by bucket."""
        device = torch.device("cpu")
        buckets = Buckets(10_000, device, partial(shareable, device=device))

        async def parts() -> AsyncIterator[WeightPart]:
            for bucket in buckets.cut(weights):
                yield [handles_of(bucket.tensors())] * self.tensor
                bucket.payload_B.fill_(255)  # it was read

        self._wait(self._receiving.wake(parts(), version, self._confirm))
        self.awake = True
        self.weight_version = self._wait(self.engine.weight_version())

    def is_alive(self) -> bool:
        return self._wait(self.engine.is_alive())

    @property
    def _releasing(self) -> ReleasesMemory:
        assert isinstance(self.engine, ReleasesMemory)
        return self.engine

    @property
    def _receiving(self) -> ReceivesHandles:
        assert isinstance(self.engine, ReceivesHandles)
        return self.engine

    async def _confirm(self, digest: str) -> None:
        self.digests.append(digest)

    def close(self) -> None:
        """Abort what runs, and close."""
        self._closed = True
        self._wait(self.engine.abort())
        self._wait(self.engine.close())

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        return list(await asyncio.gather(*(self.engine.generate(request) for request in requests)))


async def _awaited(make: Callable[[], Awaitable[Engine]]) -> Engine:
    return await make()
