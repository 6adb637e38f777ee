"""The ``sglang`` engine: one SGLang server behind ``interfaces.Engine``.

What the server does not promise is kept here: a request that is not sent yet waits while the engine is paused
and is ended by an abort, and weights change between two tokens also while requests are in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bapo_megatron.interfaces import Confirm
from bapo_megatron.rollout.engines.requests import ModelLimits, check_request, empty_generation
from bapo_megatron.rollout.engines.sglang.http_client import (
    KeptConnectionClosed,
    PauseMode,
    ServerError,
    SglangServer,
)
from bapo_megatron.rollout.engines.sglang.inflight import InflightRequest, InflightRequests
from bapo_megatron.rollout.engines.sglang.requirements import IN_PLACE
from bapo_megatron.rollout.engines.timeouts import load_seconds
from bapo_megatron.types import BroadcastGroup, BucketSpec, GenerateRequest, Generation

_ABORT_AGAIN_S, _ABORT_ALL_AGAIN_S = 1.0, 0.1
"""A request that is between two states may miss an abort, of itself or of all."""


@dataclass(frozen=True)
class Deadlines:
    """Longest waits for a server, in seconds."""

    request_s: float = 3600.0
    """Deadline of one request; then it is aborted, and the tokens that it has are its answer."""
    abort_s: float = 60.0
    """Deadline of the abort of a request."""
    update_s: float = 600.0
    """Deadline of a load of new weights, beside the reading of their bytes (``timeouts.load_seconds``)."""


class SglangEngine:
    """An ``Engine`` (see interfaces.py) on one server. Everything happens in one event loop."""

    def __init__(
        self,
        server: SglangServer,
        limits: ModelLimits,
        on_update: PauseMode = "retract",
        deadlines: Deadlines | None = None,
        tensor: int = 1,
    ) -> None:
        """``on_update``: what becomes of requests in flight when weights change, see ``SglangConfig``.
        ``tensor``: tensor parallel size of the server."""
        self.name = server.url
        self.broadcast_ranks = tensor
        self.server = server
        self._limits = limits
        self._on_update = on_update
        self._deadlines = deadlines or Deadlines()
        self._inflight = InflightRequests()
        self._one_control = asyncio.Lock()
        self._paused_at: int | None = None
        """The weight version at the caller's pause."""
        self._version: int | None = None
        self._no_tokens_since: float | None = None
        """When a request first got no token in its whole time, if none has got any since."""

    async def weight_version(self) -> int:
        """The version that the server says it has."""
        self._version = await self.server.weight_version()
        return self._version

    async def is_alive(self) -> bool:
        """Whether the server answers."""
        return await self.server.is_alive()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Answer one request. ValueError, before it is sent, if it is malformed; ServerError if it fails."""
        check_request(request, self._limits)
        pending = InflightRequest()
        self._inflight.all.add(pending)
        try:
            try:
                answer = await self._send(request, pending)
            except KeptConnectionClosed:
                pending.renew()
                answer = await self._send(request, pending, again=True)
            if answer is None:
                return empty_generation(request)
            if answer.finish_reason == "abort" and not pending.aborted and not len(answer.token_ids_R):
                raise ServerError(f"{self.name}: ended a request that nobody aborted")
            if len(answer.token_ids_R) and not 0 <= answer.token_ids_R.min() <= answer.token_ids_R.max() < (
                self._limits.vocabulary
            ):
                raise ServerError(f"{self.name}: answers with token ids outside the vocabulary")
            return _truncated_after(answer, pending.newest)
        finally:
            self._inflight.all.discard(pending)

    async def abort(self) -> None:
        """End the requests in flight: they return what they have; what has not begun returns no token."""
        async with self._one_control:
            await self._abort()

    async def pause(self) -> None:
        """Stop sampling after the token in hand. Requests in flight keep their place."""
        async with self._one_control:
            if self._paused_at is None:
                self._paused_at = await self.weight_version() if self._version is None else self._version
            self._inflight.close_gate()
            await self.server.pause()

    async def resume(self) -> None:
        """Go on after ``pause``."""
        async with self._one_control:
            self._paused_at = None
            await self._resume()

    async def load(self, folder: Path, version: int, confirm: Confirm) -> None:
        """Take over the weights of an HF folder between two tokens. Requests in flight continue under them.

        ServerError if the server does not take them, or says afterwards that it has others, and what
        ``confirm`` raises. Its state is unknown then: it must not sample before a load has succeeded.
        """
        timeout = await asyncio.to_thread(load_seconds, folder, self._deadlines.update_s)
        async with self._one_control:
            await self._check_settings()
            self._inflight.close_gate()
            await self.server.pause(self._on_update)
            await self._load_and_confirm(
                folder, version, confirm, timeout, flush=self._on_update == "retract"
            )
            if self._paused_at is None:
                await self._resume()

    async def release_memory(self) -> None:
        """End the requests in flight, and give up the GPU memory of weights and caches; ``wake`` ends it.

        The server may answer before the memory is free: ask the driver.
        """
        async with self._one_control:
            await self._abort()
            self._inflight.close_gate()
            await self.server.pause("retract")
            await self.server.release_memory(self._deadlines.update_s)

    async def wake(self, folder: Path, version: int, confirm: Confirm) -> None:
        """``load`` on a server that has released its memory. Nothing is sampled before ``confirm``.

        After an error, end the server: what of its memory it has is unknown.
        """
        timeout = await asyncio.to_thread(load_seconds, folder, self._deadlines.update_s)
        async with self._one_control:
            await self.server.resume_model_memory(timeout)
            # The cache is empty since the release, and to empty it again would write to memory that is gone.
            await self._load_and_confirm(folder, version, confirm, timeout, flush=False)
            await self._finish_wake(timeout)

    async def begin_wake(self) -> None:
        """Take back the memory of the weights, undefined as they are then, and be ready to receive some."""
        async with self._one_control:
            await self.server.resume_model_memory(self._deadlines.update_s)
            await self.server.end_update()
            await self.server.begin_update()

    async def receive_handles(self, handles: Sequence[bytes]) -> None:
        """Load weights from the trainer's memory, by one pickle of handles for each tensor-parallel rank."""
        await self.server.receive_handles(handles, self._deadlines.update_s)

    async def confirm_weights(self, version: int, confirm: Confirm) -> None:
        """End the update of weights that came by handles: they are of ``version``."""
        async with self._one_control:
            await self.server.end_update()
            await self.server.set_version(version)
            await self._confirm(version, confirm, self._deadlines.update_s)

    async def finish_wake(self) -> None:
        """Take back the memory of the cache, and sample again."""
        async with self._one_control:
            await self._finish_wake(self._deadlines.update_s)

    async def leave_group(self, name: str, timeout_s: float) -> None:
        """Leave the group, if the server is in one of that name."""
        await self.server.leave_weight_group(name, timeout_s)

    async def join_group(self, group: BroadcastGroup, first_rank: int, timeout_s: float) -> None:
        """Join a broadcast's group; see ``SglangServer.join_weight_group``."""
        await self.server.join_weight_group(group, first_rank, timeout_s)

    async def begin_update(self) -> None:
        """Stop sampling for weights that come by broadcast. What no request here waits for is ended."""
        async with self._one_control:
            await self._check_settings()
            self._inflight.close_gate()
            if not self._inflight.all:
                await self.server.abort_all()
            await self.server.pause(self._on_update)
            await self.server.end_update()
            await self.server.begin_update()

    async def receive(self, bucket: BucketSpec, group_name: str, timeout_s: float) -> None:
        """Take one bucket from the sender of the group, and load it."""
        await self.server.receive(bucket, group_name, timeout_s)

    async def end_update(self, timeout_s: float) -> str:
        """End an update after all buckets: the digest of the weights that the server computes with."""
        await self.server.end_update()
        if self._on_update == "retract":
            await self.server.flush_cache()
        return await self.server.checksum(timeout_s)

    async def set_version(self, version: int) -> None:
        """The weights that came have this version."""
        await self.server.set_version(version)

    async def resume_after_update(self) -> None:
        """Sample again, unless the caller's pause holds."""
        async with self._one_control:
            await self.weight_version()
            if self._paused_at is None:
                await self._resume()

    async def close(self) -> None:
        """Nothing to release: the server keeps running."""

    async def _load_and_confirm(
        self, folder: Path, version: int, confirm: Confirm, timeout: float, flush: bool
    ) -> None:
        """Load weights into the paused server, and have them confirmed."""
        await self.server.update_from_disk(folder, version, flush, timeout)
        await self._confirm(version, confirm, timeout)

    async def _confirm(self, version: int, confirm: Confirm, timeout: float) -> None:
        """Have the weights confirmed that the paused server should have now."""
        found = await self.weight_version()
        if found != version:
            raise ServerError(f"{self.name}: says it has weights {found} after it was sent {version}")
        await confirm(await self.server.checksum(timeout))

    async def _finish_wake(self, timeout: float) -> None:
        await self.server.resume_cache_memory(timeout)
        self._paused_at = None
        await self._resume()

    async def _check_settings(self) -> None:
        """ServerError if requests would be kept in place by a server that is not made for it.

        See ``server_process.server_flags``. A server that the run has not started may have other flags, and
        so may the next one at the same address.
        """
        if self._on_update != "in_place":
            return
        settings = await self.server.settings()
        for field in IN_PLACE:
            if settings.get(field) is False:
                flag = "--" + field.replace("_", "-")
                raise ServerError(f"{self.name}: start it with {flag} for rollout.sglang.on_update=in_place")

    async def _send(
        self, request: GenerateRequest, pending: InflightRequest, again: bool = False
    ) -> Generation | None:
        """Send the request when the gate is open, and wait for its answer. None if it is aborted before."""
        if not await self._inflight.may_send(pending):
            return None
        pending.sent = True
        return await self._answer(request, pending, again)

    async def _answer(self, request: GenerateRequest, pending: InflightRequest, again: bool) -> Generation:
        """The server's answer; what it has at the deadline. ``again``: see ``SglangServer.generate``.

        ServerError if it does not answer the abort either, or if requests get no token in all their time, one
        after the other: those whose deadlines lie ``abort_s`` apart, while no other gets any.
        """
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
        """Note an overdue request without tokens. ServerError if no request gets a token for ``abort_s``.

        Before that, other requests may have been ahead of it in the server's queue.
        """
        if self._no_tokens_since is None:
            self._no_tokens_since = now
        elif now - self._no_tokens_since > self._deadlines.abort_s:
            raise ServerError(f"{self.name}: no token for any request within {self._deadlines.request_s:g} s")

    async def _abort_overdue(self, pending: InflightRequest, timeouts: asyncio.Timeout) -> None:
        """Abort one request until it is answered or overdue. A paused server would not answer."""
        while True:
            await self._inflight.until_open()
            async with self._one_control:
                if self._inflight.are_held:
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

    async def _abort(self) -> None:
        """Requests answer an abort at their next token, so a paused server runs for as long as that takes."""
        inflight = await self._inflight.abort()
        for pending in inflight:
            pending.newest = self._paused_at
        self._inflight.close_gate()
        if self._paused_at is not None and any(pending.sent for pending in inflight):
            await self.server.resume()
            await asyncio.sleep(0.1)  # retracted requests run again, or their last tokens would be lost
        await self.server.abort_all()
        while any(pending in self._inflight.all for pending in inflight):
            await asyncio.sleep(_ABORT_ALL_AGAIN_S)
            await self.server.abort_all()  # the gate is closed: there are no others
        if self._paused_at is not None:
            await self.server.pause()
        else:
            await self._inflight.open_gate()


def _truncated_after(found: Generation, newest: int | None) -> Generation:
    """The generation without tokens of weights newer than version ``newest``."""
    if newest is None:
        return found
    kept = int((found.versions_R <= newest).sum())
    tokens_R, log_probs_R, versions_R = (
        x[:kept] for x in (found.token_ids_R, found.log_probs_R, found.versions_R)
    )
    return replace(found, token_ids_R=tokens_R, log_probs_R=log_probs_R, versions_R=versions_R)
