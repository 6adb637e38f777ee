"""An engine of a user's own, chosen by `rollout.engine=tests.support.plain_engine:PlainBackend`.

It makes one forward pass for each token, between two turns of the sampler's event loop, without a cache.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bapo_megatron.config import EngineConfig, RolloutConfig, RunConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.interfaces import Confirm, Engine
from bapo_megatron.rollout.engines.backend import EngineBackend
from bapo_megatron.rollout.engines.local_decoding import draws_R, sample
from bapo_megatron.rollout.engines.requests import check_request, limits_of
from bapo_megatron.types import FinishReason, GenerateRequest, Generation


@dataclass(frozen=True)
class PlainConfig(EngineConfig):
    """Settings of `PlainBackend`, for `rollout.custom_engine`."""

    copies: int = 1
    """Engines, each with a model of its own."""


class PlainBackend(EngineBackend):
    """Some plain engines in the sampler's process."""

    def check(self, rollout: RolloutConfig, gpus: int = 0, training: int = 0) -> None:
        if _settings(rollout).copies < 1:
            raise ConfigError("rollout.custom_engine.copies must be at least 1")

    async def open(
        self, config: RunConfig, urls: Sequence[str], device: str, opened: AsyncExitStack
    ) -> list[Engine]:
        copies = _settings(config.rollout).copies
        return [PlainEngine(config.model.hf_path, f"plain-{number}") for number in range(copies)]


def _settings(rollout: RolloutConfig) -> PlainConfig:
    settings = rollout.engine_config
    return settings if isinstance(settings, PlainConfig) else PlainConfig()


class PlainEngine:
    """A Hugging Face model behind `interfaces.Engine`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._limits = limits_of(folder)
        self._version, self._aborts = 0, 0

    async def generate(self, request: GenerateRequest) -> Generation:
        check_request(request, self._limits)
        params, begun_at, reason = request.params, self._aborts, "length"
        ids, found = request.input_ids.tolist(), []
        for draw in draws_R(request):
            await asyncio.sleep(0)
            if self._aborts != begun_at:
                reason = "abort"
                break
            token, log_prob = self._next(ids, params.temperature, draw)
            found.append((token, log_prob, self._version))
            ids.append(token)
            if token in params.stop_token_ids:
                reason = "stop"
                break
        return _generation(request.request_id, found, reason)

    @torch.inference_mode()
    def _next(self, ids: list[int], temperature: float, draw: float) -> tuple[int, float]:
        logits_1V = self._model(torch.tensor([ids])).logits[:, -1]
        token, log_prob = sample(logits_1V, torch.tensor([temperature]), torch.tensor([draw]))
        return int(token), float(log_prob)

    async def abort(self) -> None:
        self._aborts += 1

    async def load(self, folder: Path, version: int, confirm: Confirm) -> None:
        weights, digest = {}, hashlib.sha256()
        for path in sorted(folder.glob("*.safetensors")):
            weights |= load_file(path)
            digest.update(path.read_bytes())
        await confirm(digest.hexdigest())
        self._model.load_state_dict(weights, strict=False)  # tied weights come once
        self._version = version

    async def weight_version(self) -> int:
        return self._version

    async def is_alive(self) -> bool:
        return True

    async def close(self) -> None: ...


def _generation(request_id: str, found: Sequence[tuple[int, float, int]], reason: FinishReason) -> Generation:
    tokens, log_probs, versions = zip(*found, strict=True) if found else ((), (), ())
    return Generation(
        np.array(tokens, np.int32),
        np.array(log_probs, np.float32),
        np.array(versions, np.int32),
        request_id=request_id,
        finish_reason=reason,
    )
