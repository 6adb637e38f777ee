"""The registry of rollout backends (`rollout.engine`: a name or an import path), and the pool's factory.

Both raise ConfigError for an engine that does not exist, or cannot do what the settings ask. Used in
``commands/``, ``evaluation/``, ``rollout/sampler/`` and ``trainer/``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from bapo_megatron.config import RunConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.interfaces import Engine, ReleasesMemory
from bapo_megatron.rollout.engines.backend import EngineBackend
from bapo_megatron.rollout.engines.colocated_pool import ColocatedPool
from bapo_megatron.rollout.engines.pool import EnginePool, Report
from bapo_megatron.rollout.engines.timeouts import EngineTimeouts
from bapo_megatron.runtime.dotted_path import load_dotted_path

BACKENDS = {
    "local": "bapo_megatron.rollout.engines.local.backend:LocalBackend",
    "sglang": "bapo_megatron.rollout.engines.sglang.backend:SglangBackend",
}
"""The built-in backends by name. Imported only when chosen: transformers alone takes seconds."""


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
            f"{field}={engine}: {backend!r} is no subclass of EngineBackend "
            f"(bapo_megatron/rollout/engines/backend.py); name one that is"
        )
    if missing := sorted(backend.__abstractmethods__):
        raise ConfigError(f"{field}={engine}: {backend.__name__} lacks {', '.join(missing)}: define it")
    return backend()


async def open_pool(
    config: RunConfig,
    urls: Sequence[str],
    device: str,
    report: Report,
    opened: AsyncExitStack,
    max_in_flight: int | None = None,
) -> EnginePool:
    """The engine pool of a run; ``opened`` closes it. Arguments as of `EngineBackend.open`.

    ``max_in_flight``: most requests in flight at each engine, in place of the engine's setting.
    """
    rollout = config.rollout
    backend = engine_backend(rollout.engine)
    engines = await backend.open(config, urls, device, opened)
    colocated = rollout.engine_config.colocated
    if colocated and not all(isinstance(engine, ReleasesMemory) for engine in engines):
        raise ConfigError(
            f"rollout.engine={rollout.engine} with colocated=true: its engines cannot release their memory "
            f"(interfaces.ReleasesMemory); leave colocated out"
        )
    _check_transport(rollout.engine, rollout.engine_config.sync, engines)
    timeouts = EngineTimeouts(update_s=60 * rollout.engine_config.update_minutes)
    most = max_in_flight or backend.max_in_flight(rollout)
    kind = ColocatedPool if colocated else EnginePool
    pool = kind(engines, most, report, timeouts, backend.has_prefix_cache(rollout))
    opened.push_async_callback(pool.close)
    return pool


def _check_transport(engine: str, sync: str, engines: Sequence[Engine]) -> None:
    """Raise ConfigError if an engine does not take weights by ``sync``."""
    call, protocol = ("wake", "ReceivesHandles") if sync == "ipc" else ("load", "ReceivesBroadcast")
    for one in engines:
        if sync != "disk" and sync not in getattr(one, "transports", ()):
            raise ConfigError(
                f"rollout.engine={engine}, sync={sync}: {type(one).__name__}.transports does not name it: "
                f"use sync=disk, or take WeightParts in {call} (interfaces.{protocol}), in place of "
                f"begin_update, begin_wake and the methods that followed them, which nothing calls any more; "
                f"leave_group and join_group have no timeout_s now"
            )
