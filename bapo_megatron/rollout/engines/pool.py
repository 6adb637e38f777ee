"""Engine pool: load balancing, weight updates, health checks and recovery of a run's inference engines.

``EnginePool`` lives in one event loop, of the sampler process or `bapo eval`. An engine that refuses a call,
hangs, crashes, answers invalidly or reports wrong weights goes into quarantine: its requests immediately
raise EngineLost, and callers send them to other engines. It takes requests again once it answers health
checks and has loaded the current weights.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.interfaces import Engine
from bapo_megatron.rollout.engines.pool_state import (
    CachedPrefix,
    CurrentWeights,
    EngineSlot,
    EngineTimeouts,
    LoopLagClock,
    choose,
    load_seconds,
)
from bapo_megatron.rollout.engines.sent_weights import DigestQuorum, SentCheck, SentDigests
from bapo_megatron.types import GenerateRequest, Generation

Report = Callable[..., None]
"""``report(kind, **fields)`` records a run event."""

_STABLE_S = 60.0
"""Crash-loop threshold: an engine lost within this time of its recovery is retried with growing backoff."""

_MAX_BACKOFF_S = 60.0
_MAX_HANG_BACKOFF_S = 3600.0
"""Longest time between two reports of a hang, each of which restarts the server unless it is starting."""

_LATE_S = 1.0
"""Event loop lag in seconds above which a missed deadline is this process's fault, not the engine's."""


class EngineLost(Exception):
    """``EnginePool.generate`` failed: the engine went into quarantine; another one may take the request."""

    def __init__(self, message: str, by_this_request: bool = False) -> None:
        super().__init__(message)
        self.by_this_request = by_this_request
        """Whether this request caused the failure, rather than another one on the same engine."""


class EnginesGone(Exception):
    """Raised by ``EnginePool.check``: no engine has worked for the given minutes, so the run must stop."""


class EnginePool:
    """A run's engines in one event loop: requests, weight updates, health checks and quarantine.

    Construct it in a running loop. An engine takes requests once it has weights, from ``update`` (a folder),
    a broadcast or, in a ``ColocatedPool``, a wake-up. For a request call ``reserve``, which never waits and
    returns an ``EngineSlot`` or None (``changed`` is set when an engine may have room), then ``generate``;
    afterwards the caller lowers ``slot.load`` by 1 and sets ``changed``. ``max_in_flight`` limits each
    engine's requests, except those reserved ``over_capacity``.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        max_in_flight: int,
        report: Report,
        timeouts: EngineTimeouts | None = None,
        prefix_cache: bool = False,
    ) -> None:
        """``prefix_cache``: engines keep a request's keys and values until their weights change."""
        self._clock = LoopLagClock()
        self._slots = [EngineSlot(engine, last_answer_at=self._clock.now()) for engine in engines]
        self._max_in_flight = max_in_flight
        self._report = report
        self.sent_check = SentCheck(report)
        self._timeouts = timeouts or EngineTimeouts()
        self._prefix_cache = prefix_cache
        self._weights: CurrentWeights | None = None
        self.changed = asyncio.Event()
        """Set when an engine becomes ready, is lost, or has room again."""
        self._worked_at = self._clock.now()
        """Time of the last accepted answer, or of a stable engine's last health check."""
        self.ready_transitions = 0
        """Number of times an engine became ready, initially or after quarantine."""
        self.down_since: float | None = self._clock.now()
        """Time since which no engine has worked; None while one is up or all are held."""
        self._monitors = [asyncio.create_task(self._monitor(slot)) for slot in self._slots]

    @property
    def capacity(self) -> int:
        return len(self._slots) * self._max_in_flight

    @property
    def update_s(self) -> float:
        """Time limit for each step of a weight update in parts, in seconds."""
        return self._timeouts.update_s

    @property
    def up(self) -> int:
        return sum(slot.is_up for slot in self._slots)

    def check(self, minutes: float) -> None:
        """Raise EnginesGone if no engine has worked for ``minutes``."""
        if self.down_since is not None and self._clock.now() - self.down_since > 60 * minutes:
            reasons = "; ".join(f"{slot.engine.name}: {slot.reason}" for slot in self._slots)
            raise EnginesGone(f"no engine has worked for {minutes:g} minutes: {reasons}")

    def reserve(self, over_capacity: bool = False, cached: CachedPrefix | None = None) -> EngineSlot | None:
        """Reserve an engine for a request (``pool_state.choose``) and return it; None if none has room.
        ``over_capacity``: accept a full engine (the trainer waits). ``cached``: from the last segment."""
        most = math.inf if over_capacity else self._max_in_flight
        free = [slot for slot in self._slots if slot.is_up and not slot.is_held and slot.load < most]
        if not free:
            return None
        slot = choose(free, self._max_in_flight, cached)
        slot.load += 1
        return slot

    def cached_at(self, slot: EngineSlot) -> CachedPrefix | None:
        """Return the prefix cache of a segment just sampled on ``slot``; None if engines have no cache."""
        return CachedPrefix(slot, slot.loads) if self._prefix_cache else None

    async def generate(
        self, slot: EngineSlot, request: GenerateRequest, is_known: Callable[[int], bool], expected: str
    ) -> Generation:
        """Send a request to its reserved engine and return the answer. Raises ValueError if it is malformed;
        quarantines the engine and raises EngineLost if it fails (also on another request) or answers with
        tokens of weights older than its last load or not ``is_known``, described by ``expected``."""
        version = slot.version
        request_task = asyncio.ensure_future(slot.engine.generate(request))
        slot.inflight.add(request_task)
        try:
            answer = await request_task
            slot.last_answer_at = self._clock.now()
            self._check_versions(slot, answer, version, is_known, expected)
            self._worked_at = slot.last_answer_at  # only an accepted answer counts
            return answer
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if request_task.cancelled() and not (this and this.cancelling()):
                raise EngineLost(f"{slot.engine.name}: {slot.reason}") from None
            raise
        except (ValueError, EngineLost):
            raise
        except Exception as error:  # a failing engine may raise anything; the run continues without it
            self.quarantine(slot, str(error) or repr(error))
            raise EngineLost(f"{slot.engine.name}: {error}", by_this_request=True) from error
        finally:
            request_task.cancel()
            slot.inflight.discard(request_task)

    def _check_versions(
        self,
        slot: EngineSlot,
        answer: Generation,
        version: int,
        is_known: Callable[[int], bool],
        expected: str,
    ) -> None:
        """Quarantine the engine and raise EngineLost if an answer has tokens of unknown weights, or of
        weights older than ``version``: its server was restarted between two health checks, or another run
        loaded its weights. ``by_this_request`` is set: a request that meets this repeatedly is given up."""
        if not len(versions_R := answer.versions_R):
            return
        oldest, newest = int(versions_R.min()), int(versions_R.max())
        versions = [oldest] if oldest == newest else np.unique(versions_R).tolist()
        if oldest < version:
            reason = (
                f"answers with tokens of weights {oldest} after a load of {version}: its server was "
                "restarted, or another run uses it"
            )
        elif unknown := [number for number in versions if not is_known(number)]:
            reason = (
                f"answers with tokens of weights {unknown[0]}, not of {expected}, after a load of {version}"
            )
        else:
            return
        self.quarantine(slot, reason)
        raise EngineLost(f"{slot.engine.name}: {reason}", by_this_request=True)

    def quarantine(self, slot: EngineSlot, reason: str) -> None:
        """Put a working engine in quarantine and end its requests with EngineLost."""
        if not slot.is_up:
            return
        # State before cancellation: the requests read the reason, and must not return to this engine.
        slot.is_up, slot.reason = False, reason
        for request_task in slot.inflight:
            request_task.cancel()
        soon = self._clock.now() - slot.ready_since < _STABLE_S
        slot.backoff_s = min(_MAX_BACKOFF_S, 2 * slot.backoff_s + self._timeouts.heartbeat_s) if soon else 0.0
        if self.up == 0:  # not now: an engine in a crash loop has sampled nothing since
            self.down_since = self._worked_at
        self._report("engine_lost", engine=slot.engine.name, reason=reason, engines=self.up)
        self.changed.set()

    async def abort(self) -> None:
        """Abort all requests in flight; each returns its tokens so far."""
        up, limit_s = [slot for slot in self._slots if slot.is_up], self._timeouts.abort_s
        await asyncio.gather(*(self.or_quarantine(slot, slot.engine.abort(), limit_s) for slot in up))

    async def update(self, folder: Path, version: int) -> None:
        """Load the weights in ``folder`` into every working engine (all, if none works), and into the others
        once they recover. Returns when each has loaded or is in quarantine; engine errors are not raised."""
        load_s = load_seconds(folder, self._timeouts.update_s)
        quorum = self.quorum(version, SentDigests.read(folder))
        # Before the loads: an engine that recovers meanwhile must get these weights, not the previous ones.
        self._weights = CurrentWeights(folder, version, quorum, load_s)
        up = [slot for slot in self._slots if slot.is_up]
        await asyncio.gather(*(self._update(slot) for slot in up or self._slots))

    async def gather(self) -> list[EngineSlot]:
        """Return the engines that answer, for a broadcast. Other engines recover only with later weights."""
        # First: no engine may recover with an older version's folder during the broadcast.
        self._weights = None
        answering = await asyncio.gather(*map(self._answers, self._slots))
        return [
            slot for slot, answers in zip(self._slots, answering, strict=True) if answers and not slot.is_busy
        ]

    async def _answers(self, slot: EngineSlot) -> bool:
        """Return whether an engine answers. A working one, which may be busy, is asked again for up to
        ``silent_s``: an engine that misses a broadcast loses its requests."""
        until = self._clock.now() + self._timeouts.silent_s
        while not (answers := await self._check_health(slot)) and slot.is_up and self._clock.now() < until:
            await asyncio.sleep(self._timeouts.heartbeat_s)
        return answers

    def resumed(self, version: int, slots: Collection[EngineSlot]) -> None:
        """Mark a broadcast's receivers ready with ``version``; quarantine the other engines."""
        for slot in self._slots:
            if slot in slots:
                self._mark_ready(slot, version)
            else:
                self.quarantine(slot, "missed a broadcast of weights")

    def named(self, names: Collection[str]) -> list[EngineSlot]:
        return [slot for slot in self._slots if slot.engine.name in names]

    @property
    def needs_weights(self) -> bool:
        """Whether the trainer must push the weights again: no engine works, and no folder has them."""
        return self.up == 0 and self._weights is None

    async def close(self) -> None:
        self._clock.close()
        for monitor in self._monitors:
            monitor.cancel()
        for slot in self._slots:
            with suppress(Exception):  # an engine in quarantine may not close properly
                await asyncio.wait_for(slot.engine.close(), self._timeouts.abort_s)

    async def _update(self, slot: EngineSlot) -> None:
        """Load the current weights into one engine and mark it ready; a working one keeps its requests."""
        if slot.is_busy or slot.is_held:
            return
        weights = self._begin_load(slot)
        try:
            if not slot.is_up and not await slot.engine.is_alive():
                return
            loaded = await self.or_quarantine(slot, weights.load(slot), weights.load_s)
        finally:
            await self._end_load(slot, weights)
        # During the load newer weights or a hold (the policy's turn on the GPU) may have arrived.
        if loaded and self._weights is weights and not slot.is_held:
            self._mark_ready(slot, weights.version)

    def quorum(self, _version: int, sent: SentDigests | None) -> DigestQuorum:
        return DigestQuorum(self._timeouts.silent_s, partial(self.sent_check.is_sent, sent))

    def _begin_load(self, slot: EngineSlot) -> CurrentWeights:
        assert self._weights is not None
        slot.is_busy = True
        self._weights.quorum.expect(slot.engine.name)
        return self._weights

    async def _end_load(self, slot: EngineSlot, weights: CurrentWeights) -> None:
        slot.is_busy = False
        await weights.quorum.release(slot.engine.name)

    def _mark_ready(self, slot: EngineSlot, version: int) -> None:
        slot.loads += 1  # even if it was up: its prefix cache belongs to the old weights
        slot.version = version
        if not slot.is_up:
            slot.is_up, self.down_since = True, None
            slot.last_answer_at = slot.ready_since = self._clock.now()
            self.ready_transitions += 1
            slot.hang_reported_at, slot.hang_report_backoff_s = -math.inf, 0.0
            self._report("engine_ready", engine=slot.engine.name, version=version, engines=self.up)
            self.changed.set()

    async def or_quarantine(
        self, slot: EngineSlot, call: Coroutine[Any, Any, Any], limit_s: float | None = None
    ) -> bool:
        """Await a control call under health checks. If it fails, quarantine the engine and return False."""
        task = asyncio.create_task(call)
        reason = await self._failure(slot, task, self._timeouts.update_s if limit_s is None else limit_s)
        if reason is None:
            return True
        if slot.is_up:
            self.quarantine(slot, reason)
        elif reason != slot.reason:
            slot.reason = reason
            self._report("engine_refused", engine=slot.engine.name, reason=reason, engines=self.up)
        return False

    async def _failure(self, slot: EngineSlot, call: asyncio.Task[Any], limit_s: float) -> str | None:
        """Await a control call; return its failure as text, or None. Cancels it if the engine is silent."""
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
            return "the call was cancelled"
        error = call.exception()
        if error is None:
            return None
        reason = str(error) or repr(error)
        # Lag since the second-to-last poll: after a lag the loop may poll once before overdue deadlines fire.
        is_ours = self._clock.late_s - before_s > _LATE_S
        timed_out = isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError)
        if timed_out and not is_ours:
            self._report_hang(slot, reason)
        return reason

    async def _check_health(self, slot: EngineSlot) -> bool:
        """Return whether the engine answers. A failure during event loop lag does not count as silence."""
        began, late_s = self._clock.now(), self._clock.late_s
        if not await slot.engine.is_alive():
            if self._clock.late_s - late_s > _LATE_S:  # this process may have read the answer too late
                slot.last_answer_at += self._clock.now() - began
            return False
        slot.last_answer_at = self._clock.now()
        return True

    def _report_hang(self, slot: EngineSlot, reason: str) -> None:
        """Report a hang, so that rank 0 restarts the server; repeated reports wait for a growing backoff."""
        now = self._clock.now()
        if now - slot.hang_reported_at >= slot.hang_report_backoff_s:
            slot.hang_reported_at = now
            longer_s = max(self._timeouts.hang_s, 2 * slot.hang_report_backoff_s)
            slot.hang_report_backoff_s = min(_MAX_HANG_BACKOFF_S, longer_s)
            self._report("engine_hangs", engine=slot.engine.name, reason=reason)

    async def _monitor(self, slot: EngineSlot) -> None:
        """Run one engine's health checks: quarantine it when silent, recover it when it answers."""
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
        """Load the current weights into an engine that answers again, if they are in a folder."""
        if self._weights is not None:
            await self._update(slot)
