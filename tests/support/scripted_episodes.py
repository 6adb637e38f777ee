"""Episodes played in this process with scripted turns, and again by fresh objects, as after a kill.

Only the standard library and the package are imported: slow tests run this in the environments of others.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bapo_megatron.environment import Environment, Reply, Task, Turn

Kind = type[Environment]
LIMIT_S = 240.0


def play(kind: Kind, task: Task, settings: Mapping[str, Any], turns: Iterable[str]) -> list[Reply]:
    """The replies to the turns, up to the end of the episode."""
    return asyncio.run(asyncio.wait_for(_played(kind, task, settings, list(turns), []), LIMIT_S))


def check_durable(
    kind: Kind,
    task: Task,
    settings: Mapping[str, Any],
    turns: Iterable[str],
    cuts: Iterable[int] | None = None,
) -> list[Reply]:
    """The replies to the turns; a new object after each of them (or after those of ``cuts``), brought there
    from what a journal has, must continue with the same ones."""
    turns = list(turns)
    replies = play(kind, task, settings, turns)
    assert len(replies) == len(turns), f"the episode was over after {len(replies)} of {len(turns)} turns"
    for cut in range(1, len(replies)) if cuts is None else cuts:
        again = asyncio.run(asyncio.wait_for(_played(kind, task, settings, turns, replies[:cut]), LIMIT_S))
        assert again == replies[cut:], f"after turn {cut}: {again} is not {replies[cut:]}"
    return replies


async def _played(
    kind: Kind, task: Task, settings: Mapping[str, Any], turns: Sequence[str], before: Sequence[Reply]
) -> list[Reply]:
    if kind.own_random:
        random.seed(7)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(7)
    environment = kind(task, settings)
    try:
        if before and kind.resume == "restore":
            pairs = zip(turns, before, strict=False)
            spoken = [(Turn("sampled", turn), Turn("given", said(reply))) for turn, reply in pairs]
            environment.restore([one for pair in spoken for one in pair], before[-1].note)
        elif before:
            for turn, reply in zip(turns, before, strict=False):
                again = await _step(environment, turn, reply.text or "")
                assert again.text == reply.text, f"{again.text!r}: was {reply.text!r}"
        replies: list[Reply] = []
        for turn in turns[len(before) :]:
            replies.append(await _step(environment, turn))
            if replies[-1].observation is None:
                break
        return replies
    finally:
        closed: Any = environment.close()
        if inspect.isawaitable(closed):
            await closed


async def _step(environment: Environment, turn: str, given: str | None = None) -> Reply:
    """A step; in a replay what was ``given``."""
    found = environment.step(turn) if given is None else environment.again(turn, given)
    return await found if inspect.isawaitable(found) else found  # type: ignore[return-value]


def said(reply: Reply) -> str:
    """The observation of a reply that is not the last, as the journal has it."""
    assert reply.observation is not None
    return reply.observation if isinstance(reply.observation, str) else "\n".join(reply.observation)
