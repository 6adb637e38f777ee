"""The sampler process: an event loop with the sampler, its engines and its clients of the worker processes.

    python -m bapo_megatron.rollout.sampler.process FD      (FD: the inherited pipe to rank 0, ``client.py``)

The first message is a ``Setup``. Then each call ``(method, arguments)`` gets one reply, ``("ok", value,
events)`` or ``("error", kind, text, events)``, preceded by heartbeats unless this process hangs. ``events``
are the run events since the last reply. The message None, or the end of the trainer, which closes the pipe,
ends this process: everything it has reported is in the journal.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import sys
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import uvloop

from bapo_megatron.config import RunConfig
from bapo_megatron.data.problem_sets import Suite
from bapo_megatron.data.prompts import PromptSet
from bapo_megatron.errors import ConfigError, RunStopped, StorageFailed, printable
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.interfaces import Need
from bapo_megatron.reward.pool import RewardPool
from bapo_megatron.rollout.engines.backend import EngineError, engine_backend
from bapo_megatron.rollout.engines.colocated_pool import ColocatedPool, open_pool
from bapo_megatron.rollout.engines.pool import EnginePool, EnginesGone
from bapo_megatron.rollout.engines.requests import Dataset, stop_token_ids
from bapo_megatron.rollout.engines.weight_updates import driver_class
from bapo_megatron.rollout.sampler.group_sampler import GroupSampler
from bapo_megatron.rollout.sampler.held_out import HeldOut
from bapo_megatron.rollout.sampler.scoring import Scorer
from bapo_megatron.rollout.sampler.teacher import Teacher
from bapo_megatron.rollout.sampler.turns import open_environments
from bapo_megatron.runtime.device import environment_variable
from bapo_megatron.runtime.exit_codes import ignore_signals
from bapo_megatron.runtime.garbage import collect_rarely
from bapo_megatron.runtime.processes import allow_open_files, die_with_parent
from bapo_megatron.runtime.storage import FailingDiskError, OldFiles, is_of_failing_disk

T = TypeVar("T")

ALIVE = ("alive",)  # heartbeat message, sent while a reply is being computed
_BEAT_S = 5.0  # seconds between heartbeats


@dataclass(frozen=True)
class Setup:
    """First message to the sampler process: configuration, dataset, suites, engine addresses or device."""

    config: RunConfig
    problems: PromptSet
    urls: tuple[str, ...]
    """Engine server addresses; empty for an in-process engine."""
    device: str
    """Device of an in-process engine."""
    held_out: tuple[Suite, ...] = ()
    """Suites named by `config.evaluation`."""


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's `mallopt` (malloc.h)
_KEPT_BYTES, _LARGEST_BYTES = 256 << 20, 32 << 20
"""Freed bytes kept at a heap's end; minimum size of a separately mapped buffer (glibc: at most 32 MiB)."""

_SENT_ERRORS = (ConfigError, RunStopped, EnginesGone, EngineError, OSError)
"""Errors sent to the trainer. Any other error crashes this process, and the trainer restarts it."""

WAKE_CALLS = ("wake", "begin", "receive", "confirm", "resume")
"""Wake-up calls of colocated engines; not repeated if this process dies, as engine state is then unknown."""


