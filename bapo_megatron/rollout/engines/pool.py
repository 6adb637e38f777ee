"""The engines of a run: who takes requests, who is in quarantine, and how one comes back.

An engine that fails in any way (refuses, hangs, dies, answers nonsense, lies about its weights) is put in
quarantine: its requests fail at once and go elsewhere. It comes back when it answers again and has loaded and
confirmed the present weights. All of this happens in one event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bapo_megatron.interfaces import Engine
from bapo_megatron.rollout.engines.clock import OwnTime
from bapo_megatron.rollout.engines.digest_quorum import Agreement
from bapo_megatron.rollout.engines.timeouts import Patience
from bapo_megatron.types import GenerateRequest, Generation

Report = Callable[..., None]
"""``report(kind, **fields)``: something happened that people want to know."""

_STEADY_S = 60.0
"""An engine that has worked for so long is no longer one that comes only to go."""

_LONGEST_PAUSE_S = 60.0
_LATE_S = 1.0
"""This process came to look so much too late that a limit may have passed meanwhile."""


class EngineLost(Exception):
    """The engine that a request was given to is in quarantine now. Ask another."""

    def __init__(self, message: str, with_this: bool = False) -> None:
        super().__init__(message)
        self.with_this = with_this
        """It was this request that failed, not another at the same engine."""


class EnginesGone(Exception):
    """No engine has worked for too long."""


@dataclass(eq=False)
class Member:
    """One engine and what is known of it."""

    engine: Engine
    is_up: bool = False
    load: int = 0
    """Requests in flight."""
    flights: set[asyncio.Task[Generation]] = field(default_factory=set)
    heard_at: float = -math.inf
    """When it was last heard of, by the fleet's clock as all times here."""
    told_s: float = 0.0
    """How long nothing more is said of its hanging, since ``told_at``."""
    told_at: float = -math.inf
    came_at: float = 0.0
    """When it came, or came back."""
    is_busy: bool = False
    """Weights are on their way to it."""
    pause_s: float = 0.0
    """How much longer it is left alone, because it went soon after it had come."""
    reason: str = "it has no weights yet"
    """Why it is in quarantine."""


@dataclass(frozen=True, eq=False)
class _Weights:
    """The present weights, if they are in a folder."""

    folder: Path
    version: int
    agreement: Agreement


