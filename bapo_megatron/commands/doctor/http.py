"""HTTP client of ``bapo doctor``: GET with a deadline for the whole answer, without proxies, as in a run.

``get`` waits for the answer, which a child process fetches, and never raises. Used by ``server_keys.py``
and ``servers.py``.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bapo_megatron.commands.doctor.rows import one_line
from bapo_megatron.runtime.child_process import within

DEADLINE_S = 10.0
_MOST_BYTES = 8 << 20


@dataclass(frozen=True)
class Answer:
    """The response to one GET: its status and its body, parsed if it is JSON.

    Without a response ``status`` is None and ``body`` is the reason. Made by ``get`` for the checks of
    servers.
    """

    status: int | None
    body: Any

    @property
    def fields(self) -> dict[str, Any]:
        """The JSON object of a response with status 200; else an empty one."""
        return self.body if self.status == 200 and isinstance(self.body, dict) else {}


def get(url: str, deadline_s: float = DEADLINE_S, *, headers: Mapping[str, str] | None = None) -> Answer:
    """The response of ``url``, within ``deadline_s``. Never raises: errors are in the ``Answer``.

    Redirects are not followed: they would take ``headers`` along.
    """
    try:
        return within(deadline_s, lambda: _get(url, deadline_s, dict(headers or {})))
    except urllib.error.URLError as error:
        return Answer(None, one_line(error.reason))
    except Exception as error:  # a server that does not speak HTTP raises all kinds of errors
        return Answer(None, one_line(error))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_arguments: Any) -> None:
        return None


def _get(url: str, deadline_s: float, headers: dict[str, str]) -> Answer:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=deadline_s) as response:
            return Answer(response.status, _parsed(response.read(_MOST_BYTES)))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, _parsed(error.read(_MOST_BYTES)))


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
