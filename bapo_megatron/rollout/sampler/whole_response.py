"""Sampling of one whole response for an evaluation, from weights of one version.

A request for each segment, or in `bapo eval` for the whole response or turn; a lost engine costs the request
in flight only. `bapo eval` and the held-out evaluations of a run use it; responses for training go through
``dispatcher.py`` instead, which journals them. Both follow the state machine of ``response.py``. Used by
``evaluation/run.py`` and ``held_out.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from bapo_megatron.errors import RunStopped
from bapo_megatron.rollout.engines.pool import EngineLost, EnginePool
from bapo_megatron.rollout.engines.requests import request_seed
from bapo_megatron.rollout.engines.slot import CachedPrefix, EngineSlot
from bapo_megatron.rollout.sampler.response import (
    Response,
    Sampling,
    Step,
    continued,
    finish_reason_of,
    foreign_weights,
    given,
    given_up,
    needs,
    next_request,
    restarted,
)
from bapo_megatron.rollout.sampler.turns import TurnTaker
from bapo_megatron.types import Generation, Prompt

_POLL_S = 1.0
"""Interval of polling for an engine with room, in seconds."""


class RoundBarrier:
    """Barrier of the responses of an evaluation: their requests go out together, in the order of ``members``.

    For an engine whose last bits depend on its batch (``EngineBackend.rounds``), in an environment: steps
    take as long as they take, so without it each evaluation would form other batches. A round begins when
    every member waits for it, or has left. Made by ``HeldOut``.
    """

    def __init__(self, members: int) -> None:
        self._left = members
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def meet(self, member: int) -> None:
        """Wait for the next round."""
        loop = asyncio.get_running_loop()
        self._waiting[member] = future = loop.create_future()
        loop.call_soon(self._begin_if_all_wait)  # not at once: the last to come would not wait, and go first
        await future

    def leave(self) -> None:
        """A member is complete, and asks for nothing more."""
        self._left -= 1
        asyncio.get_running_loop().call_soon(self._begin_if_all_wait)

    def _begin_if_all_wait(self) -> None:
        if len(self._waiting) < self._left:
            return
        waiting, self._waiting = self._waiting, {}
        # Not as they came: the place in a batch decides about last bits, too.
        for _, future in sorted(waiting.items(), key=lambda one: one[0]):
            if not future.done():  # cancelled
                future.set_result(None)


async def whole_response(
    pool: EnginePool,
    sampling: Sampling,
    version: int,
    prompt: Prompt,
    name: str,
    seed_place: tuple[int, int, int],
    slot: EngineSlot | None = None,
    over_capacity: bool = False,
    turns: TurnTaker | None = None,
    together: Callable[[], Awaitable[None]] | None = None,
) -> Response:
    """Sample a complete response from the weights of ``version``.

    ``name``: unique prefix of the request ids. ``seed_place``: see `request_seed`. ``slot``: an engine that
    is reserved already. ``over_capacity``: see `EnginePool.reserve`. ``turns``: of the environment that
    answers it, if `Sampling.in_environment`; its failures are data of the response. ``together``: awaited
    before each request, ``RoundBarrier.meet`` where requests must go out with those of other responses.

    An engine that answers with a token of other weights is lost, and the answer is not used. It waits without
    a limit for an engine with room: the caller watches ``EnginePool.check``. RunStopped if the request is
    refused, or ``MOST_LOSSES`` engines fail with it.
    """
    response, losses = Response(), 0
    cached: CachedPrefix | None = None
    seed = request_seed(sampling.seed, *seed_place)
    try:
        while need := needs(response, sampling):
            if isinstance(need, Step):
                assert turns is not None
                response = await _stepped(turns, prompt, response, name)
                continue
            if together is not None:
                await together()
            while slot is None and (slot := pool.reserve(over_capacity, cached)) is None:
                await asyncio.sleep(_POLL_S)
            request = next_request(response, need, sampling, prompt, name, seed)
            try:
                answer = _checked(pool, slot, version, await pool.generate(slot, request))
                cached = pool.cached_at(slot)
            except EngineLost as lost:
                losses += lost.by_this_request
                if why := given_up(losses, name):
                    raise RunStopped(f"{why}: {lost}") from lost
                continue
            except ValueError as error:  # any engine would refuse it
                raise RunStopped(f"a request of an evaluation was refused: {error}") from error
            finally:
                slot.load -= 1
                slot = None
                pool.changed.set()
            response = continued(response, answer, finish_reason_of(response.tokens, answer, sampling))
    finally:
        if turns is not None:
            turns.forget(_episode(name, response))
    return response


def _episode(name: str, response: Response) -> str:
    """The name of the response's episode: another one for each attempt."""
    return f"{name}-{response.episode.restarts}"


async def _stepped(turns: TurnTaker, prompt: Prompt, response: Response, name: str) -> Response:
    """The response after its environment's answer, or begun again if that could not be brought back."""
    result = await turns.result(prompt, response, _episode(name, response))
    if turns.must_restart(response, result):
        return restarted(response)
    return given(response, await turns.answer(response, result))


def _checked(pool: EnginePool, slot: EngineSlot, version: int, answer: Generation) -> Generation:
    """The answer, if all its tokens are of weight ``version``; else EngineLost, and the engine is lost."""
    if foreign := foreign_weights(answer, lambda found: found == version):
        reason = f"{foreign}, where an evaluation samples from {version}"
        pool.quarantine(slot, reason)
        raise EngineLost(f"{slot.engine.name}: {reason}", by_this_request=True)
    return answer
