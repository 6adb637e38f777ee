"""Pool of worker processes, for calls of any kind: many at a time, with limits, each answered once.

A kind of call is a function of a worker program (serving.py) with its limit of time. Rewards are scored so
(reward/pool.py). What happens to a call:

- It waits for a free worker, first come first served. A worker whose functions are plain takes one call at a
  time, one with async functions ``concurrency``. Its time begins when it is sent: neither waiting nor a start
  of a worker counts.
- ``holder`` names the object that it is about. All calls of a holder go to one worker, as long as that lives.
- Past its time an async call is cancelled in its worker. A worker that does not heed that, or that is not
  async, is killed.
- A worker that ended leaves suspects: the calls that it had. One that may not be repeated fails. Others are
  asked again of the next process in that slot, before all else, and few at a time, down to one: who ends
  workers ends up alone, and fails when it has ended two. So no other call is lost for good because of it.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Literal

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.child_process import ChildError
from bapo_megatron.workers.process import WorkerProcess, WorkerProgram
from bapo_megatron.workers.scratch import remove_abandoned

Failure = Literal["raised", "time", "died"]
"""The function raised; it took too long; its worker ended before the answer, or could not be started."""

TRIES = 2
"""Runs of a repeatable call that may end badly by itself: out of time, or alone in a worker that ended."""

START_TRIES = 2
"""Starts of a worker in a row; if all fail its slot waits for ``RESTART_PAUSE_S``, or until needed."""

RESTART_PAUSE_S = 10.0

LOTS = 8
"""Suspects are asked again in so many lots: of 1,000 at most 125 at a time, then 15, then 1."""


@dataclass(frozen=True)
class CallKind:
    """A kind of call: a function of the worker program, and how it may be called."""

    function: str
    limit_s: float
    repeatable: bool
    """Whether a second worker may be asked where the first did not answer. Else such a call fails."""
    grace_s: float = 15.0
    """Seconds that an async function has, past its limit, to end when it is cancelled."""


class CallFailed(Exception):
    """Failure of a ``WorkerPool.call``, named by its function and its holder."""

    def __init__(
        self, name: str, failure: Failure, detail: str, traceback: str = "", place: str = "", beside: int = 0
    ) -> None:
        super().__init__(f"{name}: {failure}: {detail}")
        self.failure: Failure = failure
        self.detail = detail
        self.traceback = traceback
        """Of a function that raised."""
        self.place = place
        """Identity of a mistake in a function: the type of the error and the line that raised it."""
        self.beside = beside
        """Other calls in flight when its worker ended: one of them may have ended it, or kept it busy."""


@dataclass(eq=False)
class _Call:
    """A call on its way: its question, and its caller's future."""

    number: int
    kind: CallKind
    question: Any
    holder: Hashable | None
    future: asyncio.Future[Any]
    crowd: float = math.inf
    """Most calls that its worker may have, with this one; finite makes it a suspect."""
    losses: int = 0
    """Runs that ended badly by itself."""
    deadline: float = math.inf
    timer: asyncio.TimerHandle | None = None

    def fail(
        self, failure: Failure, detail: str, traceback: str = "", place: str = "", beside: int = 0
    ) -> None:
        """CallFailed for the caller, if it still waits."""
        if not self.future.done():
            name = self.kind.function if self.holder is None else f"{self.kind.function} of {self.holder}"
            self.future.set_exception(CallFailed(name, failure, detail, traceback, place, beside))

    def line(self) -> bytes:
        """Its line for a worker. Written when it is sent: thousands may wait, each with a long response."""
        kind = self.kind
        message = {"id": self.number, "function": kind.function, "limit_s": kind.limit_s}
        return json.dumps({**message, "question": self.question}).encode()

    def stop_timer(self) -> None:
        """End of its time limit: it is no longer in flight."""
        if self.timer:
            self.timer.cancel()

    def late(self) -> str:
        """Detail of a failure by time."""
        return f"no answer within {self.kind.limit_s:g} s"

    def is_suspect(self) -> bool:
        """Whether it was in flight when a worker ended, or had no memory left."""
        return self.crowd < math.inf

    def may_be_repeated(self) -> bool:
        """Whether another worker may be asked."""
        return self.kind.repeatable and self.losses < TRIES and not self.future.done()


