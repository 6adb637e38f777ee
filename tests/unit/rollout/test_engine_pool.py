"""The engine pool: engines that fail in every way go into quarantine, and recover; the others continue."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bapo_megatron.hf.weight_files import INDEX
from bapo_megatron.interfaces import Confirm
from bapo_megatron.rollout.engines.pool import EnginePool, EnginesGone
from bapo_megatron.rollout.engines.pool_state import load_seconds
from bapo_megatron.types import GenerateRequest, Generation, StepBatch
from tests.support import sampling
from tests.support.sampling import ScriptedEngine, World, mixed, until

ONE, TWO = ("one",), ("bad", "good")


@asynccontextmanager
async def sampled(
    folder: Path, *names: str, rollout: dict[str, Any] | None = None, **limits: float
) -> AsyncIterator[tuple[World, list[ScriptedEngine]]]:
    """A run on engines of these names, which has its first batch; with other limits than ``PATIENCE``."""
    engines = [ScriptedEngine(mixed, name) for name in names]
    world = World(folder, engines, **(rollout or {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "PATIENCE", dataclasses.replace(sampling.PATIENCE, **limits))
        async with world.sampling():
            await world.batch(1)
            yield world, engines


def refuse(_request: GenerateRequest) -> None:
    raise ConnectionRefusedError("refused")


def versions(batch: StepBatch) -> set[int]:
    return {int(v) for group in batch.groups for one in group.rollouts for v in one.versions_R}


def lost(world: World) -> list[str]:
    """Names of the engines that were lost, with reasons."""
    return [f"{e['engine']}: {e['reason']}" for e in world.events if e["kind"] == "engine_lost"]


def hanging(world: World) -> list[str]:
    """Names of the engines reported as hanging, with reasons."""
    return [f"{e['engine']}: {e['reason']}" for e in world.events if e["kind"] == "engine_hangs"]


async def test_requests_of_a_lost_engine_are_resent_at_once(tmp_path: Path) -> None:
    """The engine hangs, then one request fails: its other requests do not wait for their deadlines."""
    bad, good = ScriptedEngine(mixed, "bad"), ScriptedEngine(mixed, "good")
    bad.gate.clear()

    def fail_once(request: GenerateRequest) -> None:
        if len(bad.asked) == 6:
            bad.ready = False  # or it would come back at once, and hang with what it is given then
            raise OSError("reset by peer")

    bad.trouble = fail_once
    world = World(tmp_path, [bad, good])
    async with world.sampling(most=6):
        batch = await world.batch(1, wait_s=20.0)
    assert len(batch.groups) == 4
    assert len(bad.asked) >= 6


def test_the_deadline_of_a_load_grows_with_its_bytes(tmp_path: Path) -> None:
    weight_map = {"first": "a.safetensors", "last": "b.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    sizes = {"a.safetensors": 3e9, "b.safetensors": 0.5e9, "mtp.safetensors": 2e9, "config.json": 7e9}
    for name, size in sizes.items():
        with (tmp_path / name).open("wb") as file:
            file.truncate(int(size))  # no blocks: a hole
    assert load_seconds(tmp_path, 600) == pytest.approx(600 + 3.5e9 / 100e6)
    assert load_seconds(tmp_path / "none", 600) == 600


async def test_a_slow_disk_does_not_count_as_a_hang(tmp_path: Path) -> None:
    """A load of 1.5 s, where 1 s is allowed and a minute for 6 GB; a busy machine may answer late."""
    weights = tmp_path / "v1"
    weights.mkdir()
    with (weights / "model.safetensors").open("wb") as file:
        file.truncate(6_000_000_000)
    async with sampled(tmp_path / "run", *ONE, silent_s=60.0) as (world, [engine]):
        load = engine.load

        async def slowly(folder: Path, version: int, confirm: Confirm) -> None:
            await asyncio.sleep(1.5)
            await load(folder, version, confirm)

        engine.load = slowly  # type: ignore[method-assign]
        await world.sampler.load_weights(weights, 1, 1)
        await until(lambda: world.pool.up == 1 and engine.version == 1)  # the monitor may load it
    assert not {"engine_hangs", "engine_lost"} & set(world.event_kinds())


async def test_an_engine_with_a_wrong_weight_version_goes_into_quarantine(tmp_path: Path) -> None:
    async with sampled(tmp_path, *TWO) as (world, (bad, _)):
        bad.told_version = 7
        await world.weights(1)
        assert versions(await world.batch(2)) == {1}
    assert "reports weight version 7" in lost(world)[0]


@pytest.mark.virtual_time
@pytest.mark.parametrize("fails", ["refused", "of weights 7, not of the run's"])
async def test_unknown_weights_end_a_request_like_a_lost_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """The one engine comes back each time. What it answers is not work: without another the run must end."""
    monkeypatch.setattr("bapo_megatron.rollout.engines.pool._MAX_BACKOFF_S", 0.0)
    async with sampled(tmp_path, *ONE) as (world, [engine]):
        right = engine._answer

        def answer(request: GenerateRequest, aborted: bool) -> Generation:
            found = right(request, aborted)
            assert len(found.versions_R) > 1
            return dataclasses.replace(found, versions_R=np.array([*found.versions_R[1:], 7], np.int32))

        worked_at, before = world.pool._worked_at, len(world.events)
        if fails == "refused":
            engine.trouble = refuse
        else:
            engine._answer = answer  # type: ignore[method-assign]
        await world.weights(1)
        asked = asyncio.create_task(world.sampler.next_batch(2, 30.0))
        await until(lambda: "request_refused" in world.event_kinds())
        await until(lambda: world.pool.up == 0)
        assert world.pool.down_since == worked_at
        asked.cancel()
    events = world.events[before:]
    kinds = [event["kind"] for event in events]
    assert kinds[: kinds.index("request_refused")].count("engine_lost") == 20
    refused = events[kinds.index("request_refused")]
    assert refused["detail"] == "20 engines were lost with request '4-0-0'"
    assert fails in lost(world)[0]


async def test_a_server_that_was_restarted_unnoticed_is_lost_at_its_first_tokens(tmp_path: Path) -> None:
    """It answers health checks and has weights that the run knows: those that it started with."""
    async with sampled(tmp_path, *TWO, rollout={"on_stale": "train"}) as (world, (bad, good)):
        await world.weights(1)
        await world.batch(2)
        await world.weights(2)
        assert (bad.version, good.version) == (2, 2)
        bad.version = bad.told_version = 0
        assert versions(await world.batch(3)) == {2}
        [reason] = lost(world)
        assert reason.startswith(
            "bad: answers with tokens of weights 0 after a load of 2: its server was rest"
        )
        bad.told_version = None
        await until(lambda: world.pool.up == 2)
        assert bad.version == 2


async def test_without_engines_the_run_waits_then_fails(tmp_path: Path) -> None:
    async with sampled(tmp_path, *ONE) as (world, [engine]):
        await world.weights(1)
        engine.trouble = refuse
        engine.ready = False
        assert await world.sampler.next_batch(2, 0.2) is None
        world.pool.down_since = (world.pool.down_since or 0) - 31 * 60
        with pytest.raises(EnginesGone, match=r"30 minutes: one: refused"):
            await world.sampler.next_batch(2, 0.1)
        engine.trouble, engine.ready = None, True
        assert len((await world.batch(2)).groups) == 4


async def test_requests_go_to_the_least_loaded_engine_within_its_limit(tmp_path: Path) -> None:
    engines = [ScriptedEngine(mixed, name) for name in "abc"]
    for engine in engines:
        engine.gate.clear()
    world = World(tmp_path, engines)
    async with world.sampling(most=3):
        asked = asyncio.create_task(world.batch(1))
        await asyncio.sleep(0.1)
        assert [len(engine.asked) for engine in engines] == [3, 3, 3]
        for engine in engines:
            engine.gate.set()
        assert len((await asked).groups) == 4


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("for ever", ["bad: not done in 1 s"]),
        ("to its own deadline", ["bad: no answer within 60 s"]),
        ("refused", []),
    ],
)
async def test_a_weight_load_past_its_deadline_is_reported_as_a_hang(
    tmp_path: Path, how: str, told: list[str]
) -> None:
    """The engine answers health checks, like a server whose ranks hang in a collective."""
    async with sampled(tmp_path, *TWO) as (world, (bad, _)):

        async def hang(folder: Path, version: int, confirm: Confirm) -> None:
            if how == "refused":
                raise RuntimeError("these are of another model")
            if how == "for ever":
                await asyncio.sleep(1000)
            try:
                await asyncio.wait_for(asyncio.sleep(1000), 0.1)
            except TimeoutError as error:
                raise RuntimeError("no answer within 60 s") from error

        load, bad.load = bad.load, hang  # type: ignore[method-assign]
        await world.weights(1)
        assert hanging(world) == told
        await asyncio.sleep(0.5)  # it is tried again, and not told again so soon
        assert hanging(world) == told
        assert world.pool.up == 1
        assert len((await world.batch(2)).groups) == 4
        await asyncio.wait_for(world.weights(2), 0.9)  # no longer waited for: an update may take 1 s
        bad.load = load  # type: ignore[method-assign]
        await until(lambda: world.pool.up == 2)
        assert bad.version == 2, "it came back with old weights"


async def test_a_silent_engine_is_reported_as_hanging(tmp_path: Path) -> None:
    async with sampled(tmp_path, *TWO, hang_s=0.4) as (world, (bad, _)):
        bad.ready = False
        await until(lambda: world.pool.up == 1)
        assert hanging(world) == []  # it may come back by itself
        await until(lambda: len(hanging(world)) == 2)  # ever later: now and 0.4 s later
        assert hanging(world)[0].startswith("bad: no answer for ")
        bad.ready = True
        await until(lambda: world.pool.up == 2)
        told = len(hanging(world))
        await asyncio.sleep(1.0)
        assert len(hanging(world)) == told


async def test_event_loop_lag_loses_no_engine(tmp_path: Path) -> None:
    """The sampler was stopped, or ten thousand answers came at once: silence is not the engines' fault."""
    async with sampled(tmp_path, *ONE, silent_s=1.5) as (world, [engine]):
        for _ in range(2):
            engine.ready = False  # its answers come too late for their limit
            time.sleep(4.0)
            await asyncio.sleep(0.3)
            engine.ready = True
            await asyncio.sleep(0.1)
        assert lost(world) == []


