"""HTTP client of JSON servers (judge, reward model, distillation teacher, SandboxFusion), with retries.

``JsonClient(url, ...).ask(body)`` returns the JSON reply or raises EndpointError. It follows no redirect, and
limits the reply size. Proxies come from the environment (HTTP_PROXY, HTTPS_PROXY, NO_PROXY), except for
addresses of this machine. ``key_of`` reads an API key from an environment variable; no message shows it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from bapo_megatron.errors import printable
from bapo_megatron.runtime.device import environment_variable
from bapo_megatron.runtime.http import is_loopback

if TYPE_CHECKING:
    import aiohttp

MAX_ANSWER_BYTES = 4 << 20
"""Maximum reply size in bytes. Scores and program outputs are smaller."""

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
"""First and longest wait between attempts, in seconds: exponential backoff with jitter."""

_CONNECT_S = 20.0
_FAILED_S = 60.0
_PASSING = frozenset((408, 425, 429, *range(500, 600)))
"""Retryable HTTP status codes: server overloaded, starting or restarted."""

_KEY_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SHOWN_CHARACTERS = 300

_LOG = logging.getLogger(__name__)


class EndpointError(Exception):
    """Raised when a call gets no usable reply. ``place`` is the kind of problem, such as ``HTTP 500``."""

    def __init__(self, place: str, text: str) -> None:
        super().__init__(text)
        self.place = place


class _Passing(EndpointError):
    """An error that a retry may resolve."""


def url_problem(url: str) -> str | None:
    """Return the error of an address as the end of a sentence, or None."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        return "is not an address: give http://HOST:PORT/PATH, or https://"
    if parts.username is not None or parts.password is not None:
        return "holds a user or a password, which would be stored with the run: take them out"
    return None


