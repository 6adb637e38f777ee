"""The HTTP client of one SGLang server. Every call has a deadline, and says which server failed and how."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, Literal

import aiohttp

from bapo_megatron.rollout.engines.backend import EngineError
from bapo_megatron.rollout.engines.sent_weights import TensorDigests
from bapo_megatron.rollout.engines.sglang.authorization import Authorization
from bapo_megatron.rollout.engines.sglang.wire import BadReply, generate_payload, generation_of
from bapo_megatron.types import BroadcastGroup, BucketSpec, GenerateRequest, Generation

PauseMode = Literal["in_place", "retract"]

_LONG_REPLY_BYTES = 500_000
"""Bytes of some ten thousand tokens. A thread reads replies that long: it takes milliseconds."""

_MODEL_MEMORY, _CACHE_MEMORY = ("weights", "cuda_graph"), "kv_cache"
"""The tags of SGLang's memory."""

_KEEP_IDLE_S = 2.0
"""A connection is used again for so long. Less than the 5 s after which a server of uvicorn closes it: a
request that is sent at that moment fails as if the server had died (`KeptConnectionClosed`)."""

_CONNECT_S = 60.0
"""A machine that is gone is noticed earlier, by its silence (``pool.py``)."""


class HttpSessions:
    """The HTTP connections to servers: kept ones for requests, and a new one for every other call.

    A call over a kept connection may fail because the server ends the connection at that moment. A request
    can be sent again then. Another call must not: to receive a bucket twice, say, would wait for ever for
    data that nobody sends. There are few of them, and most come later than a connection is kept.
    """

    def __init__(self) -> None:
        """Within an event loop. As many connections as there are requests in flight."""
        kept = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_IDLE_S)
        self.kept = aiohttp.ClientSession(connector=kept, trace_configs=[_reuse_trace()])
        self.new = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))

    async def close(self) -> None:
        """Close all connections."""
        await self.kept.close()
        await self.new.close()


def _reuse_trace() -> aiohttp.TraceConfig:
    """Tells a request, by its ``trace_request_ctx``, whether it went over a connection of an earlier one."""

    async def note(session: aiohttp.ClientSession, context: Any, params: Any) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx["reused"] = True

    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(note)
    return trace


class ServerError(EngineError):
    """An SGLang server refused, hung, or answered nonsense. The message names it."""


class KeptConnectionClosed(ServerError):
    """A kept connection ended while a request was under way over it, before anything of the answer came.

    Most often the server has ended an idle connection and has not seen the request: on a busy machine the
    request may be sent seconds late, which ``_KEEP_IDLE_S`` does not exclude. Or the server has died, or
    something between here and there has dropped the connection. `SglangEngine` sends the request once more,
    under another id and over a new connection, whose failure is the server's.
    """


class BadRequest(ServerError):
    """The server says that the request is wrong, not that it fails."""