async def test_answers_to_requests_count_as_health_checks(tmp_path: Path) -> None:
    """A busy engine may not answer health checks."""
    async with sampled(tmp_path, *ONE, rollout={"max_staleness": 8}, silent_s=0.8) as (world, [busy]):
        busy.ready = False
        slot = world.pool.reserve()
        assert slot is not None
        for _ in range(12):
            await asyncio.sleep(0.1)
            await world.pool.generate(slot, busy.asked[0], {0}.__contains__, "these")
        assert world.pool.up == 1
        await until(lambda: world.pool.up == 0)  # nobody asks any more


@pytest.mark.parametrize(
    ("before_s", "late_s", "after_s", "excused"),
    [(0, 3.0, 0, True), (0, 0, 0, False), (1.0, 3.0, 0, True), (0, 3.0, 1.0, False)],
)
async def test_a_deadline_missed_by_event_loop_lag_is_no_hang(
    tmp_path: Path, before_s: float, late_s: float, after_s: float, excused: bool
) -> None:
    """It is lost, as nobody knows what weights it has; but that it hangs is said only if it had its time.

    Of a load of several calls one has timed out, so what counts is when the sampler was late: a busy one is
    now and then, and that excuses nothing that comes later.
    """
    async with sampled(tmp_path, *TWO, update_s=30.0) as (world, (slow, _)):

        async def load(folder: Path, version: int, confirm: Confirm) -> None:
            await asyncio.sleep(before_s)
            time.sleep(late_s)
            await asyncio.sleep(after_s)
            raise TimeoutError("no answer within 60 s")

        slow.load = load  # type: ignore[method-assign]
        await world.weights(1)
        assert lost(world)[0].startswith("bad: ")
        assert bool(hanging(world)) is not excused


async def test_a_hang_of_a_day_is_reported_every_hour() -> None:
    """Each time its server is restarted: what it waits for in its start may be there again."""
    told: list[str] = []
    minutes = iter(range(24 * 60))
    pool = EnginePool([ScriptedEngine(mixed)], 1, lambda kind, **_fields: told.append(kind))
    await pool.close()
    pool._clock = SimpleNamespace(now=lambda: 60.0 * next(minutes))  # type: ignore[assignment]
    for _ in range(24 * 60):
        pool._report_hang(pool._slots[0], "no answer")
    assert 24 <= len(told) < 32
