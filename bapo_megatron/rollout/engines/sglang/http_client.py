"""The HTTP client of one SGLang server: an error names the server, and every control call has a deadline.

``generate`` waits as long as the answer takes: its caller (``SglangEngine``) has the deadline.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
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
"""Size from which on a reply is decoded in a thread, which takes milliseconds: some ten thousand tokens."""

_MODEL_MEMORY, _CACHE_MEMORY = ("weights", "cuda_graph"), "kv_cache"
"""SGLang's memory tags."""

_KEEP_IDLE_S = 2.0
"""Keep-alive of an idle connection. Less than uvicorn's 5 s: a request that is sent when the server closes
the connection fails as if the server had died (`KeptConnectionClosed`)."""

_READ_BYTES = 1 << 20
"""Size of a reply's part that is not read yet, above which aiohttp makes the server wait. By default 64 kB:
replies of megabytes, with routes, would stop at every second packet."""

_MOST_REPLY_BYTES = 2 << 30
"""Limit of a reply in bytes. The longest by far have routes: 131,072 tokens through the 94 layers of
Qwen3-235B-A22B take 0.5 GB."""

_CONNECT_S = 60.0
"""Deadline of connecting. The pool's health checks notice a lost machine earlier (``pool.py``)."""

_PROBES = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 6))
"""TCP keep-alive of a connection without traffic: seconds until the first probe, between probes, and their
number. A request may take an hour without a byte either way, and gateways between clouds or clusters forget
such a connection after minutes: its answer would never come."""


class HttpSessions:
    """The HTTP connections to servers: kept-alive ones for requests, and a new one for every control call.

    Make them within an event loop, and ``close`` them. There is no limit: one connection per request in
    flight. A call over a kept-alive connection may fail because the server closes the connection at that
    moment. A generation request can be sent again; a control call cannot: receiving a bucket twice, for
    example, would wait for ever. Control calls are few.
    """

    def __init__(self) -> None:
        kept = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_IDLE_S, socket_factory=_probed_socket)
        self.kept = aiohttp.ClientSession(
            connector=kept, trace_configs=[_reuse_trace()], read_bufsize=_READ_BYTES, auto_decompress=False
        )
        new = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_probed_socket)
        self.new = aiohttp.ClientSession(connector=new, auto_decompress=False)

    async def close(self) -> None:
        await self.kept.close()
        await self.new.close()


def _probed_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket for ``address`` whose connection the kernel probes while it is idle."""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _PROBES:
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


def _reuse_trace() -> aiohttp.TraceConfig:
    """A trace that notes in a request's ``trace_request_ctx`` whether it reused a kept-alive connection."""

    async def note(session: aiohttp.ClientSession, context: Any, params: Any) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx["reused"] = True

    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(note)
    return trace


class ServerError(EngineError):
    """An SGLang server refused, hung, or answered nonsense. The message names it."""


class KeptConnectionClosed(ServerError):
    """A kept-alive connection was closed during a request, before any byte of the answer.

    Most often the server has closed an idle connection and has not seen the request: on a busy machine the
    request may be sent seconds late, which ``_KEEP_IDLE_S`` does not exclude. Or the server, or the network,
    has failed. `SglangEngine` sends the request once more, under another id and over a new connection.
    """


class BadRequest(ServerError):
    """Status 400: the request is wrong; the server has not failed. ``generate`` makes it a ValueError."""


