"""The ``local`` engine: a Hugging Face model in this process as an async ``interfaces.Engine``.

``LocalEngine(LocalModel(hf_path, max_batch))`` serves any causal language model of transformers; it is meant
for small ones. Requests that wait when the model becomes free are decoded together. Tokens depend on the
request (seed, prefix), the weights and, through rounding in matrix products, the batch. As
``LocalBackend.rounds`` fixes the batches, a run without overlap is reproducible.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import read_model_shape, read_text_config
from bapo_megatron.hf.fp8 import is_quantized
from bapo_megatron.hf.parameter_map import expert_tensors
from bapo_megatron.hf.reader import HfReader
from bapo_megatron.hf.weight_stream import checked_weights
from bapo_megatron.interfaces import Confirm
from bapo_megatron.rollout.engines.local_decoding import Decoding, RouteRecorder
from bapo_megatron.rollout.engines.requests import ModelLimits, check_request, empty_generation
from bapo_megatron.runtime.device import choose_vector_kernels
from bapo_megatron.runtime.files import check_files_inside
from bapo_megatron.types import GenerateRequest, Generation

_BODY = "model."


class LocalEngine:
    """``Engine`` with a ``LocalModel``, which computes in threads. Construct it inside the event loop. If a
    folder has wrong weights, ``load`` raises and the old ones stay. After ``close``, ``generate`` raises."""

    name = "local"

    def __init__(self, model: LocalModel) -> None:
        self._model = model
        self._waiting: list[tuple[GenerateRequest, asyncio.Future[Generation]]] = []
        self._requests_waiting = asyncio.Event()
        self._runner = asyncio.create_task(self._run())
        self._closed = False

    async def weight_version(self) -> int:
        return self._model.weight_version

    async def is_alive(self) -> bool:
        return True  # the engine is this process

    async def generate(self, request: GenerateRequest) -> Generation:
        if self._closed:
            raise RuntimeError("the engine is closed")
        check_request(request, self._model.limits)
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        self._requests_waiting.set()
        return await answer

    async def abort(self) -> None:
        """Abort all requests: running ones return their tokens so far, queued ones none."""
        waiting, self._waiting = self._waiting, []
        await asyncio.to_thread(self._model.abort)
        for request, answer in waiting:
            if not answer.done():
                answer.set_result(empty_generation(request))

    async def load(self, folder: Path, version: int, confirm: Confirm) -> None:
        staged = await asyncio.to_thread(lambda: self._model.stage(_weights_in(folder)))
        await confirm(await asyncio.to_thread(_digest, staged))
        await asyncio.to_thread(self._model.commit, staged, version)

    async def close(self) -> None:
        self._closed = True
        await self.abort()
        await asyncio.to_thread(self._model.close)
        self._runner.cancel()

    async def _run(self) -> None:
        while True:
            await self._requests_waiting.wait()
            self._requests_waiting.clear()
            batch, self._waiting = self._waiting, []
            requests = [request for request, _ in batch]
            try:
                generations = await asyncio.to_thread(self._model.generate, requests)
            except Exception as error:  # any error: the waiting callers must get it
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), generation in zip(batch, generations, strict=True):
                if not answer.done():
                    answer.set_result(generation)


def _weights_in(folder: Path) -> Iterator[tuple[str, Tensor]]:
    reader, (family, _) = HfReader(folder), read_text_config(folder)
    trained = (name for name in reader.names if not name.startswith(family.untrained))
    yield from ((name, reader.read(name)) for name in trained)


def _digest(weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


class LocalModel:
    """Blocking, thread-safe model of ``LocalEngine``: ``generate`` decodes requests in batches; ``stage`` and
    ``commit`` replace the weights between two tokens. Each decode step holds the lock ``_gate``. ``commit``
    sets a flag, then takes the lock, and decoding waits while the flag is set; otherwise the decoding thread
    would retake the lock before the waiter wakes up."""

    def __init__(
        self,
        hf_path: Path,
        max_batch: int,
        dtype: Literal["float32", "bfloat16"] = "float32",
        device: str = "cpu",
    ) -> None:
        """Load the folder ``hf_path`` as version 0. ``max_batch``: most requests decoded together."""
        choose_vector_kernels()
        self._model = _load(hf_path, dtype, device)
        vocabulary = self._model.get_input_embeddings().num_embeddings
        self.limits = ModelLimits(vocabulary, self._model.config.max_position_embeddings)
        family, _ = read_text_config(hf_path)
        self._weights = ModelWeights(self._model, family.body)
        if is_quantized(hf_path):
            self._weights.commit(self._weights.stage(_weights_in(hf_path)))
        self._recorder = RouteRecorder(self._model)
        self._max_batch = max_batch
        self.weight_version = 0
        self._gate = threading.Condition()
        self._call_lock = threading.Lock()
        self._update_waits = False
        self._abort_ticket = object()

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Return the answers to valid requests, in order; after ``abort`` with the tokens so far."""
        ticket = self._abort_ticket
        # Sorting by length reduces padding.
        order = sorted(range(len(requests)), key=lambda index: len(requests[index].input_ids))
        answers: dict[int, Generation] = {}
        with self._call_lock:
            for start in range(0, len(order), self._max_batch):
                chunk = order[start : start + self._max_batch]
                answers.update(zip(chunk, self._decode([requests[i] for i in chunk], ticket), strict=True))
        return [answers[index] for index in range(len(requests))]

    def _decode(self, requests: Sequence[GenerateRequest], ticket: object) -> list[Generation]:
        decoding = Decoding(self._model, requests, self._recorder)
        while not decoding.done and self._step(decoding, ticket):
            pass
        return decoding.results()

    def _step(self, decoding: Decoding, ticket: object) -> bool:
        """Make one decode step; returns False, without a step, if the call was aborted."""
        with self._gate:
            self._gate.wait_for(lambda: not self._update_waits)
            if self._abort_ticket is not ticket:
                return False
            decoding.step(self.weight_version)
        return True

    def abort(self) -> None:
        """End the calls of ``generate`` in progress before their next step."""
        self._abort_ticket = object()

    def stage(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return a checked copy of new weights for ``commit``, as in ``ModelWeights.stage``."""
        return self._weights.stage(weights)

    def commit(self, staged: dict[str, Tensor], version: int) -> None:
        """Replace the weights between two tokens; requests in flight keep their KV cache."""
        self._update_waits = True
        with self._gate:
            self._update_waits = False
            self._weights.commit(staged)
            self.weight_version = version
            self._gate.notify_all()

    def close(self) -> None:
        self.abort()
        with self._call_lock:
            self._model = None
            self._weights.release()


class ModelWeights:
    """Parameters of a Hugging Face model, by their names in its folder; tied ones count once. ``stage``
    returns a checked copy of a complete set, ``commit`` writes it into the model. ``LocalModel`` locks."""

    def __init__(self, model: Any, body: str = _BODY) -> None:
        """``body``: prefix of names in the folder, in place of the text model's prefix in transformers."""

        def named(**options: bool) -> dict[str, Tensor]:
            every = model.named_parameters(**options)
            return {name.replace(_BODY, body, 1): tensor for name, tensor in every}

        parameters = named()
        names = {id(tensor): name for name, tensor in parameters.items()}
        every = named(remove_duplicate=False)
        self._aliases = {name: names[id(every[name])] for name in every.keys() - parameters.keys()}
        self._own: dict[str, Tensor] = {}
        for name, tensor in parameters.items():
            # Experts arrive one by one, but transformers fuses them: each is a view of the fused tensor.
            experts = expert_tensors(name, tensor.shape)
            self._own |= {own: tensor.detach()[place] for own, place in experts.items()} or {name: tensor}

    def stage(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copy weights to the model's dtype and device. Raises ValueError unless names and shapes match."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self._own.items()}
        return {
            name: tensor.detach().to(self._own[name].device, self._own[name].dtype, copy=True)
            for name, tensor in checked_weights(weights, shapes, self._aliases)
        }

    @torch.no_grad()
    def commit(self, staged: dict[str, Tensor]) -> None:
        for name, tensor in staged.items():
            self._own[name].copy_(tensor)

    def release(self) -> None:
        self._own.clear()


def _load(hf_path: Path, dtype: str, device: str) -> Any:
    check_files_inside(hf_path)
    transformers_logging.disable_progress_bar()
    if is_quantized(hf_path):
        # Our reader loads the weights later, as for the policy: transformers would build fp8 layers on a GPU
        # and, elsewhere, cut the blocks of some shapes differently.
        read_model_shape(hf_path)
        config = AutoConfig.from_pretrained(hf_path, local_files_only=True, trust_remote_code=False)
        del config.quantization_config
        empty = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), trust_remote_code=False)
        return empty.to(device).eval()
    HfReader(hf_path)  # checks the files: transformers would load tensors that the index leaves out
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            hf_path,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.hf_path={hf_path}: cannot be loaded: {error}") from error
    if report["missing_keys"]:  # transformers would continue with random numbers
        raise ConfigError(f"model.hf_path={hf_path}: weights are missing: {sorted(report['missing_keys'])}")
    return model.to(device).eval()
