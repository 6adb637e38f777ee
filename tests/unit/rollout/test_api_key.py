"""The API key of a run: its file, the proof of a server, and what every endpoint answers without it."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from aiohttp import web

import bapo_megatron.rollout.engines.sglang_launch as launch_folder
from bapo_megatron.config import DataConfig, ModelConfig, RolloutConfig, RunConfig, SglangConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.sglang import server_process as process
from bapo_megatron.rollout.engines.sglang.authorization import (
    Authorization,
    KnownKey,
    check_keys_asked,
    known_key,
    servers_key_file,
)
from bapo_megatron.rollout.engines.sglang.http_client import HttpSessions, ServerError, SglangServer
from bapo_megatron.rollout.engines.sglang_launch import api_key
from bapo_megatron.rollout.engines.sglang_launch.api_key import (
    VARIABLE,
    ApiKey,
    ask_proof,
    make_key_file,
    proof_of,
    read_key_file,
)
from bapo_megatron.types import BroadcastGroup, BucketSpec, GenerateRequest, SamplingParams

KEY, OTHER = "k" * 43, "o" * 43
FOLDER = Path(launch_folder.__file__).parent


def config_in(directory: Path, **sglang: Any) -> RunConfig:
    rollout = RolloutConfig(engine="sglang", sglang=SglangConfig(**sglang))
    return RunConfig("x", ModelConfig(Path("m")), DataConfig(Path("d")), rollout=rollout, run_dir=directory)


def write_key(path: Path, key: str = KEY, mode: int = 0o600) -> Path:
    path.write_text(key + "\n")
    path.chmod(mode)
    return path


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def access(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The launcher's module, imported as SGLang's environment does it: its folder on the path."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import access as found

    yield found
    for name in ("access", "api_key"):
        sys.modules.pop(name, None)


# --- the file


def test_the_key_of_a_run_is_random_and_read_by_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        file = servers_key_file(config_in(tmp_path / "run"))
    finally:
        os.umask(before)
    assert (file.name, stat.S_IMODE(file.stat().st_mode)) == ("api_key", 0o600)
    first = read_key_file(file).value
    assert len(first) >= 43  # 256 bits in base 64
    assert servers_key_file(config_in(tmp_path / "run")) == file
    assert read_key_file(file).value == first  # kept over resumes
    assert read_key_file(servers_key_file(config_in(tmp_path / "other"))).value != first
    assert [path.name for path in file.parent.iterdir()] == ["api_key"]


def test_of_many_that_make_the_key_at_once_one_wins(tmp_path: Path) -> None:
    def make(_number: int) -> str:
        make_key_file(tmp_path / "api_key")
        return read_key_file(tmp_path / "api_key").value

    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(make, range(64)))) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_a_key_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ConfigError, match=r"cannot be made.*No space left.*rollout\.sglang\.api_key_file"):
        servers_key_file(config_in(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = write_key(tmp_path / "api_key", mode=mode)
    with pytest.raises(ConfigError, match=f"has mode {mode:04o}.*chmod 600") as raised:
        known_key(SglangConfig(), tmp_path)
    assert KEY not in str(raised.value)
    with pytest.raises(ConfigError, match=r"named by rollout\.sglang\.api_key_file"):
        known_key(SglangConfig(api_key_file=file), tmp_path)


@pytest.mark.parametrize("text", ["", "short", "with a space in it, and long", "x" * 600, "zwölf" * 9])
def test_what_is_no_key_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    write_key(tmp_path / "api_key", text)
    with pytest.raises(ConfigError, match="must hold one line of 16 to 512") as raised:
        known_key(SglangConfig(), tmp_path)
    assert not text or text not in str(raised.value)


def test_a_folder_or_a_pipe_is_no_key(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "api_key", 0o600)
    with pytest.raises(ConfigError, match="no regular file"):
        known_key(SglangConfig(), tmp_path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        known_key(SglangConfig(api_key_file=tmp_path / "none"), tmp_path)


def test_which_key_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe's file, else the environment's, else the run's own, else none."""
    assert known_key(SglangConfig(), tmp_path) is None
    own = write_key(tmp_path / "api_key")
    assert known_key(SglangConfig(), tmp_path) == KnownKey(ApiKey(KEY, own), is_given=False)
    monkeypatch.setenv(VARIABLE, str(write_key(tmp_path / "second", OTHER)))
    assert known_key(SglangConfig(), tmp_path) == KnownKey(ApiKey(OTHER, tmp_path / "second"), True)
    third = write_key(tmp_path / "third", "t" * 16)
    assert known_key(SglangConfig(api_key_file=third), tmp_path) == KnownKey(ApiKey("t" * 16, third), True)
    assert KEY not in repr(KnownKey(ApiKey(KEY, own), False))


