"""Authorization at SGLang servers: which servers are sent the run's key, and the errors if one is not."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bapo_megatron.config import SglangConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.backend import EngineError
from bapo_megatron.rollout.engines.sglang.authorization import (
    Authorization,
    check_keys_asked,
    known_key,
    main,
)
from bapo_megatron.rollout.engines.sglang.http_client import HttpSessions, ServerError, SglangServer
from bapo_megatron.rollout.engines.sglang_launch.api_key import ApiKey
from tests.support.fake_sglang import FakeServer

KEY, OTHER = "k" * 43, "o" * 43


class Server(FakeServer):
    """A fake SGLang server that asks for a key."""

    def __init__(self, key: str | None) -> None:
        self.key, self.asks = key, True
        self.hangs_up = 0
        """Number of calls whose connection is closed without an answer."""
        self.seen: list[tuple[str, str | None]] = []
        """Paths and authorization headers of the received calls."""
        super().__init__()

    @property
    def keys_seen(self) -> set[str | None]:
        return {authorization for _, authorization in self.seen}

    async def _handle(self, request: web.Request) -> web.Response:
        authorization = request.headers.get("Authorization")
        self.seen.append((request.path, authorization))
        if self.hangs_up:
            self.hangs_up -= 1
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if self.asks and self.key and authorization != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized", "sent": authorization}, status=401)
        if request.path == "/moved":
            raise web.HTTPTemporaryRedirect("/model_info")
        return await super()._handle(request)


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def start(*arguments: Any, **more: Any) -> Server:
        made.append(Server(*arguments, **more))
        return made[-1]

    yield start
    for server in made:
        server.stop()


def known(value: str = KEY) -> ApiKey:
    return ApiKey(value, Path("RUN/api_key"))


@asynccontextmanager
async def client_of(server: Server, key: Callable[[], ApiKey | None], **more: Any) -> AsyncIterator[Any]:
    sessions = HttpSessions()
    try:
        yield SglangServer(server.url, sessions, Authorization(server.url, key, **more))
    finally:
        await sessions.close()


async def ask(server: Server, key: ApiKey | None, **more: Any) -> int:
    async with client_of(server, lambda: key, **more) as client:
        found: int = await client.weight_version()
        return found


async def test_a_server_that_asks_for_no_key_is_not_sent_it(
    serve: Callable[..., Server], capsys: pytest.CaptureFixture[str]
) -> None:
    genuine, other, open_ = serve(KEY), serve(OTHER), serve(None)
    assert await ask(genuine, known()) == 0
    assert f"Bearer {KEY}" in genuine.keys_seen
    with pytest.raises(ServerError, match=r"asks for another API key than that in RUN/api_key") as raised:
        await ask(other, known())
    assert KEY not in str(raised.value)  # the server has sent it back
    assert await ask(open_, known()) == 0  # used, and warned of
    assert open_.keys_seen == {None}
    printed = capsys.readouterr().out
    assert printed.count("warning:") == 1
    assert f"{open_.url} asks for no API key: everybody who reaches it can sample" in printed
    assert KEY not in printed


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"is_required": True}, "asks for no API key, and rollout.sglang.require_api_key is set"),
        ({"is_own": True}, "another program has taken its port"),  # before the run's server listens there
    ],
)
async def test_a_server_without_a_key_is_refused(
    serve: Callable[..., Server], how: dict[str, bool], says: str
) -> None:
    opened, closed = serve(None), serve(KEY)
    with pytest.raises(EngineError, match=says):
        await ask(opened, known(), **how)
    assert opened.keys_seen == {None}
    assert await ask(closed, known(), **how) == 0


def test_a_recipe_that_requires_keys_refuses_a_server_without_one_before_the_run(
    serve: Callable[..., Server],
) -> None:
    opened, closed = serve(None), serve(KEY)
    check_keys_asked(SglangConfig(urls=(opened.url,)))
    check_keys_asked(SglangConfig(urls=(closed.url, "http://127.0.0.1:9"), require_api_key=True))
    with pytest.raises(ConfigError, match=f"require_api_key is set, and {opened.url} asks for no key"):
        check_keys_asked(SglangConfig(urls=(closed.url, opened.url), require_api_key=True))


async def test_a_server_is_asked_again_after_a_failed_connection(serve: Callable[..., Server]) -> None:
    server = serve(KEY)

    def questions() -> int:
        return sum(authorization is None for _, authorization in server.seen)

    async with client_of(server, known) as client:
        assert await client.is_alive()
        assert await client.is_alive()
        assert questions() == 1
        server.hangs_up = 2  # aiohttp reads once more by itself
        assert not await client.is_alive()
        server.asks = False  # another program has its address now, and answers everybody
        assert not await client.is_alive()
        with pytest.raises(EngineError, match="asks for no API key, and the server that was there does"):
            await client.weight_version()
        server.asks = True
        assert await client.is_alive()


async def test_a_probe_does_not_wait_for_the_loops_threads(serve: Callable[..., Server]) -> None:
    """Nor do those threads wait for probes: the sampler's log is written by them."""
    release, server = threading.Event(), serve(KEY)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    busy = asyncio.ensure_future(asyncio.to_thread(release.wait))
    try:
        assert await asyncio.wait_for(ask(server, known()), 120) == 0
    finally:
        release.set()
        await busy


async def test_a_key_made_after_the_client_is_found(serve: Callable[..., Server], tmp_path: Path) -> None:
    """A trainer with `urls` may start before the first `bapo rollout-server`, which makes the run's key."""
    path = tmp_path / "api_key"
    async with client_of(serve(KEY), functools.partial(known_key, SglangConfig(), tmp_path)) as client:
        with pytest.raises(ServerError, match="asks for an API key"):
            await client.weight_version()
        path.write_text("short")
        path.chmod(0o600)
        with pytest.raises(EngineError, match="must hold one line"):
            await client.weight_version()
        path.write_text(KEY)
        assert await client.weight_version() == 0


async def test_a_redirect_is_not_followed(serve: Callable[..., Server]) -> None:
    server = serve(KEY)
    async with client_of(server, known) as client:
        with pytest.raises(ServerError, match="status 307"):
            await client._control("/moved")
    assert server.seen[-1][0] == "/moved"


def test_the_command_line_says_whether_a_server_takes_the_key(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    """As slurm/task.sh asks for it before it registers a server."""
    key_file = tmp_path / "api_key"
    key_file.write_text(KEY)
    key_file.chmod(0o600)
    genuine, thief, other = serve(KEY), serve(None), serve(OTHER)
    main(genuine.url, str(key_file))
    for url, file in (
        (thief.url, key_file),
        (other.url, key_file),
        ("http://127.0.0.1:9", key_file),
        (genuine.url, tmp_path / "no"),
    ):
        with pytest.raises(SystemExit, match=f"^{url}: ") as ended:
            main(url, str(file))
        assert KEY not in str(ended.value)