def shown(url: str) -> str:
    """Return the address for messages: without its query, which may hold a key, and without a user."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def key_problem(variable: str) -> str | None:
    """Return the error of a variable name, or None. The text omits the name, which may be the key itself."""
    if variable and not _KEY_NAME.fullmatch(variable):
        return "it must be the name of an environment variable that holds the key, not the key itself"
    return None


def key_of(variable: str) -> str:
    """Return the key in the environment variable, or an empty string."""
    return (environment_variable(variable) or "").strip() if variable else ""


def without_key(text: str, key: str) -> str:
    """Return server text for a message: redacted, shortened, without control characters."""
    return printable(" ".join(redacted(text, key).split()))[:_SHOWN_CHARACTERS]


def redacted(text: str, key: str) -> str:
    """Return the text with the key replaced."""
    return text.replace(key, "[key]") if key else text


def with_path(url: str, path: str) -> str:
    """Return the address with ``path`` appended unless it ends with it."""
    parts = urlsplit(url)
    there = parts.path.rstrip("/")
    return url if there.endswith(path) else urlunsplit(parts._replace(path=there + path))


class JsonClient:
    """Async HTTP client of one address, for one event loop at a time: concurrent ``ask`` calls, then
    ``close``. Retries a retryable failure for up to ``give_up_s`` seconds, and logs the first one."""

    def __init__(
        self,
        url: str,
        timeout_s: float,
        give_up_s: float,
        concurrency: int = 1,
        key: str = "",
        most_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        """``timeout_s``: limit of a single attempt. ``concurrency``: maximum number of concurrent calls.
        ``key``: bearer token. ``most_bytes``: maximum reply size."""
        self._url, self._key = url, key
        self.address = shown(url)
        self._timeout_s, self._give_up_s = timeout_s, give_up_s
        self._room = asyncio.Semaphore(concurrency)
        self._most_bytes = most_bytes
        self._proxy = _proxy_of(url)
        self._session: aiohttp.ClientSession | None = None
        self._failed_at: float | None = None
        self._has_warned = False

    @property
    def has_failed(self) -> bool:
        """Whether the last ``ask_once`` failed within the last minute; callers prefer other addresses."""
        return self._failed_at is not None and _now() - self._failed_at < _FAILED_S

    async def ask(self, body: dict[str, Any]) -> Any:
        """Return the JSON reply to ``body``. Raises EndpointError."""
        data = json.dumps(body).encode()
        async with self._room:
            return await self._persistently(lambda limit_s: self._once(data, limit_s))

    async def ask_once(self, body: dict[str, Any]) -> Any:
        """Return the JSON reply as ``ask`` does, without retries. Raises EndpointError."""
        async with self._room:
            try:
                answer = await self._once(json.dumps(body).encode(), self._timeout_s)
            except EndpointError:
                self._failed_at = _now()
                raise
            self._failed_at = None
            return answer

    async def connect(self) -> None:
        """Wait until the address accepts a connection. Raises EndpointError after ``give_up_s`` seconds."""
        await self._persistently(self._connect)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _persistently(self, attempt: Callable[[float], Awaitable[Any]]) -> Any:
        """Return the result of ``attempt``, which gets a time limit in seconds, or raise its last error."""
        end, wait_s = _now() + self._give_up_s, FIRST_WAIT_S
        while True:
            try:
                return await attempt(min(self._timeout_s, max(0.001, end - _now())))
            except _Passing as error:
                pause_s = wait_s * random.uniform(0.5, 1.0)
                if _now() + pause_s >= end:
                    raise
                if not self._has_warned:
                    _LOG.warning("endpoint: %s; asked again for up to %g s", error, self._give_up_s)
                self._has_warned = True
            await asyncio.sleep(pause_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _connect(self, limit_s: float) -> None:
        parts = urlsplit(self._proxy or self._url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            async with asyncio.timeout(min(limit_s, _CONNECT_S)):
                _, writer = await asyncio.open_connection(parts.hostname, port)
        except OSError as error:  # includes TimeoutError
            raise _Passing("no connection", f"{self.address}: {_words(error)}") from None
        writer.close()

    async def _once(self, body: bytes, limit_s: float) -> Any:
        import aiohttp  # not at the top: every reward worker imports this file, few use endpoints

        if self._session is None:
            headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
            if self._key:
                headers["Authorization"] = f"Bearer {self._key}"
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), auto_decompress=False, headers=headers
            )
        limit = aiohttp.ClientTimeout(total=limit_s, sock_connect=_CONNECT_S)
        try:
            async with self._session.post(
                self._url, data=body, timeout=limit, allow_redirects=False, proxy=self._proxy
            ) as response:
                text = await self._text(response)
        except TimeoutError:
            raise _Passing("no answer in time", f"{self.address}: no answer within {limit_s:.3g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _Passing(type(error).__name__, f"{self.address}: {_words(error)}") from None
        self._check_state(response, text)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise self._unusable("no JSON", "its answer is not JSON", text) from None

    async def _text(self, response: aiohttp.ClientResponse) -> str:
        data = bytearray()
        async for part in response.content.iter_any():
            data += part
            if len(data) > self._most_bytes:
                raise self._unusable("long answer", f"its answer has more than {self._most_bytes} bytes", "")
        return data.decode(errors="replace")

    def _check_state(self, response: aiohttp.ClientResponse, text: str) -> None:
        state = response.status
        if 200 <= state < 300:
            return
        where, said = f"{self.address}: HTTP {state}", without_key(text, self._key)
        kind = _Passing if state in _PASSING else EndpointError
        raise kind(f"HTTP {state}", f"{where}: {said}")

    def _unusable(self, place: str, what: str, text: str) -> EndpointError:
        said = without_key(text, self._key)
        return EndpointError(place, f"{self.address}: {what}" + (f": {said}" if said else ""))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _words(error: BaseException) -> str:
    import aiohttp

    if isinstance(error, aiohttp.InvalidURL):  # its text is the address, which may have a password
        return type(error).__name__
    # The texts of some errors have the address, whose query may hold a key.
    return re.sub(r"\?[^\s'\"]*", "", without_key(str(error) or type(error).__name__, ""))


def _proxy_of(url: str) -> str | None:
    parts = urlsplit(url)
    if is_loopback(url) or proxy_bypass(parts.hostname or ""):
        return None
    return getproxies().get(parts.scheme)
