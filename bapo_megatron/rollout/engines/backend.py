"""Backends of inference engines: the base class ``EngineBackend``, and ``LocalBackend``, without servers.

``engine_backend(name)`` returns an instance of the class that `rollout.engine` selects: ``local``, ``sglang``
or a user's subclass by import path. A backend checks the settings, starts servers on rank 0, and creates the
engines (``interfaces.Engine``) in the process that samples: the sampler process or `bapo eval`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bapo_megatron.config import RolloutConfig, RunConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.interfaces import Engine
from bapo_megatron.rollout.engines.sent_weights import MakeDigester, UnknownDigests
from bapo_megatron.runtime.dotted_path import load_dotted_path
from bapo_megatron.runtime.event_kinds import OnEvent


class EngineError(RuntimeError):
    """An engine refused a call, hung or answered invalidly; its state is unknown. The message names it."""


class EngineServers:
    """A run's engine servers, as the trainer's rank 0 sees them: addresses and GPU numbers, ``heed`` for the
    sampler's events, and ``hold``, ``end`` and ``start`` for the GPU hand-over; the last two may block. This
    base class has no servers, and its methods do nothing."""

    urls: Sequence[str] = ()
    gpus: Mapping[str, Sequence[int]] = MappingProxyType({})
    """GPU numbers on this machine, by address, of each server that the run started."""

    def heed(self, event: dict[str, Any]) -> None:
        """React to an event from the sampler's process, e.g. restart the server on ``engine_hangs``."""

    # Colocated servers share their GPUs with the policy in turns: they are held initially, until `start`.

    def hold(self) -> None:
        """Suspend restarts until ``start``: the policy has the GPUs."""

    def running(self) -> list[str]:
        """Return the addresses of the servers whose process is alive."""
        return list(self.urls)

    def end(self, spared: Collection[str] = ()) -> None:
        """Kill all servers except those at the addresses ``spared``, and wait until they are gone."""

    def start(self) -> None:
        """Start the servers that are not running, and resume restarts. The first call waits until ready."""


class EngineBackend(ABC):
    """Abstract factory of one kind of engine. A subclass must define ``open``, which returns the engines
    (clients, or models in this process); the other methods have defaults that suit an engine without servers.

    Order: ``check`` and ``check_weights`` before a run; ``serve`` on rank 0; ``open`` in the process that
    samples, with the addresses from ``serve``. Settings are ``rollout.engine_config``: the ``RolloutConfig``
    field with the backend's name, ``custom_engine`` for an import path, or for ``local`` the defaults.
    """

    rounds = False
    """Whether groups open only when none is open, so that an engine forms the same batches in every run."""

    returns_routes = False
    """Whether its engines return requested routes (``GenerateRequest.routes``)."""

    def check(  # noqa: B027 (most engines have nothing to check)
        self, rollout: RolloutConfig, gpus: int = 0, training: int = 0
    ) -> None:
        """Raise ConfigError if the engines cannot be started or used; called before anything starts.
        ``gpus``: GPUs of this machine. ``training``: training processes, one on each of the first GPUs."""

    def prepare_process(self, rollout: RolloutConfig, cuda: bool) -> None:  # noqa: B027 (most share no group)
        """Set the environment variables that training and engine processes must share. Called on every rank
        before its first process group: NCCL reads them once. ``cuda``: whether the rank trains on a GPU."""

    def check_weights(self, hf_path: Path) -> None:  # noqa: B027 (most engines load what transformers loads)
        """Raise ConfigError if the engines cannot load the model's folder as it is stored."""

    def serve(
        self, config: RunConfig, cuda: bool, on_event: OnEvent
    ) -> AbstractContextManager[EngineServers]:
        """Return a context manager of the servers, ready or, if colocated, held; on exit it ends those that
        the run started. Rank 0 only."""
        return nullcontext(EngineServers())

    def max_in_flight(self, rollout: RolloutConfig) -> int:
        """Return the most requests in flight on one engine."""
        return rollout.engine_config.max_in_flight

    def has_prefix_cache(self, rollout: RolloutConfig) -> bool:
        """Return whether engines keep a request's keys and values for its continuation."""
        return False

    def weight_digester(self, rollout: RolloutConfig, hf_path: Path, device: str) -> MakeDigester | None:
        """Return the factory of digesters for a trainer on ``device``; None: no digests are sent."""
        return partial(UnknownDigests, f"{type(self).__name__} defines no weight_digester")

    @abstractmethod
    async def open(
        self, config: RunConfig, urls: Sequence[str], device: str, opened: AsyncExitStack
    ) -> list[Engine]:
        """Return the engines, created in the event loop that uses them; ``opened`` closes their resources.
        ``urls``: server addresses. ``device``: the device of an engine in this process."""


class LocalBackend(EngineBackend):
    """Backend of ``LocalEngine``, a Hugging Face model in the process that samples. Training samples in
    rounds, because the last bits of this engine's log-probs depend on the batch."""

    rounds = True
    returns_routes = True

    def max_in_flight(self, rollout: RolloutConfig) -> int:
        return rollout.max_batch

    def weight_digester(self, rollout: RolloutConfig, hf_path: Path, device: str) -> None:
        """Return None: the engine checks names and shapes of all weights that it loads."""

    async def open(
        self, config: RunConfig, urls: Sequence[str], device: str, opened: AsyncExitStack
    ) -> list[Engine]:
        # transformers takes seconds to import, and the trainer does not need it.
        from bapo_megatron.rollout.engines.local_engine import LocalEngine, LocalModel

        model, max_batch = config.model, config.rollout.max_batch
        loaded = await asyncio.to_thread(LocalModel, model.hf_path, max_batch, model.dtype, device)
        return [LocalEngine(loaded)]


BACKENDS = {
    "local": "bapo_megatron.rollout.engines.backend:LocalBackend",
    "sglang": "bapo_megatron.rollout.engines.sglang.backend:SglangBackend",
}
"""Built-in backends by name, imported only when chosen."""


def engine_backend(engine: str, field: str = "rollout.engine") -> EngineBackend:
    """Return a new backend of the class ``engine``, the value of `rollout.engine` or another ``field``.
    Raises ConfigError if it is unknown or not an ``EngineBackend``."""
    path = BACKENDS.get(engine, engine)
    if ":" not in path:
        raise ConfigError(
            f"{field}={engine!r} is unknown: give {', '.join(BACKENDS)}, or the path of a subclass of "
            f"EngineBackend as package.module:Name"
        )
    backend = load_dotted_path(field, path, "class")
    if not (isinstance(backend, type) and issubclass(backend, EngineBackend)):
        raise ConfigError(
            f"{field}={engine}: {backend!r} is not a subclass of EngineBackend "
            f"(bapo_megatron/rollout/engines/backend.py); name one that is"
        )
    return backend()
