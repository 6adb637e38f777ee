"""Sampling of one whole response for an evaluation: a request for each segment, again after a lost engine.

A segment is at most ``segment_tokens`` tokens; a lost engine costs the segment in flight only. `bapo eval`
and the held-out evaluations of a run use it; responses for training go through ``sampler/dispatcher.py``
instead, which journals them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from bapo_megatron.errors import RunStopped
from bapo_megatron.rollout.engines.pool import EngineLost, EnginePool
from bapo_megatron.rollout.engines.requests import request_seed
from bapo_megatron.rollout.engines.slot import CachedPrefix, EngineSlot
from bapo_megatron.types import FinishReason, GenerateRequest, Prompt, SamplingParams

MAX_ENGINE_LOSSES = 20
"""Engines lost with one response after which the evaluation stops: its request may be what crashes them."""

_POLL_S = 1.0
"""Interval of polling for an engine with room, in seconds."""


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of an evaluation's responses. Plain data.

    Made by ``evaluation/run.py`` and by ``HeldOut``.
    """

    temperature: float
    max_response_tokens: int
    seed: int
    stop_token_ids: tuple[int, ...]
    segment_tokens: int | None = None
    """Most tokens of one request; None: one request for the whole response."""


async def whole_response(
    pool: EnginePool,
    sampling: Sampling,
    prompt: Prompt,
    name: str,
    seed_place: tuple[int, int, int],
    slot: EngineSlot | None = None,
    over_capacity: bool = False,
) -> tuple[np.ndarray, FinishReason]:
    """Sample a response; returns its token ids and its finish reason.

    ``name``: unique prefix of the request ids. ``seed_place``: see `request_seed`. ``slot``: an engine that
    is reserved already. ``over_capacity``: see `EnginePool.reserve`.

    It waits without a limit for an engine with room: the caller watches ``EnginePool.check``. RunStopped if
    the request is refused, or ``MAX_ENGINE_LOSSES`` engines fail with it.
    """
    made, losses = np.zeros(0, np.int32), 0
    cached: CachedPrefix | None = None
    seed = request_seed(sampling.seed, *seed_place)
    while True:
        while slot is None and (slot := pool.reserve(over_capacity, cached)) is None:
            await asyncio.sleep(_POLL_S)
        left = sampling.max_response_tokens - len(made)
        params = SamplingParams(
            sampling.temperature, min(left, sampling.segment_tokens or left), sampling.stop_token_ids, seed
        )
        ids = np.concatenate([prompt.token_ids_P, made])
        try:
            answer = await pool.generate(slot, GenerateRequest(f"{name}-{len(made)}", ids, params, len(made)))
            cached = pool.cached_at(slot)
        except EngineLost as lost:
            losses += lost.by_this_request
            if losses >= MAX_ENGINE_LOSSES:
                raise RunStopped(f"{losses} engines were lost with request {name!r}: {lost}") from lost
            continue
        except ValueError as error:  # any engine would refuse it
            raise RunStopped(f"a request of an evaluation was refused: {error}") from error
        finally:
            slot.load -= 1
            slot = None
            pool.changed.set()
        made = np.concatenate([made, answer.token_ids_R])
        if len(made) and made[-1] in sampling.stop_token_ids:
            return made, "stop"
        if len(made) >= sampling.max_response_tokens:
            return made, "length"
