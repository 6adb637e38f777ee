"""HTTP client of single requests: any status is an answer, and no redirect is followed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.error import URLError

import pytest

from bapo_megatron.runtime.http import ask

ANSWERS = {
    "/ok": (200, b'{"a": 1}'),
    "/list": (200, b"[1]"),
    "/text": (200, b"hello"),
    "/deep": (200, b"[" * 100_000),
    "/no": (503, b'{"a": 2}'),
}


class Handler(BaseHTTPRequestHandler):
    """Server of ``ANSWERS``; /away leads to /ok, and /echo sends body and a header back."""

    def do_GET(self) -> None:
        self._answer(*ANSWERS.get(self.path, (302, b"")))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, body + self.headers["X-Name"].encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Location", "/ok")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("path", "status", "fields"),
    [("ok", 200, {"a": 1}), ("list", 200, {}), ("text", 200, {}), ("deep", 200, {}), ("no", 503, {})],
)
def test_any_status_is_an_answer(url: str, path: str, status: int, fields: dict[str, int]) -> None:
    answer = ask(f"{url}/{path}", timeout_s=30)
    assert (answer.status, answer.fields) == (status, fields)
    assert answer.content == ANSWERS[f"/{path}"][1]


def test_a_redirect_is_an_answer(url: str) -> None:
    assert ask(f"{url}/away", timeout_s=30).status == 302


def test_data_are_posted_with_their_headers(url: str) -> None:
    assert ask(f"{url}/echo", b"body ", {"X-Name": "name"}, timeout_s=30).content == b"body name"


def test_proxies_are_used_where_they_are_asked_for(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert ask(f"{url}/ok", timeout_s=30).status == 200
    with pytest.raises(URLError, match="refused"):
        ask(f"{url}/ok", timeout_s=30, proxies=True)
