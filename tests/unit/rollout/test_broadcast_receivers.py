"""The receivers of a weight broadcast: order of calls, ranks, digests, and the engines that take part."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.config import EngineConfig
from bapo_megatron.interfaces import Engine, ReceivesBroadcast
from bapo_megatron.rollout.engines.backend import EngineError
from bapo_megatron.rollout.engines.broadcast_receivers import PoolBroadcast, WeightReceivers
from bapo_megatron.rollout.engines.pool import EnginePool
from bapo_megatron.rollout.engines.sglang.engine import SglangEngine
from bapo_megatron.types import BroadcastGroup, BucketSpec
from tests.support.receiving_engine import ReceivingEngine
from tests.support.sampling import PATIENCE, ScriptedEngine, mixed

GROUP = BroadcastGroup("127.0.0.1", 1234, "weights", 6, "gloo")
BUCKET = BucketSpec(("w",), ("float32",), ((1,),), 4)


async def one_update(receivers: WeightReceivers | PoolBroadcast, version: int = 5) -> str:
    await receivers.begin()
    await receivers.receive(BUCKET)
    return await receivers.finish(version)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


def test_which_engines_receive_broadcasts() -> None:
    assert isinstance(ReceivingEngine("a"), ReceivesBroadcast)
    assert not isinstance(ScriptedEngine(mixed), ReceivesBroadcast)
    limits: Any = None
    server: Any = type("Server", (), {"url": "http://a"})()
    assert isinstance(SglangEngine(server, limits), ReceivesBroadcast)


def test_all_engines_finish_a_call_before_the_next_begins() -> None:
    calls: list[str] = []

    async def go() -> None:
        receivers = WeightReceivers([ReceivingEngine("a", 2, calls), ReceivingEngine("b", 3, calls)])
        assert receivers.ranks == 5
        await receivers.join(GROUP)
        assert await one_update(receivers) == "same"

    run(go())
    steps = ["leave weights", None, "begin", "receive w in weights", "end", "version 5", "resume"]
    assert calls[2:4] == ["a join weights at 1", "b join weights at 3"]  # rank 0 sends, a has two
    for number, step in enumerate(steps):
        if step:
            assert calls[2 * number : 2 * number + 2] == [f"a {step}", f"b {step}"]
    assert len(calls) == 14


def test_no_engine_samples_from_weights_with_a_wrong_digest() -> None:
    calls: list[str] = []
    wrong = ReceivingEngine("b", calls=calls)
    wrong.digest = "other"

    async def go() -> None:
        await one_update(WeightReceivers([ReceivingEngine("a", calls=calls), wrong]))

    with pytest.raises(EngineError, match="different weights after version 5: a: same, b: other"):
        run(go())
    assert not [call for call in calls if "version" in call or "resume" in call]


@pytest.mark.parametrize("step", ["begin", "receive w in weights", "end", "version 5", "resume"])
def test_any_exception_of_an_engine_becomes_an_engine_error(step: str) -> None:
    bad = ReceivingEngine("bad")
    bad.fails_at = step

    async def go() -> None:
        receivers = WeightReceivers([ReceivingEngine("good"), bad])
        await receivers.join(GROUP)
        await one_update(receivers)

    with pytest.raises(EngineError, match=f"bad does not {step}"):
        run(go())


async def in_pool(engines: list[Engine]) -> tuple[EnginePool, PoolBroadcast, list[str]]:
    events: list[str] = []
    pool = EnginePool(
        engines, 4, lambda kind, **fields: events.append(f"{kind} {fields['engine']}"), PATIENCE
    )
    await pool.update(Path("v1"), 1)
    return pool, PoolBroadcast(pool, EngineConfig()), events


def test_engines_that_cannot_receive_go_into_quarantine() -> None:
    async def go() -> None:
        can = ReceivingEngine("can")
        pool, broadcast, events = await in_pool([can, ScriptedEngine(mixed, "cannot")])
        assert pool.up == 2
        assert await broadcast.gather() == (1, False)
        await broadcast.join(GROUP)
        await one_update(broadcast, 2)
        assert events[2:] == ["engine_lost cannot"]
        assert pool.up == 1
        assert can.version == 2
        assert await broadcast.gather() == (1, True)  # it is in the group still
        await broadcast.fail("the sender died")
        assert pool.up == 0
        assert await broadcast.gather() == (1, False)
        await pool.close()

    run(go())