class WorkerPool:
    """Pool of ``workers`` processes of one program, for one event loop: ``start``, ``call``, ``close``."""

    def __init__(self, program: WorkerProgram, workers: int, concurrency: int = 1000) -> None:
        """``concurrency``: most calls that a worker of an async program has at a time."""
        self.program, self.concurrency = program, concurrency
        self.waiting: deque[_Call] = deque()
        """Calls that any worker may take."""
        self._workers = [_WorkerSlot(self) for _ in range(workers)]
        self._holders: dict[Hashable, tuple[_WorkerSlot, int]] = {}
        self._numbers = count()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> list[str]:
        """Start all workers; the notes of one. ConfigError, ChildError or OSError, and then none runs."""
        await asyncio.to_thread(remove_abandoned)
        starts = [asyncio.create_task(worker.start_process()) for worker in self._workers]
        try:
            processes = await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            for made in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(made, WorkerProcess):
                    await made.close()
            raise
        for worker, process in zip(self._workers, processes, strict=True):
            self._tasks.append(asyncio.create_task(worker.live(process)))
            self._tasks[-1].add_done_callback(self._note_defect)
        return processes[0].notes if processes else []

    async def call(self, kind: CallKind, question: Any, holder: Hashable | None = None) -> Any:
        """The function's answer to ``question``; both are JSON values. CallFailed if there is none.

        A cancelled call is cancelled in an async worker; a plain one finishes it before it takes the next.
        RuntimeError if the pool is not running.
        """
        if not self._tasks:
            raise RuntimeError("the worker pool is not running: start() it before call(), not after close()")
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        call = _Call(number, kind, question, holder, future)
        self.waiting.append(call)
        self.deal()
        try:
            return await future
        except asyncio.CancelledError:
            for worker in self._workers:
                worker.withdraw(call)
            raise

    def forget(self, holder: Hashable) -> None:
        """Forget which worker has ``holder``'s object: there will be no more calls of it."""
        worker, _ = self._holders.pop(holder, (None, 0))
        if worker is not None:
            worker.held.discard(holder)

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for call in self._outstanding():
            call.future.cancel()

    def deal(self) -> None:
        """Dispatch of calls: to each worker its own, then those of the queue to the one with fewest."""
        for worker in self._workers:
            worker.take_own()
        while self.waiting:
            call = self.waiting[0]
            if call.future.done() or self._goes_to_its_holder(call):
                self.waiting.popleft()
                continue
            free = [worker for worker in self._workers if not worker.own and worker.has_room(call)]
            if not free:
                break
            # By objects, too: short calls of many holders would else all go to the first slot.
            best = min(free, key=lambda worker: (len(worker.in_flight), len(worker.held)))
            best.take(self.waiting.popleft())
        if self.waiting and all(worker.start_error for worker in self._workers):
            for worker in self._workers:
                worker.is_wanted.set()

    def note_holder(self, call: _Call, worker: _WorkerSlot) -> None:
        """``worker`` has the object of ``call`` from now on."""
        if call.holder is not None:
            self._holders[call.holder] = (worker, worker.life)
            worker.held.add(call.holder)

    def cannot_start(self, worker: _WorkerSlot) -> None:
        """Move the calls of a worker that cannot be started to another; if there is none, all fail."""
        others = [other for other in self._workers if not other.start_error]
        if others:
            others[0].own.extend(worker.own)
            worker.own.clear()
            self.deal()
            return
        for queue in (worker.own, self.waiting):
            for call in queue:
                call.fail("died", worker.start_error)
            queue.clear()

    def _goes_to_its_holder(self, call: _Call) -> bool:
        """Whether the call has found the worker with its object, or has failed because that is gone."""
        worker, life = self._holders.get(call.holder, (None, 0)) if call.holder is not None else (None, 0)
        if worker is None:
            return False
        if worker.life == life:
            worker.own.append(call)
            worker.take_own()
            return True
        if not call.kind.repeatable:
            call.fail("died", "the worker that held it has ended")
        return not call.kind.repeatable

    def _outstanding(self) -> list[_Call]:
        own = [call for worker in self._workers for call in (*worker.in_flight.values(), *worker.own)]
        return [*own, *self.waiting]

    def _note_defect(self, task: asyncio.Task[None]) -> None:
        """Pass an error of the pool's own code to all callers, which else would wait for ever."""
        error = None if task.cancelled() else task.exception()
        for call in self._outstanding() if error else ():
            if error and not call.future.done():
                call.future.set_exception(error)


