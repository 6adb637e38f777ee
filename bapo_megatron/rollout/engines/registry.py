"""The registry of rollout backends: the values of `rollout.engine`, and the engine pool of a run."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from bapo_megatron.config import RunConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.backend import EngineBackend
from bapo_megatron.rollout.engines.pool import EnginePool, Report
from bapo_megatron.rollout.engines.timeouts import EngineTimeouts

BACKENDS = {
    "local": "bapo_megatron.rollout.engines.local.backend:LocalBackend",
    "sglang": "bapo_megatron.rollout.engines.sglang.backend:SglangBackend",
}
"""The built-in ones. Each is imported when it is chosen: transformers alone takes seconds."""


def engine_backend(engine: str) -> EngineBackend:
    """The backend that `rollout.engine` names. ConfigError that says why it cannot be had."""
    path = BACKENDS.get(engine, engine)
    module_name, _, name = path.partition(":")
    if not (module_name and name):
        raise ConfigError(
            f"rollout.engine={engine!r} is unknown: give {', '.join(BACKENDS)}, or the path of a subclass of "
            f"EngineBackend as package.module:Name"
        )
    if os.getcwd() not in sys.path and "" not in sys.path:  # however the program was started
        sys.path.append(os.getcwd())
    try:
        module: Any = importlib.import_module(module_name)
    except Exception as error:  # a module raises what it likes
        raise ConfigError(
            f"rollout.engine={engine}: importing {module_name} failed with {error!r}; mend the module, or "
            f"start where it can be found (the present directory and PYTHONPATH are searched)"
        ) from error
    backend = getattr(module, name, None)
    if not (isinstance(backend, type) and issubclass(backend, EngineBackend)):
        raise ConfigError(
            f"rollout.engine={engine}: {name} of {module_name} is no subclass of EngineBackend "
            f"(bapo_megatron/rollout/engines/backend.py); name one that is"
        )
    return backend()


async def open_pool(
    config: RunConfig,
    urls: Sequence[str],
    device: str,
    report: Report,
    opened: AsyncExitStack,
    max_in_flight: int | None = None,
) -> EnginePool:
    """The chosen engines in a pool, which ``opened`` closes; see `EngineBackend.open`.

    ``max_in_flight``: requests at each, where it is not what the engine's settings say.
    """
    rollout = config.rollout
    backend = engine_backend(rollout.engine)
    engines = await backend.open(config, urls, device, opened)
    timeouts = EngineTimeouts(update_s=60 * rollout.engine_config.update_minutes)
    pool = EnginePool(engines, max_in_flight or backend.max_in_flight(rollout), report, timeouts)
    opened.push_async_callback(pool.close)
    return pool
