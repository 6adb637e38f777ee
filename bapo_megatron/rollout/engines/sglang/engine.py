"""The ``sglang`` engine: one SGLang server behind ``interfaces.Engine``: deadlines, weight updates, sleep.

Weights come from a folder, by broadcast or by memory handles. A request at its deadline is aborted and
returns its tokens so far; one on a dropped kept-alive connection is sent once more. The engine adds what the
server does not promise: unsent requests wait at a gate (``InflightRequests``) during a pause or a load and
obey an abort, and weights change between two tokens while requests are in flight.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import singledispatchmethod
from pathlib import Path

from bapo_megatron.config.transports import TRANSPORTS
from bapo_megatron.interfaces import Confirm
from bapo_megatron.rollout.engines.pool_state import load_seconds
from bapo_megatron.rollout.engines.requests import ModelLimits, check_request, empty_generation
from bapo_megatron.rollout.engines.sglang.http_client import (
    KeptConnectionClosed,
    PauseMode,
    ServerError,
    SglangServer,
)
from bapo_megatron.rollout.engines.sglang.requirements import IN_PLACE, OUTLIVING, SPECULATIVE, drafting, flag
from bapo_megatron.rollout.engines.sglang.wire import without_old_routes
from bapo_megatron.types import (
    BroadcastGroup,
    BucketSpec,
    GenerateRequest,
    Generation,
    SelfSendingPart,
    WeightParts,
)

_ABORT_AGAIN_S, _ABORT_ALL_AGAIN_S = 1.0, 0.1
"""Seconds between repeated aborts, of one request or of all: one that changes its state may miss an abort."""


@dataclass(frozen=True)
class Deadlines:
    """The deadlines of calls to a server, in seconds, from ``rollout.sglang``."""

    request_s: float = 3600.0
    """Deadline of one request; then it is aborted, and its answer is the tokens so far."""
    abort_s: float = 60.0
    """Deadline of the abort of a request."""
    update_s: float = 600.0
    """Deadline of a weight load, without the time to read the bytes (``timeouts.load_seconds``)."""


class SglangEngine:
    """The ``Engine`` of one SGLang server, with all abilities of ``interfaces.py``. Lives in one event loop.

    Where ``interfaces.Engine`` says that a call raises, it is ServerError, which names the server. Calls
    that pause, resume, abort or load weights run one at a time; requests run beside them.
    """

    transports = tuple(name for name, one in TRANSPORTS.items() if one.protocol)
    """All that have parts, which ``_load_part`` loads."""

    def __init__(
        self,
        server: SglangServer,
        limits: ModelLimits,
        on_update: PauseMode = "retract",
        deadlines: Deadlines | None = None,
        tensor: int = 1,
        sync: str = "disk",
    ) -> None:
        """``on_update``: the treatment of requests in flight when weights change, see ``SglangConfig``.
        ``tensor``: tensor-parallel size of the server. ``sync``: the run's transport of weights."""
        self.name = server.url
        self.broadcast_ranks = tensor
        self.server = server
        self._limits = limits
        self._on_update = on_update
        self._sync = sync
        self._deadlines = deadlines or Deadlines()
        self._inflight = InflightRequests()
        self._one_control = asyncio.Lock()
        self._paused_at: int | None = None
        """The weight version at the caller's pause; None if the caller has not paused."""
        self._version: int | None = None
        self._group_name = ""
        """The broadcast group that the server has joined."""
        self._no_tokens_since: float | None = None
        """Time of the first overdue request without tokens since the last token of any request."""

    async def weight_version(self) -> int:
        self._version = await self.server.weight_version()
        return self._version

    async def is_alive(self) -> bool:
        return await self.server.is_alive()

    async def generate(self, request: GenerateRequest) -> Generation:
        check_request(request, self._limits)
        pending = InflightRequest(routes=request.routes is not None)
        self._inflight.all.add(pending)
        try:
            try:
                answer = await self._send(request, pending)
            except KeptConnectionClosed:  # most likely the server has never seen the request: retry once
                pending.renew()
                answer = await self._send(request, pending, again=True)
            if answer is None:
                return empty_generation(request)
            ids = answer.token_ids_R
            if answer.finish_reason == "abort" and not pending.aborted and not len(ids):
                raise ServerError(f"{self.name}: aborted a request by itself")
            if len(ids) and (ids.min() < 0 or ids.max() >= self._limits.vocabulary):
                raise ServerError(f"{self.name}: answers with token ids outside the vocabulary")
            if self._on_update == "retract":
                answer = without_old_routes(answer)
            return _truncated_after(answer, pending.newest)
        finally:
            self._inflight.all.discard(pending)

    async def abort(self) -> None:
        """Abort all requests: those in flight return their tokens so far, unsent ones none."""
        async with self._one_control:
            await self._abort()

    async def pause(self) -> None:
        async with self._one_control:
            if self._paused_at is None:
                self._paused_at = await self.weight_version() if self._version is None else self._version
            # The gate first: a request that reached the server during the pause could not be aborted.
            self._inflight.close_gate()
            await self.server.pause()

    async def resume(self) -> None:
        async with self._one_control:
            self._paused_at = None
            await self._resume()

    async def load(self, weights: Path | WeightParts, version: int, confirm: Confirm) -> None:
        """Load new weights. ServerError if the load fails or another version is reported, and the errors of
        ``confirm``: the server must not sample then before a load has succeeded."""
        timeout = await self._load_seconds(weights)
        async with self._one_control:
            await self._check_settings()
            # The pause comes first and the resume last: no token is sampled from half-loaded weights, nor
            # from weights whose digest is not confirmed.
            if isinstance(weights, Path):
                await self._pause_for_update()
                flush = self._on_update == "retract"
                await self.server.update_from_disk(weights, version, flush, timeout)
                await self._confirm(version, confirm, timeout)
            else:
                self._inflight.close_gate()
                if not self._inflight.all:  # what the server still samples are orphaned requests
                    await self.server.abort_all()
                await self._pause_for_update()
                await self._receive(weights)
                # Only after a pause that retracts: no request is running, and its prefixes are of the old
                # weights.
                if self._on_update == "retract":
                    await self.server.flush_cache()
                # The version after the digest: a server whose digest is wrong runs on, in quarantine, with
                # the requests that the pause holds: none of their tokens may carry a version that was not
                # confirmed. (A load from a folder sets both in one call; its server stays paused, too.)
                await confirm(await self.server.checksum(timeout))
                await self.server.set_version(version)
                await self.weight_version()
            if self._paused_at is None:
                await self._resume()

    async def release_memory(self) -> None:
        """Sleep: abort the requests in flight, and release the GPU memory of weights, graphs and KV cache.

        The server may answer before the memory is free: ask the driver.
        """
        async with self._one_control:
            # Abort, then pause: an assertion kills a server that releases memory with a batch in it.
            await self._abort()
            self._inflight.close_gate()
            await self.server.pause("retract")
            await self.server.release_memory(self._deadlines.update_s)

    async def wake(self, weights: Path | WeightParts, version: int, confirm: Confirm) -> None:
        timeout = await self._load_seconds(weights)
        async with self._one_control:
            # The weights' values are undefined from here on, until they are loaded.
            await self.server.resume_model_memory(timeout)
            if isinstance(weights, Path):
                # No flush: the cache is empty since the release, and a flush would write to released memory.
                await self.server.update_from_disk(weights, version, False, timeout)
            else:
                await self._receive(weights)
                # The version before the digest, other than in `load`: a sleeping server holds no request
                # that could carry it, and one whose digest is wrong is ended. So `_confirm` checks the
                # version, too, as after a load from a folder, which sets it in the same call.
                await self.server.set_version(version)
            await self._confirm(version, confirm, timeout)
            # The cache's memory last: until `confirm` returns the trainer has its weights on the same GPU.
            await self.server.resume_cache_memory(timeout)
            self._paused_at = None
            await self._resume()

    async def leave_group(self, name: str) -> None:
        await self.server.leave_weight_group(name, self._deadlines.update_s)

    async def join_group(self, group: BroadcastGroup, first_rank: int) -> None:
        self._group_name = group.name
        await self.server.join_weight_group(group, first_rank, self._deadlines.update_s)

    async def close(self) -> None:
        """Do nothing: the server keeps running."""

    async def _pause_for_update(self) -> None:
        """Pause before new weights: requests in flight are retracted, or wait in place.

        Those that ask for routes are aborted instead: a server computes a retracted prefix again, and would
        return the new weights' routes for the old weights' tokens. They continue by segment.
        """
        self._inflight.close_gate()
        if self._on_update == "retract" and any(inflight.routes for inflight in self._inflight.all):
            await self._abort(reopen=False)
        await self.server.pause(self._on_update)

    async def _receive(self, parts: WeightParts) -> None:
        """Load all parts of new weights in one update of the paused server."""
        # A failure may have left an update open, and a server refuses a second one.
        await self.server.end_update()
        await self.server.begin_update()
        async for part in parts:
            await self._load_part(part)
        await self.server.end_update()

    @singledispatchmethod
    async def _load_part(self, part: SelfSendingPart) -> None:
        """Load one part, by its type. Those of broadcast and ipc are plain data; any other sends itself."""
        await part.send(self.server, self._deadlines.update_s)

    @_load_part.register(BucketSpec)
    async def _(self, bucket: BucketSpec) -> None:
        await self.server.receive(bucket, self._group_name, self._deadlines.update_s)

    @_load_part.register(Sequence)
    async def _(self, handles: Sequence[bytes]) -> None:
        await self.server.receive_handles(handles, self._deadlines.update_s)

    async def _load_seconds(self, weights: Path | WeightParts) -> float:
        """Deadline of each call of a load, in seconds."""
        limit_s = self._deadlines.update_s
        if isinstance(weights, Path):
            return await asyncio.to_thread(load_seconds, weights, limit_s)
        return limit_s

    async def _confirm(self, version: int, confirm: Confirm, timeout: float) -> None:
        actual = await self.weight_version()
        if actual != version:
            raise ServerError(f"{self.name}: reports weight version {actual} after a load of {version}")
        await confirm(await self.server.checksum(timeout))

    async def _check_settings(self) -> None:
        """Check the settings of a server that the run may not have started. ServerError names a flag that is
        wrong, at the first load: those before a run's first step come from disk, whatever ``sync``."""
        settings = await self.server.settings()
        if self._sync != "disk" and (draft := drafting(settings)):
            raise ServerError(
                f"{self.name}: its draft model ({SPECULATIVE} {draft}) gets new weights from disk alone: set "
                f"rollout.sglang.sync=disk, or start it without {SPECULATIVE}"
            )
        for field in OUTLIVING:
            if settings.get(field):
                why = "it keeps keys and values of earlier weights"
                raise ServerError(f"{self.name}: start it without {flag(field)}: {why}")
        if self._on_update != "in_place":
            return
        for field in IN_PLACE:
            if settings.get(field) is False:
                raise ServerError(
                    f"{self.name}: start it with {flag(field)} for rollout.sglang.on_update=in_place"
                )

    async def _send(
        self, request: GenerateRequest, pending: InflightRequest, again: bool = False
    ) -> Generation | None:
        """Send the request when the gate is open, and await its answer; None if it is aborted before."""
        if not await self._inflight.may_send(pending):
            return None
        pending.sent = True
        return await self._answer(request, pending, again)

    async def _answer(self, request: GenerateRequest, pending: InflightRequest, again: bool) -> Generation:
        """The server's answer; at the deadline the tokens so far. ServerError if the server does not answer
        the abort either, or no request gets a token any more (``_note_without_tokens``)."""
        loop, limits = asyncio.get_running_loop(), self._deadlines
        overdue: list[asyncio.Task[None]] = []

        def end() -> None:
            overdue.append(asyncio.create_task(self._abort_overdue(pending, timeouts)))

        timer = loop.call_later(limits.request_s, end)
        try:
            async with asyncio.timeout(None) as timeouts:
                answer = await self.server.generate(request, pending.rid, again)
        except TimeoutError as error:
            raise ServerError(
                f"{self.name}: no answer within {limits.request_s:g} s, nor to an abort within "
                f"{limits.abort_s:g} s"
            ) from error
        finally:
            timer.cancel()
            for task in overdue:
                task.cancel()
        if len(answer.token_ids_R):
            self._no_tokens_since = None
        elif overdue:
            self._note_without_tokens(loop.time())
        return answer

    def _note_without_tokens(self, now: float) -> None:
        """Note an overdue request without tokens. ServerError if there was another one ``abort_s`` before,
        and no token of any request since: a single one may have waited in the server's queue."""
        if self._no_tokens_since is None:
            self._no_tokens_since = now
        elif now - self._no_tokens_since > self._deadlines.abort_s:
            raise ServerError(f"{self.name}: no token for any request within {self._deadlines.request_s:g} s")

    async def _abort_overdue(self, pending: InflightRequest, timeouts: asyncio.Timeout) -> None:
        """Abort one overdue request, repeatedly, until it is answered. Waits for the end of a pause: a paused
        server answers no abort."""
        while True:
            await self._inflight.until_open()
            async with self._one_control:
                if not self._inflight.is_open:
                    continue
                pending.aborted = True
                timeouts.reschedule(asyncio.get_running_loop().time() + self._deadlines.abort_s)
                with suppress(ServerError):  # the deadline passes all the same
                    while True:
                        await self.server.abort(pending.rid)
                        await asyncio.sleep(_ABORT_AGAIN_S)
                return

    async def _resume(self) -> None:
        await self.server.resume()
        await self._inflight.open_gate()

    async def _abort(self, reopen: bool = True) -> None:
        """Abort all requests. They answer at their next token: a paused server must run until they have.

        ``reopen``: let requests pass again then, unless the caller's pause holds.
        """
        inflight = await self._inflight.abort()
        for pending in inflight:
            pending.newest = self._paused_at
        self._inflight.close_gate()
        if self._paused_at is not None and any(pending.sent for pending in inflight):
            await self.server.resume()
            # An abort of a retracted request that does not run yet would lose its last tokens.
            await asyncio.sleep(0.1)
        await self.server.abort_all()
        while any(pending in self._inflight.all for pending in inflight):
            await asyncio.sleep(_ABORT_ALL_AGAIN_S)
            await self.server.abort_all()  # the gate is closed, so this reaches no later request
        if self._paused_at is not None:
            await self.server.pause()
        elif reopen:
            await self._inflight.open_gate()


