"""The ``sglang`` engine: one SGLang server behind the async protocol ``interfaces.Engine``, with deadlines.

``SglangEngine`` adds to the HTTP client: aborts at deadlines (a request then returns its tokens so far), one
retry when a connection was closed, and weight updates from a folder, by broadcast or by memory
handles, between two tokens of requests in flight. During a load, unsent requests wait at a gate.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bapo_megatron.config.transports import TRANSPORTS
from bapo_megatron.interfaces import Confirm
from bapo_megatron.rollout.engines.backend import EngineError
from bapo_megatron.rollout.engines.pool_state import EngineTimeouts, load_seconds
from bapo_megatron.rollout.engines.requests import ModelLimits, check_request, empty_generation
from bapo_megatron.rollout.engines.sglang.http_client import (
    ConnectionClosed,
    PauseMode,
    ServerError,
    SglangServer,
)
from bapo_megatron.rollout.engines.sglang.requirements import (
    setting_problems,
)
from bapo_megatron.types import (
    BroadcastGroup,
    BucketSpec,
    GenerateRequest,
    Generation,
    WeightPart,
    WeightParts,
)

_ABORT_AGAIN_S, _ABORT_ALL_AGAIN_S = 1.0, 0.1
"""Seconds between repeated aborts of one request or of all: a request may miss one in a state change."""


class SglangEngine:
    """``Engine`` of one SGLang server, with all engine protocols of ``interfaces.py``. Failed calls raise
    EngineError, a malformed request ValueError. Aborts, loads and wakes run one at a time beside requests."""

    transports = tuple(name for name, one in TRANSPORTS.items() if one.protocol)
    """All weight transports with parts, which ``_load_part`` loads."""

    def __init__(
        self,
        server: SglangServer,
        limits: ModelLimits,
        on_update: PauseMode = "retract",
        timeouts: EngineTimeouts | None = None,
        tensor: int = 1,
        sync: str = "disk",
    ) -> None:
        """``on_update``, ``sync``: as in ``SglangConfig``. ``tensor``: the server's tensor-parallel size."""
        self.name = server.url
        self.broadcast_ranks = tensor
        self.server = server
        self._limits = limits
        self._on_update = on_update
        self._sync = sync
        self._timeouts = timeouts or EngineTimeouts()
        self._inflight = InflightRequests()
        self._one_control = asyncio.Lock()
        self._group_name = ""
        self._no_tokens_since: float | None = None
        """Time of the first overdue request without tokens since any request got one; None without any."""

    async def weight_version(self) -> int:
        return await self.server.weight_version()

    async def is_alive(self) -> bool:
        return await self.server.is_alive()

    async def generate(self, request: GenerateRequest) -> Generation:
        check_request(request, self._limits)
        pending = InflightRequest(routes=request.routes is not None)
        self._inflight.all.add(pending)
        try:
            try:
                answer = await self._send(request, pending)
            except ConnectionClosed:  # often the server never saw the request: retry once
                pending.rid = uuid.uuid4().hex  # the server may still know the old one
                answer = await self._send(request, pending, again=True)
            if answer is None:
                return empty_generation(request)
            ids = answer.token_ids_R
            if answer.finish_reason == "abort" and not pending.aborted and not len(ids):
                raise ServerError(f"{self.name}: aborted a request by itself")
            if len(ids) and (ids.min() < 0 or ids.max() >= self._limits.vocabulary):
                raise ServerError(f"{self.name}: answers with token ids outside the vocabulary")
            return answer
        finally:
            self._inflight.all.discard(pending)

    async def abort(self) -> None:
        """Abort all requests: sent ones return their tokens so far, unsent ones none."""
        async with self._one_control:
            await self._abort()
            await self._inflight.open_gate()

    async def load(self, weights: Path | WeightParts, version: int, confirm: Confirm) -> None:
        """Load new weights. Raises ServerError if the load fails or, for a folder, another version is loaded,
        and errors of ``confirm``; the server must then not sample until a load succeeds."""
        timeout = await self._load_seconds(weights)
        async with self._one_control:
            await self._check_settings()
            # Pause first, resume last: no token may come from half-loaded or unconfirmed weights.
            if isinstance(weights, Path):
                await self._pause_for_update()
                flush = self._on_update == "retract"
                await self.server.update_from_disk(weights, version, flush, timeout)
                await self._confirm(version, confirm, timeout)
            else:
                self._inflight.close_gate()
                if not self._inflight.all:  # requests on the server are orphaned
                    await self.server.abort_all()
                await self._pause_for_update()
                await self._receive(weights)
                # After a retracting pause no request runs, and cached prefixes belong to the old weights.
                if self._on_update == "retract":
                    await self.server.flush_cache()
                # Version after digest: with a wrong digest the server stays in quarantine with paused
                # requests, whose tokens must not carry an unconfirmed version. (Folder loads set both.)
                await confirm(await self.server.checksum(timeout))
                await self.server.set_version(version)
            await self._resume()

    async def release_memory(self) -> None:
        """Abort requests and release GPU memory (weights, graphs, KV cache); it may become free later."""
        async with self._one_control:
            # Abort, then pause: an assertion kills a server that releases memory while it has a batch.
            await self._abort()
            await self.server.pause("retract")
            await self.server.release_memory(self._timeouts.update_s)

    async def wake(self, weights: Path | WeightParts, version: int, confirm: Confirm) -> None:
        timeout = await self._load_seconds(weights)
        async with self._one_control:
            # The weights are undefined from here until they are loaded.
            await self.server.resume_model_memory(timeout)
            if isinstance(weights, Path):
                # No flush: the cache is empty, and a flush would write to released memory.
                await self.server.update_from_disk(weights, version, False, timeout)
            else:
                await self._receive(weights)
                # Version before digest, unlike in `load`: a sleeping server holds no requests, and one with
                # a wrong digest is ended. `_confirm` then checks version and digest, as for a folder load.
                await self.server.set_version(version)
            await self._confirm(version, confirm, timeout)
            # Cache memory last: until `confirm` returns, the trainer's weights are on the same GPU.
            await self.server.resume_cache_memory(timeout)
            await self._resume()

    async def leave_group(self, name: str) -> None:
        await self.server.leave_weight_group(name, self._timeouts.update_s)

    async def join_group(self, group: BroadcastGroup, first_rank: int) -> None:
        self._group_name = group.name
        await self.server.join_weight_group(group, first_rank, self._timeouts.update_s)

    async def close(self) -> None:
        """Do nothing: the server keeps running."""

    async def _pause_for_update(self) -> None:
        """Pause before new weights: requests in flight are retracted or wait in place. If one asks for
        routes, abort all before a retracting pause, and callers continue them as new segments: a server
        recomputes retracted prefixes and would return the new weights' routes for old tokens."""
        self._inflight.close_gate()
        if self._on_update == "retract" and any(inflight.routes for inflight in self._inflight.all):
            await self._abort()
        await self.server.pause(self._on_update)

    async def _receive(self, parts: WeightParts) -> None:
        """Load all parts of new weights in one update of the paused server."""
        # A failure may have left an update open, and servers refuse a second one.
        await self.server.end_update()
        await self.server.begin_update()
        async for part in parts:
            await self._load_part(part)
        await self.server.end_update()

    async def _load_part(self, part: WeightPart) -> None:
        timeout = self._timeouts.update_s
        if isinstance(part, BucketSpec):
            await self.server.receive(part, self._group_name, timeout)
        elif isinstance(part, Sequence):
            await self.server.receive_handles(part, timeout)
        else:
            await part.send(self.server, timeout)

    async def _load_seconds(self, weights: Path | WeightParts) -> float:
        limit_s = self._timeouts.update_s
        if isinstance(weights, Path):
            return await asyncio.to_thread(load_seconds, weights, limit_s)
        return limit_s

    async def _confirm(self, version: int, confirm: Confirm, timeout: float) -> None:
        actual = await self.weight_version()
        if actual != version:
            raise ServerError(f"{self.name}: reports weight version {actual} after a load of {version}")
        await confirm(await self.server.checksum(timeout))

    async def _check_settings(self) -> None:
        """Raise ServerError, with the flag to change, if the server's settings make a load unsafe."""
        settings = await self.server.settings()
        for problem in setting_problems(settings, self._sync, self._on_update):
            raise ServerError(f"{self.name}: {problem}")

    async def _send(
        self, request: GenerateRequest, pending: InflightRequest, again: bool = False
    ) -> Generation | None:
        """Wait for the gate, send the request and return its answer, at the deadline with the tokens so far;
        None if it is aborted at the gate. Raises ServerError if the abort gets no answer either, or no
        request gets tokens (``_note_without_tokens``)."""
        if not await self._inflight.may_send(pending):
            return None
        limits = self._timeouts
        try:
            async with asyncio.timeout(None) as timeouts:
                overdue = asyncio.create_task(self._abort_overdue(pending, timeouts))
                try:
                    answer = await self.server.generate(request, pending.rid, again)
                finally:
                    overdue.cancel()
        except TimeoutError as error:
            raise ServerError(
                f"{self.name}: no answer within {limits.request_s:g} s, nor to an abort within "
                f"{limits.abort_s:g} s"
            ) from error
        if len(answer.token_ids_R):
            self._no_tokens_since = None
        elif timeouts.when() is not None:  # it was overdue
            self._note_without_tokens(asyncio.get_running_loop().time())
        return answer

    def _note_without_tokens(self, now: float) -> None:
        """Note an overdue request without tokens. Raises ServerError if another was noted over ``abort_s``
        ago, and no request got tokens since: a single one may have waited in the server's queue."""
        if self._no_tokens_since is None:
            self._no_tokens_since = now
        elif now - self._no_tokens_since > self._timeouts.abort_s:
            raise ServerError(f"{self.name}: no token for any request within {self._timeouts.request_s:g} s")

    async def _abort_overdue(self, pending: InflightRequest, timeouts: asyncio.Timeout) -> None:
        """At the request's deadline abort it, repeatedly until cancelled. Waits for a load in progress, as a
        paused server answers no abort."""
        await asyncio.sleep(self._timeouts.request_s)
        async with self._one_control:
            pending.aborted = True
            timeouts.reschedule(asyncio.get_running_loop().time() + self._timeouts.abort_s)
            with suppress(EngineError):  # the deadline still applies
                while True:
                    await self.server.abort(pending.rid)
                    await asyncio.sleep(_ABORT_AGAIN_S)

    async def _resume(self) -> None:
        await self.server.resume()
        await self._inflight.open_gate()

    async def _abort(self) -> None:
        """Close the gate, abort all requests and wait for their answers, which come at their next token."""
        inflight = await self._inflight.abort()
        self._inflight.close_gate()
        await self.server.abort_all()
        while any(pending in self._inflight.all for pending in inflight):
            await asyncio.sleep(_ABORT_ALL_AGAIN_S)
            await self.server.abort_all()  # the gate is closed, so this reaches no later request


class InflightRequest:
    """State of one unanswered request: its id on the server, whether it has routes or was aborted."""

    def __init__(self, routes: bool) -> None:
        self.rid = uuid.uuid4().hex
        self.routes = routes
        self.aborted = False


class InflightRequests:
    """Unanswered requests to one server, and the gate at which unsent ones wait during a load or sleep."""

    def __init__(self) -> None:
        self.all: set[InflightRequest] = set()
        self._changed = asyncio.Condition()
        self._is_open = True
        """Whether requests may pass: the server is neither paused nor about to be."""

    async def may_send(self, pending: InflightRequest) -> bool:
        """Wait until the gate is open; returns False if ``pending`` is aborted."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_open or pending.aborted)
        return not pending.aborted

    async def abort(self) -> list[InflightRequest]:
        """Mark all requests as aborted and return them; those at the gate are never sent."""
        for pending in self.all:
            pending.aborted = True
        async with self._changed:
            self._changed.notify_all()
        return list(self.all)

    def close_gate(self) -> None:
        self._is_open = False

    async def open_gate(self) -> None:
        self._is_open = True
        async with self._changed:
            self._changed.notify_all()
