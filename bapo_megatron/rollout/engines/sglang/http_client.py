"""HTTP client of one SGLang server, ``SglangServer``, and the HTTP sessions that a process's clients share.

Errors name the server. Control calls have a deadline; ``generate`` has one only from its caller.
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
from yarl import URL

from bapo_megatron.rollout.engines.backend import EngineError
from bapo_megatron.rollout.engines.sent_weights import TensorDigests
from bapo_megatron.rollout.engines.sglang.authorization import Authorization
from bapo_megatron.rollout.engines.sglang.wire import BadReply, generate_payload, generation_of
from bapo_megatron.types import BroadcastGroup, BucketSpec, GenerateRequest, Generation

PauseMode = Literal["in_place", "retract"]

_LONG_REPLY_BYTES = 500_000
"""Reply size (about ten thousand tokens) from which decoding, which takes milliseconds, runs in a thread."""

_MODEL_MEMORY, _CACHE_MEMORY = ("weights", "cuda_graph"), "kv_cache"

_KEEP_IDLE_S = 2.0
"""Idle keep-alive, below uvicorn's 5 s, so that requests rarely meet a connection being closed."""

_KEEP_NAMES_S = 3600
"""Seconds for which a server's resolved address is cached while it accepts connections. By default aiohttp
resolves it every 10 s: if a name server failed for half a minute, all engines would lose their requests."""

_READ_BYTES = 1 << 20
"""Unread reply bytes at which aiohttp stalls the server; at its 64 kB replies with routes stall often."""

_MOST_REPLY_BYTES = 2 << 30
"""Largest reply. The longest have routes: 131,072 tokens of Qwen3-235B-A22B (94 layers) take 0.5 GB."""

_CONTROL_S = 60.0
"""Deadline of control calls, unless another is given."""

_CONNECT_S = 60.0
"""Connection deadline. The pool's health checks notice a lost machine earlier (``pool.py``)."""

_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 6))
"""TCP keep-alive (seconds to the first probe, seconds between probes, probes): gateways between clouds or
clusters drop silent connections after minutes, and a request may be silent for an hour."""


class HttpSessions:
    """The two aiohttp sessions that all ``SglangServer`` clients of one event loop share: ``kept`` reuses
    connections, for generation requests; ``new`` opens one for each control call. A server may close an idle
    connection just as a call reuses it: a generation request is then resent, but most control calls must not
    be repeated. Connections are unlimited. Construct it within the loop; ``close`` closes both sessions."""

    def __init__(self) -> None:
        self.kept = _session(keepalive_timeout=_KEEP_IDLE_S)
        self.new = _session(force_close=True)

    async def close(self) -> None:
        await self.kept.close()
        await self.new.close()

    def forget_address(self, url: str) -> None:
        """Resolve a server's address again at its next connection: it may have moved."""
        parts = URL(url)
        for session in (self.kept, self.new):
            assert isinstance(session.connector, aiohttp.TCPConnector)
            session.connector.clear_dns_cache(parts.host, parts.port)


def _session(**more: Any) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(
        limit=0, ttl_dns_cache=_KEEP_NAMES_S, socket_factory=_kept_alive_socket, **more
    )
    return aiohttp.ClientSession(connector=connector, read_bufsize=_READ_BYTES, auto_decompress=False)


def _kept_alive_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


class ServerError(EngineError):
    """An SGLang server refused a call, hung or answered invalidly. The message names it."""


class ConnectionClosed(ServerError):
    """A connection was closed during a call: server or network failed, or the server closed it as idle while
    a busy machine sent the request, despite ``_KEEP_IDLE_S``. The caller may resend a request once."""


class BadRequest(ServerError):
    """Status 400: the request is wrong, not the server. ``generate`` raises it as ValueError."""