def _truncated_after(generation: Generation, newest: int | None) -> Generation:
    """The generation, truncated before the first token of a weight version newer than ``newest``."""
    return generation if newest is None else generation.first(int((generation.versions_R <= newest).sum()))


class InflightRequest:
    """One request in flight: its server-side id, and whether it was sent or aborted."""

    def __init__(self, routes: bool = False) -> None:
        """``routes``: whether its answer must have routes."""
        self.rid = uuid.uuid4().hex
        self.routes = routes
        self.sent = False
        self.aborted = False
        self.newest: int | None = None
        """The newest weight version that its tokens may have, if it was aborted during a pause; else None."""

    def renew(self) -> None:
        """Reset it for a retry, with a new id: the server may still know the old one."""
        self.rid, self.sent = uuid.uuid4().hex, False


class InflightRequests:
    """The requests in flight at a server, and the gate before it. Lives in one event loop."""

    def __init__(self) -> None:
        self.all: set[InflightRequest] = set()
        self._changed = asyncio.Condition()
        self.is_open = True
        """Whether the gate is open: the server is neither paused nor about to be."""

    async def may_send(self, pending: InflightRequest) -> bool:
        """Wait until the gate is open; False if ``pending`` is aborted before."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.is_open or pending.aborted)
        return not pending.aborted

    async def until_open(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.is_open)

    async def abort(self) -> list[InflightRequest]:
        """Mark the current requests as aborted; returns them. Those that wait at the gate are not sent."""
        for pending in self.all:
            pending.aborted = True
        async with self._changed:
            self._changed.notify_all()
        return list(self.all)

    def close_gate(self) -> None:
        self.is_open = False

    async def open_gate(self) -> None:
        self.is_open = True
        async with self._changed:
            self._changed.notify_all()
