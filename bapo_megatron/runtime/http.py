"""HTTP client for single requests, with the standard library: ``ask`` returns the ``Answer``.

GET or POST; blocks (``timeout_s`` limits each wait, not the total), follows no redirect, reads up to 8 MiB.
For programs that must start fast or run with broken packages; clients of engines and judges use aiohttp.
``without_proxy`` returns variables by which child processes reach servers on this machine without a proxy.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from bapo_megatron.runtime.device import environment_variable

_MOST_BYTES = 8 << 20

_NO_PROXY = ("no_proxy", "NO_PROXY")
"""Variables with hosts that need no proxy; the first takes precedence."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Common names of this machine."""


@dataclass(frozen=True)
class Answer:
    """Response to one HTTP request: status, reason, content. Status None, never from ``ask``: no response."""

    status: int | None
    reason: str
    content: bytes = b""

    @property
    def fields(self) -> dict[str, Any]:
        """JSON object of a response with status 200, otherwise an empty one."""
        try:
            decoded = json.loads(self.content) if self.status == 200 else None
        except (ValueError, RecursionError):
            decoded = None
        return decoded if isinstance(decoded, dict) else {}


class _NoRedirects(HTTPRedirectHandler):
    """urllib handler that follows no redirect, which would keep the headers and turn a POST into a GET."""

    def redirect_request(self, *_: Any) -> None:
        return None


def ask(
    url: str,
    data: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    timeout_s: float,
    proxies: bool = False,
) -> Answer:
    """GET ``url``, or POST ``data`` to it; return the response of any status, up to 8 MiB.

    ``timeout_s`` limits each wait for bytes, not the total. ``proxies``: use the environment's. Raises
    OSError (URLError is one), HTTPException or ValueError without a response.
    """
    opener = build_opener(_NoRedirects, *([] if proxies else [ProxyHandler({})]))
    try:
        with opener.open(Request(url, data, dict(headers or {})), timeout=timeout_s) as response:
            return Answer(response.status, response.reason, response.read(_MOST_BYTES))
    except HTTPError as error:
        with error:
            return Answer(error.code, error.reason, error.read(_MOST_BYTES))


def without_proxy(host: str | None = None) -> dict[str, str]:
    """Return NO_PROXY variables with this machine's addresses; empty without proxies, or if ``*`` excludes
    all. Most HTTP clients use HTTP_PROXY even for 127.0.0.1. ``host``: another address of this machine."""
    if not any(environment_variable(name) for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")):
        return {}
    excluded = next((value for name in _NO_PROXY if (value := environment_variable(name))), "")
    if excluded.strip() == "*":  # ``*`` has its meaning only alone, not in a list
        return {}
    hosts = dict.fromkeys([*filter(None, excluded.split(",")), *LOOPBACK, *filter(None, [host])])
    return dict.fromkeys(_NO_PROXY, ",".join(hosts))


def is_loopback(url: str) -> bool:
    """Whether a URL refers to this machine: localhost or a loopback address."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
