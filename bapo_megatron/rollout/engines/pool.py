"""The engine pool: which engines take requests, which are in quarantine, and how one comes back.

An engine that fails in any way (refuses, hangs, dies, answers nonsense, lies about its weights) is put in
quarantine: its requests fail at once and go elsewhere. It comes back when it answers again and has loaded and
confirmed the present weights. All of this happens in one event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from bapo_megatron.interfaces import Engine, ReceivesBroadcast
from bapo_megatron.rollout.engines.clock import LoopLagClock
from bapo_megatron.rollout.engines.current_weights import CurrentWeights
from bapo_megatron.rollout.engines.digest_quorum import DigestQuorum
from bapo_megatron.rollout.engines.sent_weights import SentCheck, SentDigests
from bapo_megatron.rollout.engines.slot import CachedPrefix, EngineSlot, choose
from bapo_megatron.rollout.engines.timeouts import EngineTimeouts, load_seconds
from bapo_megatron.types import GenerateRequest, Generation

Report = Callable[..., None]
"""``report(kind, **fields)`` records an event of the run."""

_STABLE_S = 60.0
"""An engine that has worked for so long is no longer one that comes only to go."""

_MAX_BACKOFF_S = 60.0
_LATE_S = 1.0
"""Event loop lag, in seconds, above which a deadline may have passed unnoticed."""


class EngineLost(Exception):
    """The engine that a request was given to is in quarantine now. Ask another."""

    def __init__(self, message: str, by_this_request: bool = False) -> None:
        super().__init__(message)
        self.by_this_request = by_this_request
        """Whether this request itself failed, not another one at the same engine."""


class EnginesGone(Exception):
    """Error of a run without engines: none has worked for ``lost_minutes``."""


class EnginePool:
    """All engines of a run, with at most ``most`` requests in flight at each."""

    def __init__(
        self,
        engines: Sequence[Engine],
        most: int,
        report: Report,
        timeouts: EngineTimeouts | None = None,
        prefix_cache: bool = False,
    ) -> None:
        """``prefix_cache``: engines keep the keys and values of a request for one that continues it, until
        their weights change."""
        self._clock = LoopLagClock()
        self._slots = [EngineSlot(engine, last_answer_at=self._clock.now()) for engine in engines]
        self._most = most
        self._report = report
        self.sent_check = SentCheck(report)
        """Compares the digests of engines with those of what was sent."""
        self._timeouts = timeouts or EngineTimeouts()
        self._prefix_cache = prefix_cache
        self._weights: CurrentWeights | None = None
        self._receiving: list[EngineSlot] = []
        self.changed = asyncio.Event()
        """Set when an engine has come back or was lost."""
        self._worked_at = self._clock.now()
        """When a request was last answered, or all was well for a while."""
        self.ready_transitions = 0
        """How often an engine has come, or come back."""
        self.down_since: float | None = self._clock.now()
        """Since when no engine works; None if one does, or all are held."""
        self._monitors = [asyncio.create_task(self._monitor(slot)) for slot in self._slots]

    @property
    def capacity(self) -> int:
        """Most requests that all engines together may have in flight."""
        return len(self._slots) * self._most

    @property
    def up(self) -> int:
        """Engines that take requests."""
        return sum(slot.is_up for slot in self._slots)

    def check(self, minutes: float) -> None:
        """EnginesGone if no engine has worked for so long."""
        if self.down_since is not None and self._clock.now() - self.down_since > 60 * minutes:
            reasons = "; ".join(f"{slot.engine.name}: {slot.reason}" for slot in self._slots)
            raise EnginesGone(f"no engine has worked for {minutes:g} minutes: {reasons}")

    def reserve(self, over_capacity: bool = False, cached: CachedPrefix | None = None) -> EngineSlot | None:
        """The engine for a request (``slot.choose``), with one more counted for it; None if none has room.

        ``over_capacity``: what the trainer waits for need not wait for room. ``cached``: of the last segment.
        """
        most = math.inf if over_capacity else self._most
        free = [slot for slot in self._slots if slot.is_up and not slot.is_held and slot.load < most]
        if not free:
            return None
        slot = choose(free, self._most, cached)
        slot.load += 1
        return slot

    def cached_at(self, slot: EngineSlot) -> CachedPrefix | None:
        """Where the next segment of a sequence finds what ``slot`` has computed; None without a cache."""
        return CachedPrefix(slot, slot.loads) if self._prefix_cache else None

    async def generate(self, slot: EngineSlot, request: GenerateRequest) -> Generation:
        """The answer to a request for which ``slot`` was reserved.

        EngineLost if the engine fails, now or in another request; ValueError if the request is malformed.
        """
        request_task = asyncio.ensure_future(slot.engine.generate(request))
        slot.inflight.add(request_task)
        try:
            answer = await request_task
            self._worked_at = slot.last_answer_at = self._clock.now()
            return answer
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if request_task.cancelled() and not (this and this.cancelling()):
                raise EngineLost(f"{slot.engine.name}: {slot.reason}") from None
            raise
        except ValueError:
            raise
        except Exception as error:  # a failing engine may raise anything; the run goes on without it
            self.quarantine(slot, str(error) or repr(error))
            raise EngineLost(f"{slot.engine.name}: {error}", by_this_request=True) from error
        finally:
            request_task.cancel()
            slot.inflight.discard(request_task)

    def quarantine(self, slot: EngineSlot, reason: str) -> None:
        """Put it in quarantine. Its requests end with EngineLost."""
        if not slot.is_up:
            return
        slot.is_up, slot.reason = False, reason
        for request_task in slot.inflight:
            request_task.cancel()
        soon = self._clock.now() - slot.ready_since < _STABLE_S
        slot.backoff_s = min(_MAX_BACKOFF_S, 2 * slot.backoff_s + self._timeouts.heartbeat_s) if soon else 0.0
        if self.up == 0:  # one that comes only to go has not helped
            self.down_since = self._worked_at
        self._report("engine_lost", engine=slot.engine.name, reason=reason, engines=self.up)
        self.changed.set()

    async def abort(self) -> None:
        """End everything in flight; it returns what it has."""
        up, limit_s = [slot for slot in self._slots if slot.is_up], self._timeouts.abort_s
        await asyncio.gather(*(self._or_quarantine(slot, slot.engine.abort(), limit_s) for slot in up))

    async def update(self, folder: Path, version: int) -> None:
        """Bring the weights in ``folder`` to every engine that works; to the others as they come back."""
        load_s = load_seconds(folder, self._timeouts.update_s)
        quorum = self._quorum(version, SentDigests.read(folder))
        self._weights = CurrentWeights(folder, version, quorum, load_s)
        up = [slot for slot in self._slots if slot.is_up]
        await asyncio.gather(*(self._update(slot) for slot in up or self._slots))

    async def gather(self) -> list[ReceivesBroadcast]:
        """The engines that can take a broadcast of weights now. None comes back with older ones."""
        self._weights = None
        alive = await asyncio.gather(*(slot.engine.is_alive() for slot in self._slots))
        found: dict[EngineSlot, ReceivesBroadcast] = {}
        for slot, answers in zip(self._slots, alive, strict=True):
            if answers and not slot.is_busy and isinstance(slot.engine, ReceivesBroadcast):
                found[slot] = slot.engine
        self._receiving = list(found)
        return list(found.values())

    def broadcast_succeeded(self, version: int) -> None:
        """The engines that were gathered have new weights now, which are in no folder."""
        for slot in self._slots:
            if slot in self._receiving:
                self._mark_ready(slot, version)
            else:
                self.quarantine(slot, "missed a broadcast of weights")
        self._receiving = []

    def broadcast_failed(self, reason: str) -> None:
        """Lose the engines that were gathered: what weights they have is unknown."""
        for slot in self._receiving:
            self.quarantine(slot, reason)
        self._receiving = []

    @property
    def needs_weights(self) -> bool:
        """Whether no engine works and only the trainer can bring one the weights that it needs."""
        return self.up == 0 and self._weights is None

    async def close(self) -> None:
        """Stop watching and let go of the engines."""
        self._clock.close()
        for monitor in self._monitors:
            monitor.cancel()
        for slot in self._slots:
            with suppress(Exception):  # one that is lost cannot be closed properly
                await asyncio.wait_for(slot.engine.close(), self._timeouts.abort_s)

    async def _update(self, slot: EngineSlot) -> None:
        """Bring the weights to one engine. One that is up keeps its requests; one that was lost, none."""
        if slot.is_busy or slot.is_held:
            return
        weights = self._begin_load(slot)
        try:
            if not slot.is_up and not await slot.engine.is_alive():
                return
            loaded = await self._or_quarantine(slot, weights.load(slot), weights.load_s)
        finally:
            await self._end_load(slot, weights)
        if loaded and self._weights is weights and not slot.is_held:  # else newer ones came meanwhile
            self._mark_ready(slot, weights.version)

    def _quorum(self, _version: int, sent: SentDigests | None) -> DigestQuorum:
        """The quorum on the digest of a version."""
        return DigestQuorum(self._timeouts.silent_s, partial(self.sent_check.is_sent, sent))

    def _begin_load(self, slot: EngineSlot) -> CurrentWeights:
        """The current weights, which are on their way to an engine from now on."""
        assert self._weights is not None
        slot.is_busy = True
        self._weights.quorum.expect(slot.engine.name)
        return self._weights

    async def _end_load(self, slot: EngineSlot, weights: CurrentWeights) -> None:
        """The weights are no longer on their way, whether they have come or not."""
        slot.is_busy = False
        await weights.quorum.release(slot.engine.name)

    def _mark_ready(self, slot: EngineSlot, version: int) -> None:
        """Let an engine that has the current weights take requests."""
        slot.loads += 1
        if not slot.is_up:
            slot.is_up, self.down_since = True, None
            slot.last_answer_at = slot.ready_since = self._clock.now()
            self.ready_transitions += 1
            slot.hang_reported_at, slot.hang_report_backoff_s = -math.inf, 0.0
            self._report("engine_ready", engine=slot.engine.name, version=version, engines=self.up)
            self.changed.set()

    async def _or_quarantine(self, slot: EngineSlot, call: Coroutine[Any, Any, Any], limit_s: float) -> bool:
        """Whether ``call`` succeeded in time, at an engine that did not fall silent. If not, it is lost."""
        task = asyncio.create_task(call)
        reason = await self._failure(slot, task, limit_s)
        if reason is None:
            return True
        if slot.is_up:
            self.quarantine(slot, reason)
        elif reason != slot.reason:
            slot.reason = reason
            self._report("engine_refused", engine=slot.engine.name, reason=reason, engines=self.up)
        return False

    async def _failure(self, slot: EngineSlot, call: asyncio.Task[Any], limit_s: float) -> str | None:
        """The failure of ``call`` as text; None if it succeeded. A call to a silent engine ends early."""
        began = self._clock.now()
        before_s = late_s = self._clock.late_s
        slot.last_answer_at = began
        while not call.done():
            before_s, late_s = late_s, self._clock.late_s
            await asyncio.wait({call}, timeout=self._timeouts.heartbeat_s)
            if call.done():
                break
            await self._check_health(slot)
            now = self._clock.now()
            if (silent_s := now - slot.last_answer_at) > self._timeouts.silent_s:
                call.cancel()
                return f"no answer for {silent_s:.0f} s"
            if now - began > limit_s:
                call.cancel()
                self._report_hang(slot, reason := f"not done in {limit_s:g} s")
                return reason
        if call.cancelled():
            return "the call was given up"
        error = call.exception()
        if error is None:
            return None
        reason = str(error) or repr(error)
        # Since the look before the last, so about when the limit passed: this process may look once more,
        # after it was late, before it comes to the limits that have passed meanwhile.
        is_ours = self._clock.late_s - before_s > _LATE_S
        timed_out = isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError)
        if timed_out and not is_ours:
            self._report_hang(slot, reason)
        return reason

    async def _check_health(self, slot: EngineSlot) -> bool:
        """Whether the engine answers."""
        began, late_s = self._clock.now(), self._clock.late_s
        if not await slot.engine.is_alive():
            if self._clock.late_s - late_s > _LATE_S:  # so its answer may have come too late by our fault
                slot.last_answer_at += self._clock.now() - began
            return False
        slot.last_answer_at = self._clock.now()
        return True

    def _report_hang(self, slot: EngineSlot, reason: str) -> None:
        """Report that it hangs and is to be ended; again and again, at ever longer intervals."""
        now = self._clock.now()
        if now - slot.hang_reported_at >= slot.hang_report_backoff_s:
            slot.hang_reported_at = now
            slot.hang_report_backoff_s = max(self._timeouts.hang_s, 2 * slot.hang_report_backoff_s)
            self._report("engine_hangs", engine=slot.engine.name, reason=reason)

    async def _monitor(self, slot: EngineSlot) -> None:
        """Check the engine's health again and again; bring it back when it answers."""
        timeouts = self._timeouts
        while True:
            await asyncio.sleep(timeouts.heartbeat_s + (0.0 if slot.is_up else slot.backoff_s))
            if slot.is_held:
                continue
            answers = await self._check_health(slot)
            silent_s = self._clock.now() - slot.last_answer_at
            if slot.is_up:
                if answers and slot.last_answer_at - slot.ready_since > _STABLE_S:
                    self._worked_at = slot.last_answer_at
                elif silent_s > timeouts.silent_s:
                    self.quarantine(slot, f"no answer for {timeouts.silent_s:g} s")
            elif silent_s > timeouts.hang_s:
                self._report_hang(slot, f"no answer for {silent_s:.0f} s")
            elif answers:
                await self._bring_back(slot)

    async def _bring_back(self, slot: EngineSlot) -> None:
        """Bring the current weights, if they are in a folder, to an engine that answers again."""
        if self._weights is not None:
            await self._update(slot)
