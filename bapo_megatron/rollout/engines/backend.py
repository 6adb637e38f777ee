"""The rollout backend: how a run checks, starts and reaches the engines of one kind, such as SGLang's.

A backend is a folder of this room, or a user's own class that `rollout.engine` names by its path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bapo_megatron.config import RolloutConfig, RunConfig
from bapo_megatron.interfaces import Engine
from bapo_megatron.rollout.engines.sent_weights import MakeDigester, UnknownDigests

OnEvent = Callable[[dict[str, Any]], None]
"""Takes note of an event: a kind and its fields."""


class EngineError(RuntimeError):
    """An engine refused, hung, or answered nonsense. The message names it."""


class EngineServers:
    """The servers behind a run's engines; none where engines are in the sampler's process."""

    urls: Sequence[str] = ()
    """Their addresses."""
    gpus: Mapping[str, Sequence[int]] = MappingProxyType({})
    """The GPUs of each that the run has started, by its address: numbers on this machine."""

    def heed(self, event: dict[str, Any]) -> None:
        """Act on an event of the sampler's process, such as ``engine_hangs``."""

    # Time-sharing: colocated servers are held from the beginning, until `start`.

    def hold(self) -> None:
        """Start none again that ends, until ``start``: its GPU is the policy's now."""

    def running(self) -> list[str]:
        """Addresses of those whose process lives; while they are held none is a new process."""
        return list(self.urls)

    def end(self, spared: Collection[str] = ()) -> None:
        """End all but those at the addresses ``spared``, and wait until they are gone."""

    def start(self) -> None:
        """Start those that do not run, and keep them running. Waits for them only the first time."""


class EngineBackend(ABC):
    """How a run uses the engines of one kind. The defaults are those of an engine in the sampler's process.

    Its settings are ``rollout.engine_config``: the field of ``RolloutConfig`` that has the backend's name, or
    ``custom_engine`` for one that is given by its path.
    """

    rounds = False
    """Sample in rounds: new groups are begun only when no other is in the making, so that an engine whose
    tokens depend on its batch always forms the same batches."""

    def check(  # noqa: B027 (most engines have nothing to check)
        self, rollout: RolloutConfig, gpus: int = 0, training: int = 0
    ) -> None:
        """Raise ConfigError if engines cannot be had; called before anything starts.

        ``gpus``: those of this machine. ``training``: processes that train, one on each of the first GPUs.
        """

    def serve(
        self, config: RunConfig, cuda: bool, on_event: OnEvent
    ) -> AbstractContextManager[EngineServers]:
        """The servers, ready for requests; those that the run starts end with the context. On rank 0."""
        return nullcontext(EngineServers())

    def max_in_flight(self, rollout: RolloutConfig) -> int:
        """Requests at one engine at a time."""
        return rollout.engine_config.max_in_flight

    def has_prefix_cache(self, rollout: RolloutConfig) -> bool:
        """Whether an engine keeps the keys and values of a request for one that continues it."""
        return False

    def weight_digester(self, rollout: RolloutConfig, hf_path: Path, device: str) -> MakeDigester | None:
        """Makes what computes, while weights pass, the digests that engines must report.

        ``hf_path``: the model's folder. ``device``: the kind that the trainer is on. None: nothing is to be
        compared.
        """
        return partial(UnknownDigests, f"{type(self).__name__} defines no weight_digester")

    @abstractmethod
    async def open(
        self, config: RunConfig, urls: Sequence[str], device: str, opened: AsyncExitStack
    ) -> list[Engine]:
        """The engines, in the event loop that they are used in. What must be closed goes to ``opened``.

        ``urls``: of the servers. ``device``: where an engine in this process computes.
        """
