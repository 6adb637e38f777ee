"""Connections to SGLang servers: names that move or cannot be looked up, and long silences."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import numpy as np
import pytest
import uvloop

from bapo_megatron.rollout.engines.sglang.http_client import HttpSessions, ServerError, SglangServer
from bapo_megatron.types import GenerateRequest, SamplingParams
from tests.support.fake_sglang import FakeServer, Keyless

REQUEST = GenerateRequest("r", np.array([1, 2]), SamplingParams(1.0, 2, ()))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.stop()


def test_a_name_server_that_fails_for_a_while_loses_no_server(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten minutes after the name was asked for: a health check is a new connection."""

    def names_fail(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    async def asked_again() -> int:
        sessions = HttpSessions()
        client = SglangServer(server.url.replace("127.0.0.1", "localhost"), sessions, Keyless())
        try:
            await client.weight_version()
            monkeypatch.setattr(socket, "getaddrinfo", names_fail)
            later = time.monotonic() + 600
            monkeypatch.setattr("aiohttp.connector.monotonic", lambda: later)
            return await client.weight_version()
        finally:
            await sessions.close()

    assert asyncio.run(asked_again()) == 0


def test_a_server_that_has_moved_is_looked_up_again(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the hour for which addresses are kept: its name has another one after a restart."""
    port, known = int(server.url.rpartition(":")[2]), ["127.0.0.2", "127.0.0.1"]

    def look_up(*_: Any, **__: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known.pop(0), port))]

    async def asked_twice() -> int:
        sessions = HttpSessions()
        client = SglangServer(f"http://server-0:{port}", sessions, Keyless())
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        try:
            with pytest.raises(ServerError, match="Cannot connect"):
                await client.weight_version()
            return await client.weight_version()
        finally:
            await sessions.close()

    assert asyncio.run(asked_twice()) == 0
    assert known == []


def test_a_connection_without_traffic_is_kept_open(server: FakeServer) -> None:
    """An answer may take an hour, without a byte before it: gateways forget idle connections in minutes."""

    async def options() -> list[int]:
        sessions = HttpSessions()
        try:
            await SglangServer(server.url, sessions, Keyless()).generate(REQUEST, "r1")
            assert sessions.new._read_bufsize == sessions.kept._read_bufsize, (
                "resent requests have routes, too"
            )
            connector = sessions.kept.connector
            assert isinstance(connector, aiohttp.TCPConnector)
            [[(protocol, _)]] = connector._conns.values()
            assert protocol.transport is not None
            used = protocol.transport.get_extra_info("socket")
            of_tcp = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            found = [used.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)]
            return [*found, *(used.getsockopt(socket.IPPROTO_TCP, option) for option in of_tcp)]
        finally:
            await sessions.close()

    for run in (asyncio.run, uvloop.run):
        is_on, idle_s, interval_s, count = run(options())
        assert is_on == 1
        assert idle_s <= 120, "Azure's balancers forget a connection after 240 s, AWS's after 350 s"
        assert idle_s + count * interval_s < 300