class SglangServer:
    """HTTP client of the server at ``url``, in the event loop of ``sessions``: one async method per endpoint.
    A failed call raises ServerError, and EngineError if ``authorization`` refuses the server, without
    retries. Callers ensure preconditions, such as a pause."""

    def __init__(self, url: str, sessions: HttpSessions, authorization: Authorization) -> None:
        self.url = url.rstrip("/")
        self._sessions, self._authorization = sessions, authorization

    async def generate(self, request: GenerateRequest, rid: str, again: bool = False) -> Generation:
        """Send one request under id ``rid`` and return its answer, after an abort the tokens so far. Raises
        ValueError if it is malformed, ConnectionClosed. ``again``: a resend, on a new connection."""
        session = self._sessions.new if again else self._sessions.kept
        payload = generate_payload(request, rid)
        try:
            body = await self._call(session, "/generate", payload, None)
        except BadRequest as error:  # other servers would refuse it, too
            raise ValueError(f"request {request.request_id!r}: {error}") from error
        try:
            if len(body) < _LONG_REPLY_BYTES:
                return generation_of(request, body)
            return await asyncio.to_thread(generation_of, request, body)
        except BadReply as error:
            raise ServerError(f"{self.url}: {error}") from error

    async def abort_all(self) -> None:
        """Abort all requests, running or waiting; each returns its tokens so far."""
        await self._control("/abort_request", {"abort_all": True})

    async def abort(self, rid: str) -> None:
        """Abort one request; unknown ids are ignored."""
        await self._control("/abort_request", {"rid": rid})

    async def pause(self, mode: PauseMode) -> None:
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
        """Return the server's settings, named as in SGLang's ``ServerArgs``."""
        info = await self._control("/server_info")
        return info if isinstance(info, dict) else {}

    async def is_alive(self) -> bool:
        """Return whether the server answers; not by ``/ready``, which fails during weight loads."""
        try:
            await self._control("/model_info", timeout=5.0)
        except EngineError:
            return False
        return True

    async def update_from_disk(self, folder: Path, version: int, flush: bool, timeout: float) -> None:
        """Load an HF folder's weights; an unpaused server first waits for all requests. ``flush``: also empty
        the prefix cache; no request may be running. Otherwise the server must have no prefix cache: old keys
        and values would serve new requests."""
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
        """Join a group as ranks from ``rank_offset`` on. The server may block beyond ``timeout``."""
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
        """Open a weight update. Fails during another update; waits for all requests unless paused."""
        await self._control("/begin_weight_update", {})

    async def receive(self, bucket: BucketSpec, group_name: str, timeout: float) -> None:
        """Receive one bucket by broadcast and load it; the weights change immediately."""
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
        """Load one bucket by ``handles``, one pickle (``ipc.handles_of``) per tensor-parallel rank. Only the
        first rank answers; the others may still read until they take part in the next call."""
        body = {
            "serialized_named_tensors": [base64.b64encode(handle).decode() for handle in handles],
            "flush_cache": False,
        }
        await self._control("/update_weights_from_tensor", body, timeout)

    async def load_part(self, path: str, body: dict[str, Any], timeout: float) -> None:
        """POST one part of new weights to a user's route, for ``types.SelfSendingPart.send``."""
        await self._control(path, body, timeout)

    async def end_update(self) -> None:
        """Close a weight update. No effect if none is open."""
        await _ignoring(self._control("/end_weight_update", {}), "no weight-update session is open")

    async def flush_cache(self) -> None:
        """Empty the prefix cache. Fails while a request runs; retracted ones do not count."""
        await self._control("/flush_cache", {})

    async def release_memory(self, timeout: float) -> None:
        """Release GPU memory (weights, CUDA graphs, KV cache); it may become free later. An assertion kills
        the server unless it is paused with an empty batch."""
        await self._control("/release_memory_occupation", {"tags": [*_MODEL_MEMORY, _CACHE_MEMORY]}, timeout)

    async def resume_model_memory(self, timeout: float) -> None:
        """Reclaim released memory of CUDA graphs and weights, then undefined. Crashes if not released."""
        await self._control("/resume_memory_occupation", {"tags": [*_MODEL_MEMORY]}, timeout)

    async def resume_cache_memory(self, timeout: float) -> None:
        await self._control("/resume_memory_occupation", {"tags": [_CACHE_MEMORY]}, timeout)

    async def set_version(self, version: int) -> None:
        """Set the version of the current weights, including later tokens of requests in flight."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._control("/update_weight_version", body)

    async def checksum(self, timeout: float) -> str:
        """Return the digest of the weights on all ranks, as ``TensorDigests`` if the server reports single
        tensors. It depends on the weights, their memory layout and the number of ranks."""
        reply = await self._control("/weights_checker", {"action": "checksum"}, timeout)
        if not (isinstance(reply, dict) and reply.get("per_engine_checksum")):
            raise ServerError(f"{self.url}: no checksum of its weights: {str(reply)[:500]}")
        return _with_tensors(str(reply["per_engine_checksum"]), reply.get("ranks"))

    async def _control(self, path: str, body: dict[str, Any] | None = None, timeout: float = 0.0) -> Any:
        """POST ``body``, or GET if it is None; return the answer, decoded if it looks like JSON."""
        sent = None if body is None else json.dumps(body).encode()
        text = await self._call(self._sessions.new, path, sent, timeout or _CONTROL_S)
        try:
            return json.loads(text) if text.strip().startswith((b"{", b"[")) else text.decode()
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{self.url}{path}: no JSON: {text[:300]!r}") from error

    async def _call(
        self, session: aiohttp.ClientSession, path: str, body: bytes | None, timeout: float | None
    ) -> bytes:
        """Make one HTTP call, without retries or redirects; returns the body of a status 200 answer."""
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=_CONNECT_S)
        url = self.url + path
        plain = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        try:
            headers = plain | await self._authorization.headers()
            async with session.request(
                "GET" if body is None else "POST",
                url,
                data=body,
                headers=headers,
                timeout=limit,
                allow_redirects=False,
            ) as answer:
                content = await _content(url, answer)
                if answer.status != 200:
                    raise self._refusal(url, answer.status, content)
                return content
        except aiohttp.ConnectionTimeoutError:
            self._sessions.forget_address(url)
            raise ServerError(f"{url}: no connection within {_CONNECT_S:g} s") from None
        except TimeoutError as error:
            raise ServerError(f"{url}: no answer within {timeout:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            self._authorization.forget()
            kind = ServerError
            if isinstance(error, aiohttp.ClientConnectorError):
                self._sessions.forget_address(url)
            elif isinstance(error, (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)):
                kind = ConnectionClosed
            raise kind(f"{url}: {type(error).__name__}: {error}") from error

    def _refusal(self, url: str, status: int, content: bytes) -> ServerError:
        message = f"{url}: status {status}: {content[:500].decode(errors='replace')}"
        message = self._authorization.without_key(message)
        if status == 401:
            message = f"{message}: {self._authorization.refusal()}"
            self._authorization.forget()
        return BadRequest(message) if status == 400 else ServerError(message)


async def _content(url: str, answer: aiohttp.ClientResponse) -> bytes:
    """Read an answer's body, not decompressed. Raises ServerError if it would fill memory."""
    parts, size = [], 0
    while part := await answer.content.readany():
        parts.append(part)
        if (size := size + len(part)) > _MOST_REPLY_BYTES:
            raise ServerError(f"{url}: its answer is longer than {_MOST_REPLY_BYTES:,} bytes")
    return b"".join(parts)


def _with_tensors(digest: str, ranks: Any) -> str:
    """Return ``digest`` as TensorDigests if ``ranks`` has SGLang's format, else unchanged."""
    try:
        ordered = sorted(ranks, key=lambda rank: rank["parallelism_info"][0]["tp_rank"])
        return TensorDigests(digest, [dict(rank["checksums"]) for rank in ordered])
    except (TypeError, KeyError, IndexError, ValueError):
        return digest


async def _ignoring(call: Awaitable[Any], says: str) -> None:
    """Await ``call``; ignore a ServerError whose message contains ``says``: there was nothing to do."""
    try:
        await call
    except ServerError as error:
        if says not in str(error):
            raise
