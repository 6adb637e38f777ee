"""The rollout backend: the factory of one kind of inference engine (checks, servers, clients), e.g. SGLang.

``LocalBackend``, without servers, is here; SGLang's is in its folder, and a user's own class is one that
`rollout.engine` names by its import path.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
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

OnEvent = Callable[[dict[str, Any]], None]
"""A callback for events: a kind and its fields."""


class EngineError(RuntimeError):
    """An engine refused, hung, or answered nonsense; its state is unknown. The message names the engine."""


class EngineServers:
    """The base class of the servers behind a run's engines: addresses, restarts, and turns on colocated GPUs.

    This one has none, for an engine in the sampler's process. On rank 0 only; ``EngineBackend.serve`` makes
    it; servers that the run started end with that context. ``start`` and ``end`` may block.
    """

    urls: Sequence[str] = ()
    """Addresses of the servers."""
    gpus: Mapping[str, Sequence[int]] = MappingProxyType({})
    """GPU numbers on this machine of each server that the run has started, by its address."""

    def heed(self, event: dict[str, Any]) -> None:
        """React to an event of the sampler's process, such as ``engine_hangs``: restart the server."""

    # Colocated servers take turns with the policy on their GPUs: they are held at first, until `start`.

    def hold(self) -> None:
        """Suspend restarts until ``start``: the policy has the GPUs."""

    def running(self) -> list[str]:
        """Addresses of the servers whose process lives; none is restarted while they are held."""
        return list(self.urls)

    def end(self, spared: Collection[str] = ()) -> None:
        """Kill all servers but those at the addresses ``spared``, and wait until they are gone."""

    def start(self) -> None:
        """Start the servers that do not run, and resume restarts. Waits until they are ready only once."""


class EngineBackend(ABC):
    """The factory of a run's engines, an abstract base class: a subclass must define ``open``.

    Preflight calls ``check``, ``trainer/build.py`` ``serve`` on rank 0, ``open_pool`` ``open`` in the process
    that samples; ``bapo eval`` calls them, too. The defaults are those of an engine in that process. Its
    settings are ``rollout.engine_config``: the field of ``RolloutConfig`` with the backend's name,
    ``custom_engine`` for one that is named by its import path, or else the defaults of ``EngineConfig``
    (``local``).
    """

    rounds = False
    """Synchronous rounds: new groups are opened only when no group is open, so that an engine whose tokens
    depend on its batch always forms the same batches."""

    returns_routes = False
    """Whether its engines return the routes that a request asks for (``GenerateRequest.routes``)."""

    def check(  # noqa: B027 (most engines have nothing to check)
        self, rollout: RolloutConfig, gpus: int = 0, training: int = 0
    ) -> None:
        """Raise ConfigError if the engines cannot be started or used; called before anything starts.

        ``gpus``: number of this machine's GPUs. ``training``: number of training processes, one on each of
        the first GPUs.
        """

    def prepare_process(self, rollout: RolloutConfig, cuda: bool) -> None:  # noqa: B027 (most share no group)
        """Set the environment variables that a training process must share with engines' processes.

        Called on every rank before its first process group, because NCCL reads its settings once.
        ``cuda``: whether it trains on a GPU.
        """

    def check_weights(self, hf_path: Path) -> None:  # noqa: B027 (most engines load what transformers loads)
        """Raise ConfigError if the engines cannot load the model's folder as it is stored."""

    def serve(
        self, config: RunConfig, cuda: bool, on_event: OnEvent
    ) -> AbstractContextManager[EngineServers]:
        """The servers, ready for requests; those that the run starts end with the context. Rank 0 only."""
        return nullcontext(EngineServers())

    def max_in_flight(self, rollout: RolloutConfig) -> int:
        """Most requests in flight at one engine."""
        return rollout.engine_config.max_in_flight

    def has_prefix_cache(self, rollout: RolloutConfig) -> bool:
        """Whether engines keep a request's keys and values for its continuation (prefix cache)."""
        return False

    def weight_digester(self, rollout: RolloutConfig, hf_path: Path, device: str) -> MakeDigester | None:
        """The factory of the digests that engines must report after a weight sync; None: none are compared.

        ``hf_path``: the model's folder. ``device``: the kind of device that the trainer is on.
        """
        return partial(UnknownDigests, f"{type(self).__name__} defines no weight_digester")

    @abstractmethod
    async def open(
        self, config: RunConfig, urls: Sequence[str], device: str, opened: AsyncExitStack
    ) -> list[Engine]:
        """The engines, made in the event loop that uses them. Resources to close are pushed onto ``opened``.

        ``urls``: addresses of the servers. ``device``: the device of an engine in this process.
        """


class LocalBackend(EngineBackend):
    """The backend of the embedded engine: a Hugging Face model in the sampler's process.

    Its log-probs depend, in their last bits, on the batch: so it samples in rounds, each of which begins when
    the one before is finished.
    """

    rounds = True
    returns_routes = True

    def max_in_flight(self, rollout: RolloutConfig) -> int:
        return rollout.max_batch

    def weight_digester(self, rollout: RolloutConfig, hf_path: Path, device: str) -> None:
        """None, nothing to compare: the engine checks names and shapes of all weights that it loads."""

    async def open(
        self, config: RunConfig, urls: Sequence[str], device: str, opened: AsyncExitStack
    ) -> list[Engine]:
        # transformers takes seconds to import, and the trainer needs none of it.
        from bapo_megatron.rollout.engines.local_engine import LocalEngine, LocalModel

        model, max_batch = config.model, config.rollout.max_batch
        loaded = await asyncio.to_thread(LocalModel, model.hf_path, max_batch, model.dtype, device)
        return [LocalEngine(loaded)]


BACKENDS = {
    "local": "bapo_megatron.rollout.engines.backend:LocalBackend",
    "sglang": "bapo_megatron.rollout.engines.sglang.backend:SglangBackend",
}
"""The built-in backends by name. Imported only when chosen."""


def engine_backend(engine: str, field: str = "rollout.engine") -> EngineBackend:
    """The backend that `rollout.engine` names. ConfigError if there is none, or it is incomplete."""
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
    if missing := sorted(backend.__abstractmethods__):
        raise ConfigError(f"{field}={engine}: {backend.__name__} lacks {', '.join(missing)}: define it")
    return backend()
