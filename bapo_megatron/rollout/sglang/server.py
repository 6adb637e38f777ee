"""One SGLang server over HTTP. Every call has a deadline, and says which server failed and how."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import aiohttp

from bapo_megatron.rollout.sglang.wire import BadReply, generate_payload, generation_of
from bapo_megatron.types import GenerateRequest, Generation

PauseMode = Literal["in_place", "retract"]


class ServerError(RuntimeError):
    """A server refused, hung, or answered nonsense. The message names it."""


class SglangServer:
    """Calls to the server at ``url``. Must be used within the event loop of ``session``."""

    def __init__(self, url: str, session: aiohttp.ClientSession, control_timeout: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._control = control_timeout

    async def generate(self, request: GenerateRequest, rid: str, timeout: float | None = None) -> Generation:
        """Answer one request under the id ``rid``. An aborted one returns what it has."""
        reply = await self._post("/generate", generate_payload(request, rid), timeout)
        try:
            return generation_of(request, reply)
        except BadReply as error:
            raise ServerError(f"{self.url}: {error}") from error

    async def abort_all(self) -> None:
        """End every request, running or waiting; they return what they have."""
        await self._control_call("/abort_request", {"abort_all": True})

    async def abort(self, rid: str) -> None:
        """End one request; unknown ids are ignored."""
        await self._control_call("/abort_request", {"rid": rid})

    async def pause(self, mode: PauseMode = "in_place") -> None:
        """Stop after the step in hand; requests keep their cache (``in_place``) or give it up."""
        await self._control_call("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Go on after ``pause``."""
        await self._control_call("/continue_generation", {})

    async def weight_version(self) -> int:
        """The version of the weights that it says it has."""
        info = await self._request("GET", "/model_info", None, self._control)
        try:
            return int(info["weight_version"])
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(
                f"{self.url}: no numbered weight version; start it with --weight-version 0"
            ) from error

    async def is_ready(self) -> bool:
        """Whether it answers at all and takes requests."""
        try:
            await self._request("GET", "/ready", None, 5.0)
        except ServerError:
            return False
        return True

    async def update_from_disk(self, folder: Path, version: int, flush: bool, timeout: float) -> None:
        """Load the weights of an HF folder. A server that is not paused first ends all requests in flight.

        ``flush`` empties the prefix cache, which must hold no running request then. Without it the server
        must have been started without one: keys and values of old weights would serve new requests.
        """
        body = {
            "model_path": str(folder),
            "weight_version": str(version),
            "flush_cache": flush,
            "abort_all_requests": False,
        }
        reply = await self._post("/update_weights_from_disk", body, timeout)
        if not (isinstance(reply, dict) and reply.get("success")):
            raise ServerError(f"{self.url}: the weights in {folder} were not loaded: {str(reply)[:500]}")

    async def _control_call(self, path: str, body: dict[str, Any]) -> Any:
        return await self._post(path, body, self._control)

    async def _post(self, path: str, body: dict[str, Any], timeout: float | None) -> Any:
        return await self._request("POST", path, body, timeout)

    async def _request(self, method: str, path: str, body: Any, timeout: float | None) -> Any:
        limit = aiohttp.ClientTimeout(total=timeout, connect=10.0)
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=limit) as response:
                text = await response.text()
                if response.status != 200:
                    raise ServerError(f"{self.url}{path}: status {response.status}: {text[:500]}")
                return await response.json(content_type=None) if text.strip().startswith(("{", "[")) else text
        except TimeoutError as error:
            raise ServerError(f"{self.url}{path}: no answer within {timeout or 10:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ServerError(f"{self.url}{path}: {type(error).__name__}: {error}") from error
