"""HTTP client of single requests, of the standard library: no redirects, a limit of bytes, proxies if asked.

For programs that must start at once or run where packages are broken. Engines and judges, which send many
requests, have aiohttp. Used by ``commands/doctor/servers.py``, ``events/targets.py`` and
``rollout/engines/sglang/server_process.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

_MOST_BYTES = 8 << 20


@dataclass(frozen=True)
class Answer:
    """The response to one HTTP request, with any status. Made by ``ask``, and by ``bapo doctor`` for none."""

    status: int | None
    """None for no response; ``reason`` then says why."""
    reason: str
    content: bytes = b""

    @property
    def fields(self) -> dict[str, Any]:
        """The JSON object of a response with status 200; else an empty one."""
        try:
            found = json.loads(self.content) if self.status == 200 else None
        except ValueError:
            found = None
        return found if isinstance(found, dict) else {}


class _NoRedirects(HTTPRedirectHandler):
    """Redirect handler that follows none: a redirect takes headers along, and makes a POST a GET.

    Made by ``ask``.
    """

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