@pytest.mark.parametrize("flag", ["--api-key=secret", "--api-key", "--admin-api-key"])
def test_a_key_in_the_flags_is_refused(tmp_path: Path, flag: str) -> None:
    config = config_in(tmp_path, flags=(flag, "x"))
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.flags: --.*api-key would show") as raised:
        config.check()
    assert "secret" not in str(raised.value)


# --- the server's command line and log


def test_no_command_line_and_no_variable_holds_the_key(tmp_path: Path) -> None:
    file = servers_key_file(config_in(tmp_path))
    key = read_key_file(file).value
    for cuda in (False, True):
        command = process.server_command(Path("python"), tmp_path, "127.0.0.1", 1, cuda)
        environment = process.server_environment(cuda, key_file=file)
        assert environment[VARIABLE] == str(file)
        assert not [text for text in (*command, *environment.values()) if key in text]
        assert VARIABLE not in process.server_environment(cuda)


def test_rollout_server_makes_the_key_before_the_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    became: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execvpe", lambda _file, line, environment: became.append((line, environment)))
    run = config_in(tmp_path / "run", python=Path(sys.executable))
    process.serve(process.ServeCommand(run, "10.0.0.7", 30001), cuda=False)
    [(line, environment)] = became
    key = read_key_file(tmp_path / "run/api_key").value
    assert environment[VARIABLE] == str(tmp_path / "run/api_key")
    assert line[line.index("--host") + 1] == "10.0.0.7"
    assert key not in " ".join(line)
    assert key not in "".join(capfd.readouterr())


def test_no_log_record_shows_the_key(
    tmp_path: Path, access: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang writes all its settings into its log."""
    monkeypatch.setenv(VARIABLE, str(write_key(tmp_path / "api_key")))
    before = logging.getLogRecordFactory()
    try:
        access.install()
        logging.getLogger("x").warning(f"server_args={{'api_key': '{KEY}', 'port': 1}}")
        logging.getLogger("x").warning("%s: %d", {"api_key": KEY}, 3)
        logging.getLogger("x").warning("%s of %d", "all", 2)
    finally:
        logging.setLogRecordFactory(before)
    assert KEY not in caplog.text
    assert [record.getMessage() for record in caplog.records] == [
        *("server_args={'api_key': '***', 'port': 1}", "{'api_key': '***'}: 3", "all of 2")
    ]


# --- the layer before SGLang


class Asgi:
    """An ASGI server's part: what the middleware answers to one connection, or that it let it pass."""

    def __init__(self, access: ModuleType) -> None:
        self.passed: list[str] = []
        self._app = access.KeyRequired(self._inner, KEY)

    async def _inner(self, scope: Any, _receive: Any, _send: Any) -> None:
        self.passed.append(scope.get("path", scope["type"]))

    def call(self, path: str, *authorization: str, kind: str = "http", query: str = "") -> Any:
        """The status, and the body; None if it passed."""
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": kind,
            "path": path,
            "method": "OPTIONS",
            "headers": [(b"authorization", one.encode("latin-1")) for one in authorization],
            "query_string": query.encode(),
            "server": ("10.0.0.7", 30000),
        }
        asyncio.run(self._app(scope, None, send))
        if not sent:
            return None
        return sent[0].get("status", sent[0].get("code")), b"".join(one.get("body", b"") for one in sent)


