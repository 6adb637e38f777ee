"""Small servers and clients: no redirect is followed, and torch's TCPStore listens where it is told."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.error import URLError

import psutil
import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bapo_megatron.rollout.weight_sync.broadcast import SendingGroup
from bapo_megatron.runtime.distributed import bound_store, free_port
from bapo_megatron.runtime.http import ask
from tests.support.http_server import HTTPServer

ANSWERS = {
    "/ok": (200, b'{"a": 1}'),
    "/text": (200, b"hello"),
    "/deep": (200, b"[" * 100_000),
    "/no": (503, b'{"a": 2}'),
    "/away": (302, b""),
}


class Handler(BaseHTTPRequestHandler):
    """Server of ``ANSWERS``; /away leads to /ok."""

    def do_GET(self) -> None:
        status, body = ANSWERS[self.path]
        self.send_response(status)
        self.send_header("Location", "/ok")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("path", "status", "fields"),
    [("ok", 200, {"a": 1}), ("text", 200, {}), ("deep", 200, {}), ("no", 503, {}), ("away", 302, {})],
)
def test_any_status_is_an_answer(url: str, path: str, status: int, fields: dict[str, int]) -> None:
    answer = ask(f"{url}/{path}", timeout_s=30)
    assert (answer.status, answer.fields) == (status, fields)
    assert answer.content == ANSWERS[f"/{path}"][1]


def test_proxies_are_used_where_they_are_asked_for(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert ask(f"{url}/ok", timeout_s=30).status == 200
    with pytest.raises(URLError, match="refused"):
        ask(f"{url}/ok", timeout_s=30, proxies=True)


SOON = timedelta(seconds=60)


def listens_on(port: int) -> set[str]:
    """The addresses on which this process listens at a port."""
    return {
        one.laddr.ip
        for one in psutil.Process().net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port
    }


def test_the_store_of_a_broadcast_listens_on_its_address() -> None:
    store = bound_store("127.0.0.1", 0, None, SOON)
    assert listens_on(store.port) == {"127.0.0.1"}
    client = TCPStore("127.0.0.1", store.port, None, False, SOON)
    client.set("name", "value")
    assert store.get("name") == b"value"
    group = SendingGroup("127.0.0.1", "weights", 1, torch.device("cpu"), 60.0)
    assert listens_on(group.place.port) == {"127.0.0.1"}


def test_a_name_that_leads_to_loopback_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other machines reach this one by another address than it does itself."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_arguments, **_more: found)
    store = bound_store(socket.gethostname(), 0, None, SOON)
    assert listens_on(store.port) <= {"::", "0.0.0.0"}
    assert listens_on(store.port)


def test_an_address_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"cannot listen at 127.0.0.1:{port}"):
            bound_store("127.0.0.1", port, None, SOON)


CHILD = """
import os, sys
from bapo_megatron.runtime.distributed import process_group
import torch, torch.distributed as dist, psutil
with process_group("gloo", 1.0):
    value = torch.ones(1)
    dist.all_reduce(value)
    port = int(os.environ["MASTER_PORT"])
    ips = {one.laddr.ip for one in psutil.Process().net_connections("tcp")
           if one.status == "LISTEN" and one.laddr.port == port}
    print(int(value), *sorted(ips), flush=True)
"""


@pytest.mark.integration
def test_ranks_of_one_machine_meet_on_loopback() -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    root = Path(__file__).parents[3]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD],
            cwd=root,
            env={**os.environ, **place, "RANK": str(rank), "PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (1, 0)
    ]
    said = [rank.communicate(timeout=120)[0].split() for rank in ranks]
    assert said == [["2"], ["2", "127.0.0.1"]]
