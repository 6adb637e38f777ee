"""Connections to SGLang servers that are silent for long."""

from __future__ import annotations

import asyncio
import socket

import numpy as np
import uvloop

from bapo_megatron.rollout.engines.sglang.http_client import SglangServer, http_session
from bapo_megatron.types import GenerateRequest, SamplingParams
from tests.support.fake_sglang import FakeServer, Keyless

REQUEST = GenerateRequest("r", np.array([1, 2]), SamplingParams(1.0, 2, ()))


def test_a_connection_without_traffic_is_kept_open() -> None:
    """An answer may take an hour, without a byte before it: gateways forget idle connections in minutes."""
    server = FakeServer()

    async def options(rid: str) -> list[int]:
        session = http_session()
        client, server.on_abort = SglangServer(server.url, session, Keyless()), [1]
        running = asyncio.create_task(client.generate(REQUEST, rid))
        assert session.connector is not None
        while not session.connector._acquired or server.on_abort:
            await asyncio.sleep(0.01)
        [protocol] = session.connector._acquired
        assert protocol.transport is not None
        used = protocol.transport.get_extra_info("socket")
        of_tcp = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        found = [used.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)]
        found += [used.getsockopt(socket.IPPROTO_TCP, option) for option in of_tcp]
        await client.abort_all()
        await running
        await session.close()
        return found

    for run in (asyncio.run, uvloop.run):
        is_on, idle_s, interval_s, count = run(options(run.__module__))
        assert is_on == 1
        assert idle_s <= 120, "Azure's balancers forget a connection after 240 s, AWS's after 350 s"
        assert idle_s + count * interval_s < 300
    server.stop()