class SglangServer:
    """The HTTP client of the server at ``url``: an async method for each endpoint.

    Lives in the event loop of ``sessions``. ServerError if a call fails; nothing is repeated. Preconditions
    of a call, such as a pause, are the caller's (``SglangEngine``).
    """

    def __init__(
        self,
        url: str,
        sessions: HttpSessions,
        control_timeout: float = 60.0,
        authorization: Authorization | None = None,
    ) -> None:
        """``authorization``: the API key of every call; None: no key."""
        self._authorization = authorization
        self.url = url.rstrip("/")
        self._sessions = sessions
        self._control_s = control_timeout

    async def generate(self, request: GenerateRequest, rid: str, again: bool = False) -> Generation:
        """Send one request under the id ``rid``. An aborted one returns its tokens so far. ``again``: use a
        new connection; else KeptConnectionClosed if a kept one was closed."""
        session = self._sessions.new if again else self._sessions.kept
        payload = generate_payload(request, rid)
        try:
            body = await self._call(session, "/generate", payload, None)
        except BadRequest as error:  # any other server would refuse it, too
            raise ValueError(f"request {request.request_id!r}: {error}") from error
        try:
            if len(body) < _LONG_REPLY_BYTES:
                return generation_of(request, body)
            return await asyncio.to_thread(generation_of, request, body)
        except BadReply as error:
            raise ServerError(f"{self.url}: {error}") from error

    async def abort_all(self) -> None:
        """Abort every request, running or waiting; they return their tokens so far."""
        await self._control("/abort_request", {"abort_all": True})

    async def abort(self, rid: str) -> None:
        """Abort one request; unknown ids are ignored."""
        await self._control("/abort_request", {"rid": rid})

    async def pause(self, mode: PauseMode = "in_place") -> None:
        """Pause after the current step; requests keep their KV cache (``in_place``) or lose it."""
        await self._control("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._control("/continue_generation", {})

    async def weight_version(self) -> int:
        info = await self._control("/model_info")
        try:
            return int(info["weight_version"])
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(
                f"{self.url}: no numbered weight version; start it with --weight-version 0"
            ) from error

    async def settings(self) -> dict[str, Any]:
        """The server's settings, by the names of SGLang's ``ServerArgs``."""
        info = await self._control("/server_info")
        return info if isinstance(info, dict) else {}

    async def is_alive(self) -> bool:
        """Health check: whether the server answers. Not ``/ready``, which fails while weights are loaded."""
        try:
            await self._control("/model_info", timeout=5.0)
        except ServerError:
            return False
        return True

    async def update_from_disk(self, folder: Path, version: int, flush: bool, timeout: float) -> None:
        """Load the weights of an HF folder. A server that is not paused aborts all requests first.

        ``flush`` empties the prefix cache; no request may be running then. Without it the server must have no
        prefix cache: keys and values of old weights would serve new requests.
        """
        body = {
            "model_path": str(folder),
            "weight_version": str(version),
            "flush_cache": flush,
            "abort_all_requests": False,
        }
        reply = await self._control("/update_weights_from_disk", body, timeout)
        if not (isinstance(reply, dict) and reply.get("success")):
            raise ServerError(f"{self.url}: the weights in {folder} were not loaded: {str(reply)[:500]}")

    async def join_weight_group(self, group: BroadcastGroup, rank_offset: int, timeout: float) -> None:
        """Join a broadcast group: the server's tensor-parallel ranks become those from ``rank_offset`` on. It
        blocks until the sender answers, for longer than ``timeout``."""
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": rank_offset,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._control("/init_weights_update_group", body, timeout)

    async def leave_weight_group(self, name: str, timeout: float) -> None:
        call = self._control("/destroy_weights_update_group", {"group_name": name}, timeout)
        await _ignoring(call, "does not exist")

    async def begin_update(self) -> None:
        """Open a weight update. Refused during another one; waits for all requests unless paused."""
        await self._control("/begin_weight_update", {})

    async def receive(self, bucket: BucketSpec, group_name: str, timeout: float) -> None:
        """Receive one bucket by broadcast, and load it. The weights change at once."""
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": group_name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        await self._control("/update_weights_from_distributed", body, timeout)

    async def receive_handles(self, handles: Sequence[bytes], timeout: float) -> None:
        """Load one bucket by ``handles``, for each tensor-parallel rank a pickle by ``weight_sync/ipc.py``.
        The first rank answers; others may still read until they take part in the next call."""
        body = {
            "serialized_named_tensors": [base64.b64encode(handle).decode() for handle in handles],
            "flush_cache": False,
        }
        await self._control("/update_weights_from_tensor", body, timeout)

    async def load_part(self, path: str, body: dict[str, Any], timeout: float) -> None:
        """Load one part of new weights by a user's route, in ``types.SelfSendingPart.send``."""
        await self._control(path, body, timeout)

    async def end_update(self) -> None:
        """Close a weight update. No effect if none is open."""
        await _ignoring(self._control("/end_weight_update", {}), "no weight-update session is open")

    async def flush_cache(self) -> None:
        """Empty the prefix cache. Refused while a request runs; retracted ones do not count."""
        await self._control("/flush_cache", {})

    async def release_memory(self, timeout: float) -> None:
        """Release the GPU memory of weights, CUDA graphs and KV cache. The server must be paused, with an
        empty batch, or an assertion of SGLang ends it. It may answer before the memory is free."""
        await self._control("/release_memory_occupation", {"tags": [*_MODEL_MEMORY, _CACHE_MEMORY]}, timeout)

    async def resume_model_memory(self, timeout: float) -> None:
        """Reclaim the GPU memory of weights and CUDA graphs. The weights are undefined until they are loaded.
        A server that has not released the memory, or has resumed it already, crashes."""
        await self._control("/resume_memory_occupation", {"tags": [*_MODEL_MEMORY]}, timeout)

    async def resume_cache_memory(self, timeout: float) -> None:
        """Reclaim the GPU memory of the KV cache, which is empty."""
        await self._control("/resume_memory_occupation", {"tags": [_CACHE_MEMORY]}, timeout)

    async def set_version(self, version: int) -> None:
        """Set the version of the current weights, also for later tokens of requests in flight."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._control("/update_weight_version", body)

    async def checksum(self, timeout: float) -> str:
        """The digest of the weights in use on all ranks, with those of single tensors (``TensorDigests``) if
        the server reports them. It depends on weights, their layout in memory, and the number of ranks."""
        reply = await self._control("/weights_checker", {"action": "checksum"}, timeout)
        if not (isinstance(reply, dict) and reply.get("per_engine_checksum")):
            raise ServerError(f"{self.url}: no checksum of its weights: {str(reply)[:500]}")
        return _with_tensors(str(reply["per_engine_checksum"]), reply.get("ranks"))

    async def _control(self, path: str, body: dict[str, Any] | None = None, timeout: float = 0.0) -> Any:
        """A control call: POST of ``body``, or GET without one; returns the answer, decoded."""
        sent = None if body is None else json.dumps(body).encode()
        text = await self._call(self._sessions.new, path, sent, timeout or self._control_s)
        try:
            return json.loads(text) if text.strip().startswith((b"{", b"[")) else text.decode()
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{self.url}{path}: no JSON: {text[:300]!r}") from error

    async def _call(
        self, session: aiohttp.ClientSession, path: str, body: bytes | None, timeout: float | None
    ) -> bytes:
        """One HTTP call; returns the body of status 200. There are no retries, and no redirects."""
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=_CONNECT_S)
        url, connection = self.url + path, {"reused": False}
        plain = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        headers = {**plain, **await self._headers(url)}
        try:
            async with session.request(
                "GET" if body is None else "POST",
                url,
                data=body,
                headers=headers,
                timeout=limit,
                trace_request_ctx=connection,
                allow_redirects=False,
            ) as answer:
                content = await _content(url, answer)
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
            raise ServerError(f"{url}: no answer to the question whether it asks for an API key") from error
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


async def _content(url: str, answer: aiohttp.ClientResponse) -> bytes:
    """The body of an answer. ServerError for one that is compressed, whose size nobody can tell before it
    fills the memory, or of more than ``_MOST_REPLY_BYTES``."""
    coding = answer.headers.get("Content-Encoding", "identity")  # which some proxies name
    if coding.strip().lower() != "identity":
        raise ServerError(f"{url}: its answer is compressed ({coding[:40]!r}), which was not asked for")
    parts, size = [], 0
    while part := await answer.content.readany():
        parts.append(part)
        if (size := size + len(part)) > _MOST_REPLY_BYTES:
            raise ServerError(f"{url}: its answer is longer than {_MOST_REPLY_BYTES:,} bytes")
    return b"".join(parts)


def _with_tensors(digest: str, ranks: Any) -> str:
    """``digest`` with those of single tensors, if ``ranks`` has them in SGLang's format."""
    try:
        ordered = sorted(ranks, key=lambda rank: rank["parallelism_info"][0]["tp_rank"])
        return TensorDigests(digest, [dict(rank["checksums"]) for rank in ordered])
    except (TypeError, KeyError, IndexError, ValueError):
        return digest


async def _ignoring(call: Awaitable[Any], says: str) -> None:
    """Await ``call``, and ignore its refusal with the words ``says``: there was nothing to do."""
    try:
        await call
    except ServerError as error:
        if says not in str(error):
            raise