ENDPOINTS = (
    *("/generate", "/model_info", "/server_info", "/get_server_info", "/flush_cache", "/abort_request"),
    *("/pause_generation", "/continue_generation", "/update_weights_from_disk", "/init_weights_update_group"),
    *("/destroy_weights_update_group", "/begin_weight_update", "/update_weights_from_distributed"),
    *("/end_weight_update", "/update_weight_version", "/weights_checker", "/health_generate", "/health/"),
    *("/metrics", "/v1/models", "/ready/../generate", "/readyx", "/", "//ready", "/no_such_endpoint"),
)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_each_endpoint_asks_for_the_key(access: ModuleType, path: str) -> None:
    asgi = Asgi(access)
    wrong = (
        f"Bearer {OTHER}",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        KEY,
        f"Basic {KEY}",
        "Bearer ",
        "Bearer ä",
    )
    for sent in ((), *((one,) for one in wrong), (f"Bearer {KEY}", f"Bearer {OTHER}")):
        assert asgi.call(path, *sent) == (401, b'{"error": "Unauthorized"}'), sent
    assert asgi.passed == []
    assert asgi.call(path, f"Bearer {KEY}") is None
    assert asgi.call(path, f"bearer {KEY}", f"Bearer {KEY}") is None  # a router's, and its client's
    assert asgi.passed == [path, path]


def test_what_is_open(access: ModuleType) -> None:
    """Whether it takes requests; the server's own start and end. Web sockets are not."""
    asgi = Asgi(access)
    assert asgi.call("/ready") is None
    assert asgi.call("", kind="lifespan") is None
    assert asgi.passed == ["/ready", ""]
    assert asgi.call("/health") == asgi.call("/health", f"Bearer {OTHER}") == (200, b"")
    assert asgi.passed == ["/ready", ""]  # SGLang's own, which samples a token, was not asked
    assert asgi.call("/health", f"Bearer {KEY}") is None
    assert asgi.call("/ready", kind="websocket") == (1008, b"")
    assert asgi.call("/v1/realtime", f"Bearer {KEY}", kind="websocket") is None


def test_the_proof_of_a_server(access: ModuleType) -> None:
    """HMAC-SHA256 of the nonce and of the server's own address; worked out here without our function."""
    nonce = "0123456789abcdef" * 2
    text = f"bapo-megatron {nonce} 10.0.0.7 30000".encode()
    expected = hmac.new(KEY.encode(), text, hashlib.sha256).hexdigest().encode()
    asgi = Asgi(access)
    assert asgi.call(api_key.PROOF_PATH, query=f"nonce={nonce}") == (200, expected)
    for bad in ("", "nonce=", "nonce=xyz", f"nonce={nonce}0", f"nonce={nonce.upper()}"):
        assert asgi.call(api_key.PROOF_PATH, query=bad)[0] == 400
    assert proof_of(KEY, nonce, "10.0.0.8", 30000) != expected.decode()


# --- the client, and servers of several kinds