class Service:
    """The sampler process's side of the RPC: ``answer`` makes one call for the trainer and returns the reply.
    Errors in ``_SENT_ERRORS`` become replies; any other error ends the process."""

    def __init__(
        self,
        sampler: GroupSampler,
        pool: EnginePool,
        held_out: HeldOut,
        events: list[dict[str, Any]],
        sync: str,
    ) -> None:
        """``sync``: name of the run's weight transport."""
        self._sampler, self._pool, self._held_out = sampler, pool, held_out
        self._events = events
        self._updates = driver_class(sync)(pool)
        self._methods = self._table()

    async def answer(self, method: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the reply to a call, with the run events since the last reply."""
        try:
            reply: tuple[Any, ...] = ("ok", await self._methods[method](*arguments))
        except _SENT_ERRORS as error:
            reply = _failed(error)
        events = self._events.copy()
        self._events.clear()
        return (*reply, events)

    def _table(self) -> dict[str, Callable[..., Awaitable[Any]]]:
        updates, pool = self._updates, self._pool
        methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "start": self._start,
            "next_batch": self._next_batch,
            "evaluated": self._evaluated,
            "load_weights": self._load_weights,
            "keep_weights": self._keep_weights,
            "state": self._state,
            "checkpointed": self._checkpointed,
            "begin": self._begin,
            **{name: getattr(updates, name) for name in ("receive", "confirm", *updates.calls)},
            "resume": self._resume,
        }
        if isinstance(pool, ColocatedPool):
            methods |= {"release": pool.release, "wake": pool.wake, "resume": updates.resume}
            methods["admit"] = partial(self._admit, pool)
            methods["expect_handles"] = partial(self._expect_handles, pool)
        return methods

    async def _start(self, first_step: int, state: dict[str, Any] | None) -> None:
        self._held_out.delete(first=first_step)
        await self._sampler.start(first_step, state)

    async def _checkpointed(self, oldest: int) -> None:
        last = await self._sampler.checkpointed(oldest)
        # Keep the step's own file: the trainer may still read it.
        await asyncio.to_thread(self._held_out.delete, 0, last - 1)

    async def _next_batch(self, step: int, wait_s: float) -> Path | Need | None:
        return self._path_or_need(await self._sampler.next_batch(step, wait_s))

    async def _evaluated(self, step: int, wait_s: float) -> Path | Need | None:
        path = await self._held_out.responses(step, wait_s)
        self._sampler.check_engines()
        return self._path_or_need(path)

    def _path_or_need(self, path: Path | None) -> Path | Need | None:
        return Need.WEIGHTS if path is None and self._pool.needs_weights else path

    async def _load_weights(self, folder: Path, version: int, step: int) -> None:
        # Before the load, so that no training round begins during it (`is_held` in `_open`).
        self._held_out.expect(step, version)
        await self._sampler.load_weights(folder, version, step)
        self._held_out.begin()

    async def _keep_weights(self, version: int, step: int) -> None:
        self._sampler.record_weights(version, step)

    async def _expect_handles(self, pool: ColocatedPool, version: int, step: int) -> None:
        self._held_out.expect(step, version)
        self._sampler.expect_weights(version)
        pool.expect_handles(version)
        self._sampler.record_weights(version, step)
        self._held_out.begin()

    async def _admit(self, pool: ColocatedPool) -> None:
        self._updates.cancel()  # for ended engines, which the pool now gives weights by disk
        await pool.admit()

    async def _begin(self, version: int, *names: Collection[str]) -> list[str]:
        self._sampler.expect_weights(version)
        return await self._updates.begin(version, *names)

    async def _resume(self, version: int, step: int) -> None:
        # Recorded only after digest verification, because the record opens admission for the next step.
        await self._updates.resume()
        self._held_out.expect(step, version)
        self._sampler.record_weights(version, step)
        self._held_out.begin()

    async def _state(self) -> dict[str, Any]:
        return self._sampler.state()


def _failed(error: Exception) -> tuple[str, str, str]:
    # The trainer distinguishes errors by name; a failing disk needs the same name wherever it occurs.
    kind = FailingDiskError if is_of_failing_disk(error) or isinstance(error, StorageFailed) else type(error)
    return "error", kind.__name__, str(error)


def main() -> None:
    """Run the sampler process until the pipe closes."""
    die_with_parent()  # enforced by the kernel, even if this process is stopped or hangs
    ignore_signals()  # the trainer needs the sampler until it has saved
    allow_open_files()  # one connection per in-flight request
    pipe = Connection(int(sys.argv[1]))
    try:
        setup: Setup | None = pipe.recv()
        if setup is None:  # the trainer closed the sampler before any call
            return
        use_threads(setup.config.threads)
        gc.freeze()  # collections need not traverse the dataset
        collect_rarely()  # with tens of thousands of requests they take half a core
        if setup.config.rollout.route_replay != "off":
            keep_freed_memory()
        uvloop.run(_serve(pipe, setup))
    except (EOFError, ConnectionResetError, BrokenPipeError):
        os._exit(0)  # the trainer ended; a clean exit would wait for decoding threads


def use_threads(of_a_rank: int | None) -> None:
    """Let an in-process engine use the threads of this machine's ranks, which are idle while it samples.
    ``of_a_rank``: threads per rank; None: torch's default."""
    if of_a_rank is not None:
        ranks = environment_variable("LOCAL_WORLD_SIZE") or environment_variable("WORLD_SIZE") or "1"
        torch.set_num_threads(of_a_rank * int(ranks))


def keep_freed_memory() -> None:
    """Make glibc keep up to ``_KEPT_BYTES`` of freed memory at a heap's end, for multi-megabyte answers. By
    default it returns each buffer to the system, and page faults for the next one take half of the CPU time
    of receiving routes. No effect with another C library."""
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)


