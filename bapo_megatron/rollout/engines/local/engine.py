"""The ``local`` engine: the embedded Hugging Face model behind ``interfaces.Engine``, with request batching.

Requests that arrive in one turn of the event loop, while no batch is computed, are one batch. With the rounds
of ``LocalBackend`` a run without overlap always forms the same batches and samples the same tokens. Used by
``backend.py``.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from bapo_megatron.hf.fp8 import is_quantized
from bapo_megatron.interfaces import Confirm
from bapo_megatron.rollout.engines.local.model import LocalModel, weights_of_fp8
from bapo_megatron.rollout.engines.requests import check_request, empty_generation
from bapo_megatron.types import GenerateRequest, Generation

T = TypeVar("T")


class LocalEngine:
    """The ``Engine`` of a ``LocalModel``, which computes in threads. Make it inside the event loop.

    A folder with wrong weights leaves it as it was. RuntimeError for a request after ``close``. Made by
    ``LocalBackend``.
    """

    name = "local"

    def __init__(self, model: LocalModel) -> None:
        self._model = model
        self._waiting: list[tuple[GenerateRequest, asyncio.Future[Generation]]] = []
        self._requests_waiting = asyncio.Event()
        self._threads = ThreadPoolExecutor(thread_name_prefix="local-engine")
        self._runner = asyncio.create_task(self._run())
        self._closed = False

    async def weight_version(self) -> int:
        """The version of the weights that were loaded last."""
        return self._model.weight_version

    async def is_alive(self) -> bool:
        """True: the engine is this process."""
        return True

    async def generate(self, request: GenerateRequest) -> Generation:
        """Queue one request, and await its answer. ValueError, before it is queued, if it is malformed."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        check_request(request, self._model.limits)
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        self._requests_waiting.set()
        return await answer

    async def abort(self) -> None:
        """Abort the requests: those in flight return their tokens so far, those in the queue none."""
        waiting, self._waiting = self._waiting, []
        await self._in_thread(self._model.abort)
        for request, answer in waiting:
            if not answer.done():
                answer.set_result(empty_generation(request))

    async def pause(self) -> None:
        """Stop sampling at the next token boundary. Requests in flight keep their place."""
        await self._in_thread(self._model.pause)

    async def resume(self) -> None:
        """Resume sampling after ``pause``."""
        await self._in_thread(self._model.resume)

    async def load(self, folder: Path, version: int, confirm: Confirm) -> None:
        """Load the weights of an HF folder between two tokens. Requests in flight continue under them."""
        # Staged, confirmed, then committed: a folder with wrong weights leaves the model as it was.
        staged = await self._in_thread(lambda: self._model.stage(_weights_in(folder)))
        await confirm(await self._in_thread(partial(_digest, staged)))
        await self._in_thread(partial(self._model.commit, staged, version))

    async def close(self) -> None:
        """Abort all requests and release the model."""
        self._closed = True
        await self.abort()
        await self._in_thread(self._model.close)
        self._runner.cancel()

    async def _run(self) -> None:
        while True:
            await self._requests_waiting.wait()
            self._requests_waiting.clear()
            batch, self._waiting = self._waiting, []
            requests = [request for request, _ in batch]
            try:
                found = await self._in_thread(partial(self._model.generate, requests))
            except Exception as error:  # of any kind: the waiting callers must get it
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), generation in zip(batch, found, strict=True):
                if not answer.done():
                    answer.set_result(generation)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def _weights_in(folder: Path) -> Iterator[tuple[str, Tensor]]:
    if is_quantized(folder):  # of bapo eval and --rollout-only; a run's own folders are in bfloat16
        yield from weights_of_fp8(folder)
        return
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def _digest(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of the weights' names and bytes."""
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        found.update(name.encode())
        found.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()
