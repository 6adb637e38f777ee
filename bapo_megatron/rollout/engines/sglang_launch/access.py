"""API-key authentication of an SGLang 0.5.23 server: ASGI middleware, and redaction of the key in its log.

The launchers of this folder call it in the server's process. SGLang's own check (``srt/utils/auth.py``) is
turned on. It leaves open paths that begin with /health (which samples a token), /ready or /metrics, and web
sockets. The middleware before it leaves open only /ready and the proof that the server has the key
(``api_key.py``), and answers /health itself, because SGLang's router asks it without a key.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import api_key  # this folder comes first on the path

_OPEN = ("/ready",)
"""Paths without authentication: readiness reveals nothing else."""
_ALIVE = "/health"
"""Liveness path: without the key the answer is empty, and no token is sampled."""


class KeyRequired:
    """ASGI middleware of authentication: a request without the key gets status 401."""

    def __init__(self, app: Any, key: str) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        if scope["type"] not in ("http", "websocket"):  # the server's own start and end
            await self._app(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == api_key.PROOF_PATH:
            await self._prove(scope, send)
        elif self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == _ALIVE:
            await _answer(send, 200, "", "text/plain")
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _answer(send, 401, json.dumps({"error": "Unauthorized"}), "application/json")

    def _may_pass(self, scope: Any) -> bool:
        if scope["type"] == "http" and scope["path"] in _OPEN:
            return True
        # SGLang's router forwards its client's header, and adds its own: every one must hold the key.
        sent = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return bool(sent) and all(self._is_key(value.decode("latin-1")) for value in sent)

    def _is_key(self, authorization: str) -> bool:
        kind, _, given = authorization.partition(" ")
        return kind.lower() == "bearer" and api_key.is_same(given, self._key)

    async def _prove(self, scope: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        nonces = parse_qs(scope["query_string"].decode("latin-1")).get("nonce", [""])
        proof = api_key.proof_of(self._key, nonces[0], *(scope["server"] or ("", 0)))
        await _answer(send, 200 if proof else 400, proof or "no nonce", "text/plain")


async def _answer(send: Callable[[Any], Awaitable[None]], status: int, text: str, kind: str) -> None:
    body = text.encode()
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def install() -> str | None:
    """Harden this process: private sockets and files, and an API key that is redacted in the log; returns it.

    There is no key without ``api_key.VARIABLE``. Called at the top of the launcher, because the worker
    processes that SGLang spawns import the launcher again.
    """
    os.umask(0o077)  # SGLang's ZMQ sockets unpickle what they receive: only this user may connect
    if not (named := os.environ.get(api_key.VARIABLE)):
        return None
    key: str = api_key.read_key_file(Path(named)).value
    logging.setLogRecordFactory(_redacting(logging.getLogRecordFactory(), key))
    return key


def _redacting(make: Callable[..., logging.LogRecord], key: str) -> Callable[..., logging.LogRecord]:
    """A log record factory without the key: SGLang logs all its settings at start, the key among them."""

    def redacted(*arguments: Any, **more: Any) -> logging.LogRecord:
        record = make(*arguments, **more)
        try:
            text = record.getMessage()
        except Exception:  # a record that cannot be formatted is reported by its handler
            return record
        if key in text:
            record.msg, record.args = text.replace(key, "***"), None
        return record

    return redacted


def require_key(arguments: Any, key: str | None) -> Any:
    """Server settings (``ServerArgs``) that require the key; unchanged if there is none."""
    if key is None:
        return arguments
    from sglang.srt.utils import auth

    add = auth.add_api_key_middleware

    def add_both(app: Any, **keys: Any) -> None:
        # Ours after SGLang's: the middleware that is added last runs first.
        add(app, **keys)
        app.add_middleware(KeyRequired, key=key)

    auth.add_api_key_middleware = add_both
    arguments.api_key = key
    return arguments