async def _serve(pipe: Connection, setup: Setup) -> None:
    events: list[dict[str, Any]] = []
    async with AsyncExitStack() as opened:
        try:
            sampler, pool, held_out = await with_heartbeats(
                pipe, _open(setup, opened, partial(_record_event, events))
            )
        except (ConfigError, RunStopped) as error:  # after other errors the trainer restarts this process
            await asyncio.to_thread(pipe.recv)  # the trainer's first call, to which the error is the reply
            _send(pipe, (*_failed(error), events))
            return
        sync = setup.config.rollout.engine_config.sync
        service = Service(sampler, pool, held_out, events, sync)
        while True:
            try:
                call = await asyncio.to_thread(pipe.recv)
            except (EOFError, OSError):
                # A clean exit would wait for engines, and make the next run wait for the journal's lock.
                os._exit(0)
            if call is None:
                break
            reply = await with_heartbeats(pipe, service.answer(*call))
            await asyncio.to_thread(_send, pipe, reply)
    _send(pipe, ("ok", None, events))


async def with_heartbeats(pipe: Connection, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work`` and return its result, sending heartbeats meanwhile. The event loop sends them, so they
    stop when it hangs; long work must not block it."""
    task = asyncio.create_task(work)
    while not (await asyncio.wait({task}, timeout=_BEAT_S))[0]:
        await asyncio.to_thread(_send, pipe, ALIVE)
    return task.result()


def _send(pipe: Connection, message: Any) -> None:
    """Send a message to the trainer; exit immediately if the trainer has ended."""
    try:
        pipe.send(message)
    except OSError:
        os._exit(0)


async def _open(
    setup: Setup, opened: AsyncExitStack, report: Callable[..., None]
) -> tuple[GroupSampler, EnginePool, HeldOut]:
    config, rollout = setup.config, setup.config.rollout
    reward_pool = RewardPool(config.reward, rollout.max_response_tokens, config.reward_functions)
    await reward_pool.start()
    opened.push_async_callback(reward_pool.close)
    scorer = Scorer(reward_pool, config.reward.failed, report)
    rounds = engine_backend(rollout.engine).rounds
    whole_round = rollout.prompts_per_step * rollout.group_size * 1000 if rounds else None
    pool = await open_pool(config, setup.urls, setup.device, report, opened, whole_round)
    tokenizer = load_tokenizer(config.model.hf_path)
    environments = await open_environments(config, tokenizer, report, opened)
    stops, problems = stop_token_ids(config.model.hf_path, tokenizer), setup.problems
    dataset = Dataset(problems.prompts, tokenizer, stops, problems.sources, problems.tools_sha256)
    held_out = HeldOut(config, setup.held_out, dataset, pool, scorer, environments, OldFiles(report))
    teacher = await _open_teacher(config, dataset, opened)
    # In rounds, the last bits of answers depend on the batch: evaluation and training must not mix.
    is_held = lambda: rounds and held_out.is_busy  # noqa: E731
    sampler = GroupSampler(config, dataset, pool, scorer, report, rounds, is_held, environments, teacher)
    opened.push_async_callback(sampler.close)
    opened.callback(held_out.close)
    return sampler, pool, held_out


async def _open_teacher(config: RunConfig, dataset: Dataset, opened: AsyncExitStack) -> Teacher | None:
    distillation = config.algorithm.distillation
    if not distillation.enabled:
        return None
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    teacher = Teacher(distillation, longest)
    opened.push_async_callback(teacher.close)
    await teacher.open(dataset)
    return teacher


def _record_event(events: list[dict[str, Any]], kind: str, **fields: Any) -> None:
    events.append({"kind": kind, **fields})
    shown = {name: f"\n{text}" if "\n" in (text := str(value)) else text for name, value in fields.items()}
    text = ", ".join(f"{name}={value}" for name, value in shown.items())
    with suppress(OSError):  # the log's disk may be full
        print(printable(f"sampler: {kind.replace('_', ' ')}: {text}"), flush=True)


if __name__ == "__main__":
    main()