class Server:
    """A stand-in for an SGLang server, which answers every call of a client as if it had been done."""

    def __init__(self, key: str | None, proves: bool = True, asks: bool = True) -> None:
        self.key, self.proves, self.asks = key, proves, asks
        self.relay: str | None = None
        """Address of another server, which it asks for proofs."""
        self.seen: list[tuple[str, str | None]] = []
        """Paths and authorizations that came."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._runner, self.url = self.do(self._start())

    def do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=60)

    def stop(self) -> None:
        self.do(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)

    @property
    def keys_seen(self) -> set[str | None]:
        return {authorization for _, authorization in self.seen}

    async def _start(self) -> tuple[web.AppRunner, str]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        authorization = request.headers.get("Authorization")
        self.seen.append((request.path, authorization))
        if request.path == api_key.PROOF_PATH and self.proves and self.key:
            ip, port = request.transport.get_extra_info("sockname")
            if self.relay:
                _, body, _ = await api_key._get(self.relay, request.path_qs)
                return web.Response(body=body)
            return web.Response(text=proof_of(self.key, request.query["nonce"], ip, port))
        if self.asks and self.key and authorization != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized", "sent": authorization}, status=401)
        if request.path == "/moved":
            raise web.HTTPTemporaryRedirect("/model_info")
        if request.path == "/generate":
            meta = {"finish_reason": {"type": "length"}, "weight_version": "0"}
            return web.json_response(
                {"output_ids": [3], "meta_info": {**meta, "output_token_logprobs": [[-1.0, 3, None]]}}
            )
        return web.json_response({"success": True, "weight_version": "0", "per_engine_checksum": "d"})


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def start(*arguments: Any, **more: Any) -> Server:
        made.append(Server(*arguments, **more))
        return made[-1]

    yield start
    for server in made:
        server.stop()


def known(value: str = KEY, is_given: bool = False) -> KnownKey:
    return KnownKey(ApiKey(value, Path("RUN/api_key")), is_given)


def ask(server: Server, key: KnownKey | None, required: bool = False, call: str = "weight_version") -> Any:
    """One call of a client."""

    async def run() -> Any:
        sessions = HttpSessions()
        try:
            client = SglangServer(server.url, sessions, 20.0, Authorization(server.url, key, required))
            return await getattr(client, call)()
        finally:
            await sessions.close()

    return asyncio.run(run())


def test_every_call_carries_the_key(serve: Callable[..., Server], tmp_path: Path) -> None:
    """And none is served without it."""
    server = serve(KEY)
    request = GenerateRequest("r", np.array([1]), SamplingParams(1.0, 1, ()))
    group = BroadcastGroup("127.0.0.1", 1, "g", 2, "gloo")
    bucket = BucketSpec(["a"], ["float32"], [[1]], 4)

    async def run(key: KnownKey | None) -> list[BaseException | Any]:
        sessions = HttpSessions()
        client = SglangServer(server.url, sessions, 20.0, Authorization(server.url, key))
        calls = (
            *(client.generate(request, "1"), client.generate(request, "2", again=True), client.abort_all()),
            *(client.abort("1"), client.pause(), client.resume(), client.weight_version(), client.settings()),
            *(client.update_from_disk(tmp_path, 1, True, 20.0), client.join_weight_group(group, 1, 20.0)),
            *(client.leave_weight_group("g", 20.0), client.begin_update(), client.receive(bucket, "g", 20.0)),
            *(client.end_update(), client.flush_cache(), client.set_version(1), client.checksum(20.0)),
        )
        try:
            return [await asyncio.gather(call, return_exceptions=True) for call in calls]
        finally:
            await sessions.close()

    for [outcome] in asyncio.run(run(None)):
        assert isinstance(outcome, ServerError)
        assert "status 401" in str(outcome)
        assert "name its file with rollout.sglang.api_key_file or BAPO_SGLANG_API_KEY_FILE" in str(outcome)
    for [outcome] in asyncio.run(run(known())):
        assert not isinstance(outcome, BaseException), outcome


def test_the_runs_key_goes_to_no_server_that_does_not_prove_it(
    serve: Callable[..., Server], capsys: pytest.CaptureFixture[str]
) -> None:
    genuine, other_key, unknown, thief = serve(KEY), serve(OTHER), serve(OTHER, proves=False), serve(None)
    assert ask(genuine, known()) == 0
    assert f"Bearer {KEY}" in genuine.keys_seen
    with pytest.raises(ServerError, match="has another API key than the run's") as raised:
        ask(other_key, known())
    with pytest.raises(ServerError, match=r"asks for another API key than that in RUN/api_key"):
        ask(unknown, known())
    assert ask(thief, known()) == 0  # it asks for none: used, and warned of
    for server in (other_key, unknown, thief):
        assert server.keys_seen == {None}, server.seen
    printed = capsys.readouterr().out
    assert printed.count("warning:") == 1
    assert f"{thief.url} asks for no API key: everybody of this machine can sample" in printed
    assert KEY not in printed + str(raised.value)


def test_a_proof_of_another_server_is_none(serve: Callable[..., Server]) -> None:
    """A program that has taken a server's port hands the nonce on to a server that has the key."""
    genuine, thief = serve(KEY), serve("anything")
    thief.relay = genuine.url
    assert asyncio.run(ask_proof(genuine.url, KEY, 20.0)) == "proved"
    assert asyncio.run(ask_proof(thief.url, KEY, 20.0)) == "wrong"
    with pytest.raises(ServerError, match="is no server of this run"):
        ask(thief, known())
    assert thief.keys_seen == {None}


