"""The sampler's process: engines, judges and the sampler in one event loop, asked through a pipe.

``python -m bapo_megatron.rollout.sampler.process FD`` is what ``client.py`` starts. The first message is a
``Setup``; then one question at a time, ``(method, arguments)``, answered by ``("ok", value, events)`` or
``("error", kind, text, events)``, with signs of life before it (``signs_of_life.py``). When the pipe closes,
because the trainer has ended in whatever way, this process ends too. What it has not written to the journal
by then, no one has been told of.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import uvloop

from bapo_megatron.config import RunConfig
from bapo_megatron.data.prompts import PromptSet
from bapo_megatron.data.suites import Suite
from bapo_megatron.errors import ConfigError, RunStopped
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.interfaces import Engine
from bapo_megatron.reward.pool import RewardPool
from bapo_megatron.rollout.engines.pool import EnginePool, EnginesGone
from bapo_megatron.rollout.engines.requests import Dataset, limits_of, stop_token_ids
from bapo_megatron.rollout.engines.sglang.engine import Deadlines, SglangEngine
from bapo_megatron.rollout.engines.sglang.http_client import ServerError, SglangServer, open_session
from bapo_megatron.rollout.engines.sglang.pool_broadcast import PoolBroadcast
from bapo_megatron.rollout.engines.timeouts import EngineTimeouts
from bapo_megatron.rollout.sampler.heartbeat import answering, tell
from bapo_megatron.rollout.sampler.held_out import HeldOut
from bapo_megatron.rollout.sampler.loop import GroupSampler
from bapo_megatron.rollout.sampler.scoring import RobustScorer
from bapo_megatron.runtime.processes import die_with_parent


@dataclass(frozen=True)
class Setup:
    """What the process needs to know."""

    config: RunConfig
    problems: PromptSet
    urls: tuple[str, ...]
    """Of SGLang servers; none for the local engine."""
    device: str
    """Of the local engine."""
    held_out: tuple[Suite, ...] = ()
    """What `config.evaluation` names."""


_TOLD = (ConfigError, RunStopped, EnginesGone, ServerError, OSError)
"""Errors that the trainer is told; after others it starts this process again."""


class Service:
    """Answers the trainer's questions."""

    def __init__(
        self,
        sampler: GroupSampler,
        broadcast: PoolBroadcast,
        held_out: HeldOut,
        events: list[dict[str, Any]],
    ) -> None:
        self._sampler, self._broadcast, self._held_out = sampler, broadcast, held_out
        self._events = events

    async def answer(self, method: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The reply to one question, with what has happened since the last one."""
        asked: dict[str, Callable[..., Awaitable[Any]]] = {
            "start": self._start,
            "next_batch": self._next_batch,
            "evaluated": self._evaluated,
            "load_weights": self._load_weights,
            "state": self._state,
            "checkpointed": self._sampler.checkpointed,
            "gather": self._broadcast.gather,
            "join": self._broadcast.join,
            "begin": self._begin,
            "receive": self._broadcast.receive,
            "finish": self._finish,
            "fail": self._broadcast.fail,
        }
        try:
            reply: tuple[Any, ...] = ("ok", await asked[method](*arguments))
        except _TOLD as error:
            reply = _failed(error)
        events = self._events.copy()
        self._events.clear()
        return (*reply, events)

    async def _start(self, first_step: int, state: dict[str, Any] | None) -> None:
        self._held_out.start(first_step)
        await self._sampler.start(first_step, state)

    async def _next_batch(self, step: int, wait_s: float) -> Path | Literal["weights"] | None:
        return self._or_weights(await self._sampler.next_batch(step, wait_s))

    async def _evaluated(self, step: int, wait_s: float) -> Path | Literal["weights"] | None:
        path = await self._held_out.responses(step, wait_s)
        self._sampler.check_engines()
        return self._or_weights(path)

    def _or_weights(self, path: Path | None) -> Path | Literal["weights"] | None:
        return "weights" if path is None and self._sampler.wants_weights else path

    async def _load_weights(self, folder: Path, version: int, step: int) -> None:
        self._held_out.expect(step)
        await self._sampler.load_weights(folder, version, step)
        self._held_out.begin()

    async def _begin(self, version: int) -> None:
        self._sampler.weights_are_coming(version)
        await self._broadcast.begin()

    async def _finish(self, version: int, step: int) -> str:
        digest = await self._broadcast.finish(version)
        self._held_out.expect(step)
        self._sampler.weights_came(version, step)
        self._held_out.begin()
        return digest

    async def _state(self) -> dict[str, Any]:
        return self._sampler.state()


def _failed(error: Exception) -> tuple[str, str, str]:
    return "error", type(error).__name__, str(error)


def main() -> None:
    """The process, from its setup to the end of the pipe."""
    die_with_parent()  # also where it is stopped, or hangs
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides what Ctrl-C means
    for number in (signal.SIGUSR1, signal.SIGTERM):  # Slurm may tell every process of a job to stop
        signal.signal(number, lambda *_: None)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection for each request in flight
    pipe = Connection(int(sys.argv[1]))
    try:
        setup: Setup | None = pipe.recv()
        if setup is None:  # the trainer has ended before it asked anything
            return
        collect_seldom()
        uvloop.run(_serve(pipe, setup))
    except (EOFError, ConnectionResetError, BrokenPipeError):
        os._exit(0)  # the trainer is gone; threads may still decode
    except RunStopped as stopped:  # what engines had in hand at the end could not be written
        sys.exit(f"sampler: {stopped}")


def collect_seldom() -> None:
    """Spare Python's cyclic collector: with tens of thousands of requests in flight it takes half a core.

    What is made here has few cycles (errors with their tracebacks); they are collected all the same, later.
    """
    gc.freeze()  # the dataset stays; collections need not look at it
    gc.set_threshold(100_000, 20, 100)


async def _serve(pipe: Connection, setup: Setup) -> None:
    events: list[dict[str, Any]] = []
    async with AsyncExitStack() as opened:
        try:
            sampler, pool, held_out = await answering(pipe, _open(setup, opened, partial(_note, events)))
        except (ConfigError, RunStopped) as error:  # after any other the trainer tries again
            await asyncio.to_thread(pipe.recv)  # whatever the trainer asks first
            tell(pipe, (*_failed(error), events))
            return
        service = Service(sampler, PoolBroadcast(pool, setup.config.rollout.sglang), held_out, events)
        while True:
            try:
                question = await asyncio.to_thread(pipe.recv)
            except (EOFError, OSError):
                os._exit(0)  # the trainer is gone: the next one must not wait for engines to answer an abort
            if question is None:
                break
            reply = await answering(pipe, service.answer(*question))
            await asyncio.to_thread(tell, pipe, reply)
    tell(pipe, ("ok", None, events))


async def _open(
    setup: Setup, opened: AsyncExitStack, report: Callable[..., None]
) -> tuple[GroupSampler, EnginePool, HeldOut]:
    config, rollout = setup.config, setup.config.rollout
    reward_pool = RewardPool(config.reward, rollout.max_response_tokens)
    await reward_pool.start()
    opened.push_async_callback(reward_pool.close)
    scorer = RobustScorer(reward_pool, config.reward.failed, report)
    engines = await open_engines(config, setup.urls, setup.device, opened)
    local = rollout.engine == "local"
    most = rollout.prompts_per_step * rollout.group_size * 1000 if local else rollout.sglang.max_in_flight
    pool = EnginePool(engines, most, report, EngineTimeouts(update_s=60 * rollout.sglang.update_minutes))
    opened.push_async_callback(pool.close)
    tokenizer = load_tokenizer(config.model.hf_path)
    dataset = Dataset(setup.problems.prompts, tokenizer, stop_token_ids(config.model.hf_path, tokenizer))
    sampler = GroupSampler(config, dataset, pool, scorer, report, rounds=local)
    opened.push_async_callback(sampler.close)
    held_out = HeldOut(config, setup.held_out, dataset, pool, scorer)
    opened.callback(held_out.close)
    if local:  # its answers hang, in their last bits, on what it is asked at the same time
        sampler.is_held = lambda: held_out.is_busy
    return sampler, pool, held_out


async def open_engines(
    config: RunConfig, urls: Sequence[str], device: str, opened: AsyncExitStack
) -> list[Engine]:
    """The SGLang servers at ``urls``, or the local engine on ``device`` if there are none."""
    sglang = config.rollout.sglang
    if not urls:
        from bapo_megatron.rollout.engines.local.engine import (
            LocalEngine,  # transformers takes seconds to import
        )
        from bapo_megatron.rollout.engines.local.model import LocalModel

        model = config.model
        load = partial(LocalModel, model.hf_path, config.rollout.max_batch, model.dtype, device)
        return [LocalEngine(await asyncio.to_thread(load))]
    session = await opened.enter_async_context(open_session())
    deadlines = Deadlines(60 * sglang.request_minutes, 60 * sglang.update_minutes)
    limits = limits_of(config.model.hf_path)
    return [SglangEngine(SglangServer(url, session), limits, sglang.on_update, deadlines) for url in urls]


def _note(events: list[dict[str, Any]], kind: str, **fields: Any) -> None:
    """Keep an event for the trainer, and say it at once."""
    events.append({"kind": kind, **fields})
    told = ", ".join(f"{name}={value}" for name, value in fields.items())
    with suppress(OSError):  # a log on a full disk
        print(f"sampler: {kind.replace('_', ' ')}: {told}", flush=True)


if __name__ == "__main__":
    main()
