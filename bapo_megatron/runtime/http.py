"""HTTP client of single requests, of the standard library: no redirects, a limit of bytes, proxies if asked.

For programs that must start at once or run where packages are broken. Engines and judges, which send many
requests, have aiohttp. ``without_proxy`` is for children that reach this machine by HTTP.
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
"""Names of the variable with the hosts that are reached without a proxy; the first takes precedence."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Usual names of this machine."""


@dataclass(frozen=True)
class Answer:
    """The response to one HTTP request, with any status."""

    status: int | None
    """None for no response; ``reason`` then says why."""
    reason: str
    content: bytes = b""

    @property
    def fields(self) -> dict[str, Any]:
        """The JSON object of a response with status 200; else an empty one."""
        try:
            decoded = json.loads(self.content) if self.status == 200 else None
        except (ValueError, RecursionError):
            decoded = None
        return decoded if isinstance(decoded, dict) else {}


class _NoRedirects(HTTPRedirectHandler):
    """Redirect handler that follows none: a redirect takes headers along, and makes a POST a GET."""

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
    """GET ``url``, or POST ``data`` to it; the response, whatever its status, up to 8 MiB.

    ``timeout_s`` limits each wait for bytes, not all of them: ``child_process.within`` does. ``proxies``:
    those of the environment are used. OSError (URLError is one), HTTPException or ValueError for no response.
    """
    opener = build_opener(_NoRedirects, *([] if proxies else [ProxyHandler({})]))
    try:
        with opener.open(Request(url, data, dict(headers or {})), timeout=timeout_s) as response:
            return Answer(response.status, response.reason, response.read(_MOST_BYTES))
    except HTTPError as error:
        with error:
            return Answer(error.code, error.reason, error.read(_MOST_BYTES))


def without_proxy(host: str | None = None) -> dict[str, str]:
    """NO_PROXY of a child with this machine's addresses; empty where no proxy is set, or ``*`` has all.

    Most HTTP clients ask the proxy of HTTP_PROXY even for 127.0.0.1. ``host``: another address of this
    machine.
    """
    if not any(environment_variable(name) for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")):
        return {}
    excluded = next((value for name in _NO_PROXY if (value := environment_variable(name))), "")
    if excluded.strip() == "*":  # which has its meaning alone, not in a list
        return {}
    hosts = dict.fromkeys([*filter(None, excluded.split(",")), *LOOPBACK, *filter(None, [host])])
    return dict.fromkeys(_NO_PROXY, ",".join(hosts))


def is_loopback(url: str) -> bool:
    """Whether a URL is of this machine: localhost, or a loopback address."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