class SglangServer:
    """Calls to the server at ``url``. Must be used within the event loop of ``sessions``."""

    def __init__(
        self,
        url: str,
        sessions: HttpSessions,
        control_timeout: float = 60.0,
        authorization: Authorization | None = None,
    ) -> None:
        """``authorization``: the key that goes with every call; None: it is called without one."""
        self._authorization = authorization
        self.url = url.rstrip("/")
        self._sessions = sessions
        self._control = control_timeout

    async def generate(self, request: GenerateRequest, rid: str, again: bool = False) -> Generation:
        """Answer one request under the id ``rid``. An aborted one returns what it has.

        ``again``: over a new connection. Else KeptConnectionClosed if a kept one ended.
        """
        session, payload = (
            self._sessions.new if again else self._sessions.kept,
            generate_payload(request, rid),
        )
        try:
            body = await self._call(session, "POST", "/generate", payload, None)
        except BadRequest as error:  # any other server would refuse it too
            raise ValueError(f"request {request.request_id!r}: {error}") from error
        try:
            if len(body) < _LONG_REPLY_BYTES:
                return generation_of(request, body)
            return await asyncio.to_thread(generation_of, request, body)
        except BadReply as error:
            raise ServerError(f"{self.url}: {error}") from error

    async def abort_all(self) -> None:
        """End every request, running or waiting; they return what they have."""
        await self._post("/abort_request", {"abort_all": True})

    async def abort(self, rid: str) -> None:
        """End one request; unknown ids are ignored."""
        await self._post("/abort_request", {"rid": rid})

    async def pause(self, mode: PauseMode = "in_place") -> None:
        """Stop after the step in hand; requests keep their cache (``in_place``) or give it up."""
        await self._post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Continue after ``pause``."""
        await self._post("/continue_generation", {})

    async def weight_version(self) -> int:
        """The version of the weights that it says it has."""
        info = await self._request("GET", "/model_info", None, self._control)
        try:
            return int(info["weight_version"])
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(
                f"{self.url}: no numbered weight version; start it with --weight-version 0"
            ) from error

    async def settings(self) -> dict[str, Any]:
        """The settings that it was started with, by the names of SGLang's ``ServerArgs``."""
        info = await self._request("GET", "/server_info", None, self._control)
        return info if isinstance(info, dict) else {}

    async def is_alive(self) -> bool:
        """Whether the server answers. ``/ready`` will not do: it fails while it is paused for weights."""
        try:
            await self._request("GET", "/model_info", None, 5.0)
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

    async def join_weight_group(self, group: BroadcastGroup, rank_offset: int, timeout: float) -> None:
        """Join a broadcast's group: its tensor-parallel ranks become ``rank_offset`` and those that follow.

        Until the sender answers the server does nothing else, and it waits longer than ``timeout``.
        """
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": rank_offset,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._post("/init_weights_update_group", body, timeout)

    async def leave_weight_group(self, name: str, timeout: float) -> None:
        """Leave the group, if it is in one of that name."""
        call = self._post("/destroy_weights_update_group", {"group_name": name}, timeout)
        await _ignoring(call, "does not exist")

    async def begin_update(self) -> None:
        """Be ready to ``receive``. BadRequest during an update; waits for all requests unless it is paused."""
        await self._post("/begin_weight_update", {})

    async def receive(self, bucket: BucketSpec, group_name: str, timeout: float) -> None:
        """Take one bucket from the sender of the group, and load it. The weights change at once."""
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": group_name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        await self._post("/update_weights_from_distributed", body, timeout)

    async def receive_handles(self, handles: Sequence[bytes], timeout: float) -> None:
        """Load weights from another process's memory. The first rank answers; others may read on
        until they take part in the next call.

        ``handles``: for each tensor-parallel rank a pickle by ``weight_sync/handles.py``.
        """
        body = {
            "serialized_named_tensors": [base64.b64encode(one).decode() for one in handles],
            "flush_cache": False,
        }
        await self._post("/update_weights_from_tensor", body, timeout)

    async def end_update(self) -> None:
        """Make the weights that came ready for use. Nothing happens if no update was begun."""
        await _ignoring(self._post("/end_weight_update", {}), "no weight-update session is open")

    async def flush_cache(self) -> None:
        """Empty the prefix cache. BadRequest while a request runs; those that were retracted do not count."""
        await self._post("/flush_cache", {})

    async def release_memory(self, timeout: float) -> None:
        """Give up the memory of weights, CUDA graphs and KV cache. It must be paused, and its batch empty: an
        assertion of SGLang ends the server if not. It may answer before the memory is free."""
        await self._post("/release_memory_occupation", {"tags": [*_MODEL_MEMORY, _CACHE_MEMORY]}, timeout)

    async def resume_model_memory(self, timeout: float) -> None:
        """Take back the memory of weights and CUDA graphs. What the weights are is undefined: load some.

        A server that has not released it, or has resumed it already, ends.
        """
        await self._post("/resume_memory_occupation", {"tags": [*_MODEL_MEMORY]}, timeout)

    async def resume_cache_memory(self, timeout: float) -> None:
        """Take back the memory of the KV cache, which is empty."""
        await self._post("/resume_memory_occupation", {"tags": [_CACHE_MEMORY]}, timeout)

    async def set_version(self, version: int) -> None:
        """Say from now on that the weights are of ``version``; also of later tokens of requests in flight."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._post("/update_weight_version", body)

    async def checksum(self, timeout: float) -> str:
        """A digest of the weights that the server computes with, all its ranks; with those of single tensors
        (``TensorDigests``) where it tells them.

        Equal where weights, their layout in memory and the number of ranks are equal.
        """
        reply = await self._post("/weights_checker", {"action": "checksum"}, timeout)
        if not (isinstance(reply, dict) and reply.get("per_engine_checksum")):
            raise ServerError(f"{self.url}: no checksum of its weights: {str(reply)[:500]}")
        return _with_tensors(str(reply["per_engine_checksum"]), reply.get("ranks"))

    async def _post(self, path: str, body: dict[str, Any], timeout: float | None = None) -> Any:
        return await self._request("POST", path, body, timeout or self._control)

    async def _request(self, method: str, path: str, body: Any, timeout: float | None) -> Any:
        sent = None if body is None else json.dumps(body).encode()
        text = await self._call(self._sessions.new, method, path, sent, timeout)
        try:
            return json.loads(text) if text.strip().startswith((b"{", b"[")) else text.decode()
        except ValueError as error:
            raise ServerError(f"{self.url}{path}: no JSON: {text[:300]!r}") from error

    async def _call(
        self,
        session: aiohttp.ClientSession,
        method: str,
        path: str,
        body: bytes | None,
        timeout: float | None,
    ) -> bytes:
        """The bytes of the answer, whose status is 200. It is sent once, and redirects are not followed."""
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=_CONNECT_S)
        url, connection = self.url + path, {"reused": False}
        headers = {"Content-Type": "application/json", **await self._headers(url)}
        try:
            async with session.request(
                method,
                url,
                data=body,
                headers=headers,
                timeout=limit,
                trace_request_ctx=connection,
                allow_redirects=False,
            ) as answer:
                content = await answer.read()
                if answer.status != 200:
                    raise self._refusal(url, answer.status, content)
                return content
        except aiohttp.ConnectionTimeoutError:
            raise ServerError(f"{url}: no connection within {_CONNECT_S:g} s") from None
        except TimeoutError as error:
            raise ServerError(f"{url}: no answer within {timeout:g} s") from error
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            self._forget()
            kind = KeptConnectionClosed if connection["reused"] else ServerError
            raise kind(f"{url}: {type(error).__name__}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            self._forget()
            raise ServerError(f"{url}: {type(error).__name__}: {error}") from error

    async def _headers(self, url: str) -> dict[str, str]:
        if self._authorization is None:
            return {}
        try:
            return await self._authorization.headers()
        except TimeoutError as error:
            raise ServerError(f"{url}: no answer to the question whether it has the key") from error
        except EngineError as error:
            raise ServerError(str(error)) from error
        except OSError as error:
            raise ServerError(f"{url}: {type(error).__name__}: {error}") from error

    def _forget(self) -> None:
        if self._authorization is not None:
            self._authorization.forget()

    def _refusal(self, url: str, status: int, content: bytes) -> ServerError:
        message = f"{url}: status {status}: {content[:500].decode(errors='replace')}"
        if self._authorization is not None:
            message = self._authorization.without_key(message)
            if status == 401:
                message = f"{message}: {self._authorization.refusal()}"
                self._authorization.forget()
        return BadRequest(message) if status == 400 else ServerError(message)


def _with_tensors(digest: str, ranks: Any) -> str:
    """``digest`` with those of single tensors, if ``ranks`` has them in the form that SGLang gives them."""
    try:
        ordered = sorted(ranks, key=lambda rank: rank["parallelism_info"][0]["tp_rank"])
        return TensorDigests(digest, [dict(rank["checksums"]) for rank in ordered])
    except (TypeError, KeyError, IndexError, ValueError):
        return digest


async def _ignoring(call: Awaitable[Any], says: str) -> None:
    """``call``, which may be refused with those words: there was nothing to do."""
    try:
        await call
    except ServerError as error:
        if says not in str(error):
            raise