class Fleet:
    """All engines. ``most`` requests in flight at each."""

    def __init__(
        self, engines: Sequence[Engine], most: int, report: Report, patience: Patience | None = None
    ) -> None:
        self._clock = OwnTime()
        self._members = [Member(engine, heard_at=self._clock.now()) for engine in engines]
        self._most = most
        self._report = report
        self._patience = patience or Patience()
        self._weights: _Weights | None = None
        self._gathered: list[Member] = []
        self.changed = asyncio.Event()
        """Set when an engine has come or gone."""
        self._worked_at = self._clock.now()
        """When a request was last answered, or all was well for a while."""
        self.comings = 0
        """How often an engine has come, or come back."""
        self.down_since: float | None = self._clock.now()
        """Since when no engine works; None if one does."""
        self._monitors = [asyncio.create_task(self._watch(member)) for member in self._members]

    @property
    def places(self) -> int:
        """Requests that all engines together may have in flight."""
        return len(self._members) * self._most

    @property
    def up(self) -> int:
        """Engines that take requests."""
        return sum(member.is_up for member in self._members)

    def why_down(self) -> str:
        """The reasons of those in quarantine."""
        down = [m for m in self._members if not m.is_up]
        return "; ".join(f"{m.engine.name}: {m.reason}" for m in down)

    def check(self, minutes: float) -> None:
        """EnginesGone if no engine has worked for so long."""
        if self.down_since is not None and self._clock.now() - self.down_since > 60 * minutes:
            raise EnginesGone(f"no engine has worked for {minutes:g} minutes: {self.why_down()}")

    def reserve(self, beyond: bool = False) -> Member | None:
        """The engine with the fewest requests, with one more counted for it; None if none has room.

        ``beyond``: what the trainer waits for need not wait for room.
        """
        most = math.inf if beyond else self._most
        free = [member for member in self._members if member.is_up and member.load < most]
        if not free:
            return None
        member = min(free, key=lambda one: one.load)
        member.load += 1
        return member

    async def generate(self, member: Member, request: GenerateRequest) -> Generation:
        """The answer to a request for which ``member`` was reserved.

        EngineLost if the engine fails, now or in another request; ValueError if the request is malformed.
        """
        flight = asyncio.ensure_future(member.engine.generate(request))
        member.flights.add(flight)
        try:
            answer = await flight
            self._worked_at = member.heard_at = self._clock.now()
            return answer
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if flight.cancelled() and not (this and this.cancelling()):
                raise EngineLost(f"{member.engine.name}: {member.reason}") from None
            raise
        except ValueError:
            raise
        except Exception as error:  # a failing engine may raise anything; the run goes on without it
            self.lose(member, str(error) or repr(error))
            raise EngineLost(f"{member.engine.name}: {error}", with_this=True) from error
        finally:
            flight.cancel()
            member.flights.discard(flight)

    def lose(self, member: Member, reason: str) -> None:
        """Put it in quarantine. Its requests end with EngineLost."""
        if not member.is_up:
            return
        member.is_up, member.reason = False, reason
        for flight in member.flights:
            flight.cancel()
        soon = self._clock.now() - member.came_at < _STEADY_S
        member.pause_s = (
            min(_LONGEST_PAUSE_S, 2 * member.pause_s + self._patience.heartbeat_s) if soon else 0.0
        )
        if self.up == 0:  # one that comes only to go has not helped
            self.down_since = self._worked_at
        self._report("engine_lost", engine=member.engine.name, reason=reason, engines=self.up)
        self.changed.set()

    async def abort(self) -> None:
        """End everything in flight; it returns what it has."""
        await asyncio.gather(*(self._abort(member) for member in self._members if member.is_up))

    async def update(self, folder: Path, version: int) -> None:
        """Bring the weights in ``folder`` to every engine that works; to the others as they come back."""
        self._weights = _Weights(folder, version, Agreement(self._patience.silent_s))
        up = [member for member in self._members if member.is_up]
        await asyncio.gather(*(self._update(member) for member in up or self._members))

    async def gather(self) -> list[Engine]:
        """The engines that can take weights now. From now on none comes back with older ones."""
        self._weights = None
        alive = await asyncio.gather(*(member.engine.is_alive() for member in self._members))
        found = zip(self._members, alive, strict=True)
        self._gathered = [member for member, answers in found if answers and not member.is_busy]
        return [member.engine for member in self._gathered]

    def adopt(self, version: int) -> None:
        """Those that were gathered have new weights now, which are in no folder."""
        for member in self._members:
            if member in self._gathered:
                self._welcome(member, version)
            else:
                self.lose(member, "missed a broadcast of weights")
        self._gathered = []

    def disown(self, reason: str) -> None:
        """Nobody knows what weights those that were gathered have."""
        for member in self._gathered:
            self.lose(member, reason)
        self._gathered = []

    @property
    def wants_weights(self) -> bool:
        """No engine works, and only the trainer can bring one the weights that it needs."""
        return self.up == 0 and self._weights is None

    async def close(self) -> None:
        """Stop watching and let go of the engines."""
        self._clock.close()
        for monitor in self._monitors:
            monitor.cancel()
        for member in self._members:
            with suppress(Exception):  # one that is lost cannot be closed properly
                await asyncio.wait_for(member.engine.close(), self._patience.abort_s)

    async def _abort(self, member: Member) -> None:
        await self._or_lose(member, member.engine.abort(), self._patience.abort_s)

    async def _update(self, member: Member) -> None:
        """Weights to one engine. One that is up goes on with its requests; one that was lost starts clean."""
        assert self._weights is not None
        weights = self._weights
        if member.is_busy:
            return
        member.is_busy = True
        weights.agreement.expect(member.engine.name)
        try:
            if not member.is_up and not await member.engine.is_alive():
                return
            loaded = await self._or_lose(member, _load(member, weights), self._patience.update_s)
        finally:
            member.is_busy = False
            await weights.agreement.release(member.engine.name)
        if loaded and self._weights is weights:  # else newer ones came meanwhile
            self._welcome(member, weights.version)

    def _welcome(self, member: Member, version: int) -> None:
        """It has the present weights, and takes requests."""
        if not member.is_up:
            member.is_up, self.down_since = True, None
            member.heard_at = member.came_at = self._clock.now()
            self.comings += 1
            member.told_at, member.told_s = -math.inf, 0.0
            self._report("engine_ready", engine=member.engine.name, version=version, engines=self.up)
            self.changed.set()

    async def _or_lose(self, member: Member, call: Coroutine[Any, Any, Any], limit_s: float) -> bool:
        """Whether ``call`` succeeded in time, at an engine that did not fall silent. If not, it is lost."""
        task = asyncio.create_task(call)
        reason = await self._failure(member, task, limit_s)
        if reason is None:
            return True
        if member.is_up:
            self.lose(member, reason)
        elif reason != member.reason:
            member.reason = reason
            self._report("engine_refused", engine=member.engine.name, reason=reason, engines=self.up)
        return False

    async def _failure(self, member: Member, call: asyncio.Task[Any], limit_s: float) -> str | None:
        """What went wrong with ``call``. One at an engine that falls silent is not waited for to the end."""
        began = self._clock.now()
        before_s = late_s = self._clock.late_s
        member.heard_at = began
        while not call.done():
            before_s, late_s = late_s, self._clock.late_s
            await asyncio.wait({call}, timeout=self._patience.heartbeat_s)
            if call.done():
                break
            await self._listen(member)
            now = self._clock.now()
            if (silent_s := now - member.heard_at) > self._patience.silent_s:
                call.cancel()
                return f"no answer for {silent_s:.0f} s"
            if now - began > limit_s:
                call.cancel()
                self._hangs(member, reason := f"not done in {limit_s:g} s")
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
            self._hangs(member, reason)
        return reason

    async def _listen(self, member: Member) -> bool:
        """Whether the engine answers."""
        began, late_s = self._clock.now(), self._clock.late_s
        if not await member.engine.is_alive():
            if self._clock.late_s - late_s > _LATE_S:  # so its answer may have come too late by our fault
                member.heard_at += self._clock.now() - began
            return False
        member.heard_at = self._clock.now()
        return True

    def _hangs(self, member: Member, reason: str) -> None:
        """Say that it is to be ended: it answers, perhaps, but does nothing. Again and again, ever later."""
        now = self._clock.now()
        if now - member.told_at >= member.told_s:
            member.told_at, member.told_s = now, max(self._patience.hang_s, 2 * member.told_s)
            self._report("engine_hangs", engine=member.engine.name, reason=reason)

    async def _watch(self, member: Member) -> None:
        """Look at the engine again and again; bring it back when it answers."""
        patience = self._patience
        while True:
            await asyncio.sleep(patience.heartbeat_s + (0.0 if member.is_up else member.pause_s))
            answers = await self._listen(member)
            silent_s = self._clock.now() - member.heard_at
            if member.is_up:
                if answers and member.heard_at - member.came_at > _STEADY_S:
                    self._worked_at = member.heard_at
                elif silent_s > patience.silent_s:
                    self.lose(member, f"no answer for {patience.silent_s:g} s")
            elif silent_s > patience.hang_s:
                self._hangs(member, f"no answer for {silent_s:.0f} s")
            elif self._weights is not None:
                await self._update(member)


async def _load(member: Member, weights: _Weights) -> None:
    """Weights to an engine, which then has the right ones or is of no use."""
    engine = member.engine
    if not member.is_up:
        await engine.abort()  # what it still does for nobody
    await engine.load(weights.folder, weights.version, partial(weights.agreement.confirm, engine.name))
    if (told := await engine.weight_version()) != weights.version:
        raise RuntimeError(f"says it has weights {told} after it was sent {weights.version}")
