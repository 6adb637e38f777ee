"""Start of a run's environment: its checks before any work, and its parts in the process that samples.

Used by ``process.py``, ``evaluation/run.py`` and ``trainer/preflight.py``.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bapo_megatron.config import EnvironmentConfig
from bapo_megatron.environment.pool import EnvironmentPool
from bapo_megatron.environment.template import ObservationTemplate, check_template
from bapo_megatron.environment.traits import interpreter_problem, read_traits, stop_ids
from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.requests import stop_token_ids
from bapo_megatron.rollout.sampler.turns import Stepping


def check_environment(environment: EnvironmentConfig, model: Path, tokenizer: Any) -> None:
    """Check of the environment: its class in a worker, its stops, the tokens of its observations.

    ConfigError for a class that does not load or contradicts itself, a stop of several tokens, and a chat
    template that does not continue a response over several turns as it was sampled.
    """
    if environment.function is None:
        return
    if problem := interpreter_problem(environment.python):
        raise ConfigError(problem)
    traits = read_traits(environment)
    stop_ids(traits, tokenizer)
    template = ObservationTemplate(tokenizer, traits.role, stop_token_ids(model, tokenizer))
    check_template(template, str(model), "sampled" if environment.history == "sampled" else "template")


async def open_environment(
    environment: EnvironmentConfig, model: Path, tokenizer: Any, opened: AsyncExitStack
) -> tuple[tuple[int, ...], Stepping | None]:
    """The stop tokens of model and environment together, and the environment's parts, started.

    The parts are None without an environment. ConfigError, ChildError or OSError if it does not start.
    """
    stops = stop_token_ids(model, tokenizer)
    if environment.function is None:
        return stops, None
    traits = await asyncio.to_thread(read_traits, environment)
    template = ObservationTemplate(tokenizer, traits.role, stops)
    steps = EnvironmentPool(environment, traits)
    await steps.start()
    opened.push_async_callback(steps.close)
    return (*stops, *stop_ids(traits, tokenizer)), Stepping(steps, template)
