"""The ``sglang`` backend: SGLang servers that the run starts, or that run already, and their clients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, AsyncExitStack

from bapo_megatron.config import RolloutConfig, RunConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.interfaces import Engine
from bapo_megatron.rollout.engines.backend import EngineBackend, EngineServers, OnEvent
from bapo_megatron.rollout.engines.requests import limits_of
from bapo_megatron.rollout.engines.sglang.engine import Deadlines, SglangEngine
from bapo_megatron.rollout.engines.sglang.http_client import HttpSessions, SglangServer
from bapo_megatron.rollout.engines.sglang.server_process import more_flags, sglang_python
from bapo_megatron.rollout.engines.sglang.supervisor import servers_of

_SHARED_FRACTION = 0.5
"""Most of a GPU's memory that a server may take where the policy trains, too."""


class SglangBackend(EngineBackend):
    """SGLang servers, reached over HTTP. SGLang itself is never imported."""

    def check(self, rollout: RolloutConfig, gpus: int = 0, training: int = 0) -> None:
        """SGLang is installed, and there are GPUs for the servers that the run is to start."""
        if not rollout.sglang.urls:
            sglang_python(rollout.sglang.python)  # or say how to install it
            if gpus:
                _check_gpus(rollout, gpus, training)

    def serve(
        self, config: RunConfig, cuda: bool, on_event: OnEvent
    ) -> AbstractContextManager[EngineServers]:
        """The servers that the recipe names, or servers of the run's own on this machine."""
        return servers_of(config, cuda, on_event)

    def has_prefix_cache(self, rollout: RolloutConfig) -> bool:
        """The radix cache of SGLang, where the flags leave it on."""
        return "--disable-radix-cache" not in more_flags(rollout.sglang)

    async def open(
        self, config: RunConfig, urls: Sequence[str], device: str, opened: AsyncExitStack
    ) -> list[Engine]:
        """A client of each server."""
        sglang, limits = config.rollout.sglang, limits_of(config.model.hf_path)
        sessions = HttpSessions()
        opened.push_async_callback(sessions.close)
        deadlines = Deadlines(60 * sglang.request_minutes, update_s=60 * sglang.update_minutes)
        return [
            SglangEngine(SglangServer(url, sessions), limits, sglang.on_update, deadlines, sglang.tensor)
            for url in urls
        ]


def _check_gpus(rollout: RolloutConfig, gpus: int, training: int) -> None:
    """The servers that a run starts beside rank 0 find GPUs there, and memory on them."""
    sglang = rollout.sglang
    train, needed = min(gpus, training), sglang.first_gpu + sglang.servers * sglang.tensor
    taken = (
        f"rollout.sglang.first_gpu={sglang.first_gpu}, servers={sglang.servers} and tensor={sglang.tensor} "
        f"take GPUs {sglang.first_gpu} to {needed - 1}"
    )
    elsewhere = "or name servers that run elsewhere with rollout.sglang.urls"
    if needed > gpus:
        raise ConfigError(f"{taken}, but this machine has {gpus}: start fewer servers, {elsewhere}")
    if sglang.first_gpu < train and sglang.memory_fraction > _SHARED_FRACTION:
        raise ConfigError(
            f"{taken}, and this run trains on GPUs 0 to {train - 1}: set rollout.sglang.first_gpu to {train} "
            f"and train on fewer processes if that is too many, {elsewhere}, or share GPUs with "
            f"rollout.sglang.memory_fraction of at most {_SHARED_FRACTION}"
        )