class _WorkerSlot:
    """Slot of one worker process after the other, with the calls that are its own."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._process: WorkerProcess | None = None
        self._is_full = False
        """A call found no memory beside others: all finish, then the process is replaced."""
        self.life = 0
        """Number of the process: objects live as long as it."""
        self.held: set[Hashable] = set()
        """Holders whose objects the process has."""
        self.in_flight: dict[int, _Call] = {}
        self.own: deque[_Call] = deque()
        """Suspects, then calls whose object is here: no other worker gets them, and they come first."""
        self.start_error = ""
        """Why no process could be started; empty while one runs, or may."""
        self.is_wanted = asyncio.Event()
        """Nobody else can take a call: a reason to try another start at once."""

    async def start_process(self) -> WorkerProcess:
        """A new process. ConfigError, ChildError or OSError."""
        return await WorkerProcess.start(self._pool.program, self._answered)

    async def live(self, process: WorkerProcess | None) -> None:
        """Serve with one process after the other, until cancelled."""
        try:
            while True:
                if process is None:
                    process = await self._restarted()
                self._process, self.start_error = process, ""
                self._pool.deal()
                reason = await asyncio.shield(process.ended)
                self._process = None
                self._sort_out(reason)
                self._pool.deal()
                await process.close()
                process = None
        finally:
            self._process = None
            for call in self.in_flight.values():
                call.stop_timer()
            if process is not None:
                await process.close()

    async def _restarted(self) -> WorkerProcess:
        """The next process. A start that fails is not a failure of a call, as long as another worker runs."""
        while True:
            for _ in range(START_TRIES):
                try:
                    return await self.start_process()
                except (OSError, ChildError, ConfigError) as error:
                    reason = str(error) or type(error).__name__
            self.start_error = reason
            self.is_wanted.clear()
            self._pool.cannot_start(self)
            try:
                await asyncio.wait_for(self.is_wanted.wait(), RESTART_PAUSE_S)
            except TimeoutError:
                continue

    # --- calls -----------------------------------------------------------------------------------

    def has_room(self, call: _Call) -> bool:
        """Whether the process may take ``call`` beside those that it has."""
        process = self._process
        if process is None or process.ended.done() or self._is_full:
            return False
        beside = self.in_flight.values()
        if any(running.is_suspect() != call.is_suspect() for running in islice(beside, 1)):
            return False  # suspects are only beside suspects
        crowd = min(running.crowd for running in (call, *beside)) if call.is_suspect() else math.inf
        return len(beside) < min(crowd, self._pool.concurrency if process.is_async else 1)

    def take_own(self) -> None:
        """Send the calls that only this worker may take, as far as there is room."""
        if self._is_full and not self.in_flight and self._process is not None:
            self._process.end("its memory was full")
        while self.own and (self.own[0].future.done() or self.has_room(self.own[0])):
            call = self.own.popleft()
            if not call.future.done():
                self.take(call)

    def take(self, call: _Call) -> None:
        """Send ``call``; its time begins."""
        assert self._process is not None
        try:
            line = call.line()
        except (TypeError, ValueError, RecursionError) as error:  # no JSON: the caller's mistake
            call.future.set_exception(error)
            return
        self.in_flight[call.number] = call
        self._pool.note_holder(call, self)
        loop = asyncio.get_running_loop()
        grace_s = call.kind.grace_s if self._process.is_async else 0.0
        call.deadline = loop.time() + call.kind.limit_s + grace_s
        call.timer = loop.call_at(call.deadline, self._process.end, call.late())
        self._process.send(line)

    def withdraw(self, call: _Call) -> None:
        """Cancel a call that nobody waits for; its place is free when the worker says so."""
        if call.number in self.in_flight and self._process is not None and self._process.is_async:
            self._process.send(json.dumps({"id": call.number, "cancel": True}).encode())

    def _answered(self, message: dict[str, Any]) -> None:
        call = self.in_flight.pop(message["id"], None)
        if call is None:  # code of a user has written into the pipe
            return
        call.stop_timer()
        failure = message.get("failure")
        if failure is None:
            if not call.future.done():
                call.future.set_result(message["answer"])
        elif failure == "time":
            self._out_of_time(call)
        elif failure == "raised" and message["out_of_memory"] and self.in_flight:
            self._out_of_memory(call)
        elif failure == "raised":
            call.fail("raised", message["detail"], message["traceback"], message["place"])
        else:  # cancelled: by the pool, and then nobody waits; or by itself, and then its caller must know
            call.fail("raised", "the call was cancelled in its worker, by no limit")
        self._pool.deal()

    def _out_of_time(self, call: _Call) -> None:
        """Retry of an async call that its worker has cancelled, once: the machine may have been paused."""
        call.losses += 1
        if call.may_be_repeated():
            self._pool.waiting.appendleft(call)
        else:
            call.fail("time", call.late())

    def _out_of_memory(self, call: _Call) -> None:
        """Retry, alone, of a call with a MemoryError: any of those beside it may have taken the memory."""
        self._is_full = True
        call.crowd = 1
        if call.may_be_repeated():
            self.own.appendleft(call)
        else:
            call.fail("raised", "MemoryError beside other calls of its worker")

    # --- the end of a process --------------------------------------------------------------------

    def _sort_out(self, reason: str) -> None:
        """Decide about the calls that the ended process had, or that wanted an object of it."""
        suspects, waiting = list(self.in_flight.values()), list(self.own)
        self.in_flight.clear()
        self.own.clear()
        self.held.clear()
        self.life += 1
        self._is_full = False
        now = asyncio.get_running_loop().time()
        for call in suspects:
            call.stop_timer()
            self._suspect(call, reason, len(suspects), call.deadline <= now)
        for call in waiting:
            if call.is_suspect():
                self.own.append(call)
            elif call.kind.repeatable:
                self._pool.waiting.append(call)
            else:
                call.fail("died", f"the worker that held it has ended: {reason}")

    def _suspect(self, call: _Call, reason: str, suspects: int, is_overdue: bool) -> None:
        """Ask a call again that was in flight at the end of its worker, beside fewer, or let it fail."""
        call.losses += suspects == 1
        call.crowd = max(1, min(call.crowd, suspects) // LOTS)
        if call.may_be_repeated():
            self.own.append(call)
            return
        beside = f", with {suspects - 1} other calls in flight" if suspects > 1 else ""
        call.fail("time" if is_overdue else "died", reason + beside, beside=suspects - 1)