def test_a_key_that_the_user_names_goes_to_the_servers_of_the_recipe(serve: Callable[..., Server]) -> None:
    """SGLang without our launcher proves nothing."""
    plain = serve(KEY, proves=False)
    assert ask(plain, known(is_given=True)) == 0
    with pytest.raises(ServerError, match="asks for another API key") as raised:
        ask(plain, known(OTHER, is_given=True))
    assert OTHER not in str(raised.value)  # the server has sent it back


def test_a_server_that_asks_for_no_key_is_refused_if_the_recipe_says_so(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    opened, closed = serve(None), serve(KEY)
    for key in (None, known(), known(is_given=True)):
        with pytest.raises(
            ServerError, match="asks for no API key, and rollout.sglang.require_api_key is set"
        ):
            ask(opened, key, required=True)
    assert ask(closed, known(), required=True) == 0
    urls = (closed.url, opened.url, "http://127.0.0.1:9")
    check_keys_asked(SglangConfig(urls=urls))
    with pytest.raises(ConfigError, match=f"require_api_key is set, and {opened.url} asks for no key"):
        check_keys_asked(SglangConfig(urls=urls, require_api_key=True))
    check_keys_asked(SglangConfig(urls=(closed.url,), require_api_key=True))


def test_who_answers_after_a_failure_must_prove_it_anew(serve: Callable[..., Server]) -> None:
    server = serve(KEY)

    async def run() -> None:
        sessions = HttpSessions()
        client = SglangServer(server.url, sessions, 20.0, Authorization(server.url, known()))
        assert await client.is_alive()
        asked = len([path for path, _ in server.seen if path == api_key.PROOF_PATH])
        assert await client.is_alive()
        assert asked == len([path for path, _ in server.seen if path == api_key.PROOF_PATH]) == 1
        await asyncio.to_thread(server.do, server._runner.cleanup())
        assert not await client.is_alive()
        thief = Server(None)
        thief.stop()
        client._authorization._url = client.url = thief.url
        assert not await client.is_alive()
        assert client._authorization._headers is None
        await sessions.close()

    asyncio.run(run())


def test_a_redirect_is_not_followed(serve: Callable[..., Server]) -> None:
    server = serve(KEY)

    async def run() -> None:
        sessions = HttpSessions()
        client = SglangServer(server.url, sessions, 20.0, Authorization(server.url, known()))
        with pytest.raises(ServerError, match="status 307"):
            await client._request("GET", "/moved", None, 20.0)
        await sessions.close()

    asyncio.run(run())
    assert server.seen[-1][0] == "/moved"


def test_the_proof_in_a_shell(serve: Callable[..., Server], tmp_path: Path) -> None:
    """As slurm/task.sh asks for it before it registers a server."""
    key_file = write_key(tmp_path / "api_key")
    genuine, thief = serve(KEY), serve(None)

    def run(url: str, file: Path) -> subprocess.CompletedProcess[str]:
        module = "bapo_megatron.rollout.engines.sglang_launch.api_key"
        command = [sys.executable, "-m", module, url, str(file)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert run(genuine.url, key_file).returncode == 0
    for url, file in (
        (thief.url, key_file),
        ("http://127.0.0.1:9", key_file),
        (genuine.url, tmp_path / "no"),
    ):
        found = run(url, file)
        assert found.returncode == 1
        assert found.stderr.startswith(url)
        assert KEY not in found.stderr


def test_old_recipes_and_flags_still_work(tmp_path: Path) -> None:
    sglang = config_in(tmp_path).rollout.sglang
    assert (sglang.api_key_file, sglang.require_api_key) == (None, False)
    assert replace(sglang, urls=("http://a:1",)).urls == ("http://a:1",)
