"""Pool of worker processes for concurrent calls with time limits: each gets one answer or one error.

``WorkerPool.call(kind, question)`` returns the answer of a function in a worker program (serving.py), or
raises CallFailed. A ``CallKind`` has the function, its time limit, and whether the call may be repeated. Used
by the reward and environment pools. Lifecycle of a call:

- It waits for a free worker, first come first served. A worker with plain functions takes one call at a time,
  one with async functions up to ``concurrency``. The limit excludes waiting and worker starts.
- ``holder`` identifies an object in a worker that the call needs: all calls with it go to that worker. Once
  that has ended, unrepeatable ones fail.
- Past its limit, an async call is cancelled in its worker. A worker that ignores the cancellation, or is not
  async, is killed. A repeatable call is then tried once more.
- When a worker ends, its in-flight calls become suspects. Unrepeatable suspects fail. The slot's next process
  repeats the others before anything else, in lots that shrink to one, so that a call which ends workers runs
  alone. It fails after ending two while alone, and costs no other repeatable call its answer.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import count, cycle, islice
from typing import Any, Literal

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.child_process import ChildError
from bapo_megatron.workers.process import WorkerProcess, WorkerProgram
from bapo_megatron.workers.scratch import remove_abandoned

Failure = Literal["raised", "time", "died"]
"""The function raised; it timed out; its worker ended before the answer or could not be started."""

TRIES = 2
"""Number of bad runs after which a repeatable call fails: timeouts, and worker ends while it ran alone."""
START_TRIES = 2
"""Consecutive attempts to start a worker; if all fail, its slot waits for ``RESTART_PAUSE_S``."""
RESTART_PAUSE_S = 10.0
LOTS = 8
"""Divisor of lot sizes for suspects: of 1,000 suspects at most 125 run at a time, then 15, then 1."""


@dataclass(frozen=True)
class CallKind:
    """Kind of call: function of the worker program, time limit in seconds, whether it may run twice."""

    function: str
    limit_s: float
    repeatable: bool
    """Whether another worker may run the call if the first gave no answer; otherwise the call fails."""
    grace_s: float = 15.0
    """Seconds after its limit within which a cancelled async function must end."""


class CallFailed(Exception):
    """A call got no answer: kind of failure, detail and, if its function raised, traceback and place."""

    def __init__(
        self, name: str, failure: Failure, detail: str, traceback: str = "", place: str = "", beside: int = 0
    ) -> None:
        super().__init__(f"{name}: {failure}: {detail}")
        self.failure: Failure = failure
        self.detail = detail
        self.traceback = traceback
        """Traceback of a function that raised."""
        self.place = place
        """Error type and line that raised it, which identify a bug in a function."""
        self.beside = beside
        """Number of other calls in flight when the worker ended, one of which may be the cause."""


@dataclass(eq=False)
class _Call:
    """A pending call: its question, its caller's future, its deadline, and its number of bad runs."""

    number: int
    kind: CallKind
    question: Any
    holder: Hashable | None
    future: asyncio.Future[Any]
    crowd: float = math.inf
    """Maximum calls in its worker, including itself; finite for a suspect."""
    losses: int = 0
    """Number of bad runs: timeouts, and worker ends while it ran alone."""
    deadline: float = math.inf
    timer: asyncio.TimerHandle | None = None

    def fail(
        self, failure: Failure, detail: str, traceback: str = "", place: str = "", beside: int = 0
    ) -> None:
        if not self.future.done():
            name = self.kind.function if self.holder is None else f"{self.kind.function} of {self.holder}"
            self.future.set_exception(CallFailed(name, failure, detail, traceback, place, beside))

    def line(self) -> bytes:
        """Return the JSON line for a worker; built on sending, because thousands of long calls may wait."""
        kind = self.kind
        message = {"id": self.number, "function": kind.function, "limit_s": kind.limit_s}
        return json.dumps({**message, "question": self.question}).encode()

    def stop_timer(self) -> None:
        if self.timer:
            self.timer.cancel()

    def late(self) -> str:
        return f"no answer within {self.kind.limit_s:g} s"

    def is_suspect(self) -> bool:
        """Return whether the call was in flight when a worker ended."""
        return self.crowd < math.inf

    def may_be_repeated(self) -> bool:
        return self.kind.repeatable and self.losses < TRIES and not self.future.done()


class WorkerPool:
    """Async pool of worker processes of one program, in one event loop: ``start``, ``call``, ``close``."""

    def __init__(self, program: WorkerProgram, workers: int, concurrency: int = 1000) -> None:
        """``concurrency``: maximum concurrent calls per worker of an async program."""
        self.program, self.concurrency = program, concurrency
        self.waiting: deque[_Call] = deque()  # calls for any worker
        self._workers = [_WorkerSlot(self) for _ in range(workers)]
        self._holders: dict[Hashable, tuple[_WorkerSlot, int]] = {}
        self._numbers = count()
        self._tasks: list[asyncio.Task[None]] = []
        self._pending: set[asyncio.Future[Any]] = set()  # of the calls
        self._defect: BaseException | None = None
        """Exception in the pool's own code, which every call raises: its slot takes no more calls."""

    async def start(self) -> list[str]:
        """Start all workers; return one's notes. None is left after a ConfigError, ChildError or OSError."""
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
        """Return the function's answer to ``question`` (JSON values). Raises CallFailed if there is none.
        Cancellation of this call cancels an async function; a plain one runs to its end."""
        if self._defect is not None:
            raise self._defect
        future = asyncio.get_running_loop().create_future()
        call = _Call(next(self._numbers), kind, question, holder, future)
        self._pending.add(future)
        try:
            self.waiting.append(call)
            self.deal()
            return await future
        except asyncio.CancelledError:
            for worker in self._workers:
                worker.withdraw(call)
            raise
        finally:
            self._pending.discard(future)

    def forget(self, holder: Hashable) -> None:
        """Forget which worker has the object of ``holder``, which makes no more calls."""
        worker, _ = self._holders.pop(holder, (None, 0))
        if worker is not None:
            worker.held.discard(holder)

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for future in self._pending:
            future.cancel()

    def deal(self) -> None:
        """Dispatch calls: to each worker its own, then those of the queue to the least loaded workers."""
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
            # By objects too: otherwise short calls of many holders would all go to the first slot.
            best = min(free, key=lambda worker: (len(worker.in_flight), len(worker.held)))
            best.take(self.waiting.popleft())

    def note_holder(self, call: _Call, worker: _WorkerSlot) -> None:
        if call.holder is not None:
            self._holders[call.holder] = (worker, worker.life)
            worker.held.add(call.holder)

    def cannot_start(self, worker: _WorkerSlot) -> None:
        """Move an unstartable worker's calls to the others; if there is none, fail all calls."""
        others = [other for other in self._workers if not other.start_error]
        if others:
            for other, call in zip(cycle(others), worker.own, strict=False):
                other.own.append(call)
            worker.own.clear()
            self.deal()
            return
        for queue in (worker.own, self.waiting):
            for call in queue:
                call.fail("died", worker.start_error)
            queue.clear()

    def _goes_to_its_holder(self, call: _Call) -> bool:
        """Give the call to its object's worker, or fail it if that has ended and the call is unrepeatable;
        return False if neither applies."""
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

    def _note_defect(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self._defect = error
            for future in self._pending:
                if not future.done():
                    future.set_exception(error)


class _WorkerSlot:
    """A place for one worker process: replaces a process that ended, and holds the calls sent to it."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._process: WorkerProcess | None = None
        self.life = 0  # number of the process, on which objects depend
        self.held: set[Hashable] = set()  # holders whose objects the process has
        self.in_flight: dict[int, _Call] = {}
        self.own: deque[_Call] = deque()
        """Suspects, then calls whose object is here; they go to no other worker and take priority."""
        self.start_error = ""  # why the last starts failed, otherwise empty

    async def start_process(self) -> WorkerProcess:
        return await WorkerProcess.start(self._pool.program, self._answered)

    async def live(self, process: WorkerProcess | None) -> None:
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
        """Return the next process. Failed starts fail no calls while another worker runs."""
        while True:
            for _ in range(START_TRIES):
                try:
                    return await self.start_process()
                except (OSError, ChildError, ConfigError) as error:
                    reason = str(error) or type(error).__name__
            self.start_error = reason
            self._pool.cannot_start(self)
            await asyncio.sleep(RESTART_PAUSE_S)

    # --- calls -----------------------------------------------------------------------------------

    def has_room(self, call: _Call) -> bool:
        """Return whether the process may take ``call`` beside its current calls."""
        process = self._process
        if process is None or process.ended.done():
            return False
        beside = self.in_flight.values()
        if any(running.is_suspect() != call.is_suspect() for running in islice(beside, 1)):
            return False  # suspects run only beside suspects
        crowd = min(running.crowd for running in (call, *beside)) if call.is_suspect() else math.inf
        return len(beside) < min(crowd, self._pool.concurrency if process.is_async else 1)

    def take_own(self) -> None:
        """Send the slot's own calls while there is room."""
        while self.own and (self.own[0].future.done() or self.has_room(self.own[0])):
            call = self.own.popleft()
            if not call.future.done():
                self.take(call)

    def take(self, call: _Call) -> None:
        """Send ``call`` and start its time limit."""
        assert self._process is not None
        try:
            line = call.line()
        except (TypeError, ValueError, RecursionError) as error:  # not JSON: the caller's bug
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
        """Cancel an abandoned call in an async worker; its place stays taken until the worker answers."""
        if call.number in self.in_flight and self._process is not None and self._process.is_async:
            self._process.send(json.dumps({"id": call.number, "cancel": True}).encode())

    def _answered(self, message: dict[str, Any]) -> None:
        call = self.in_flight.pop(message["id"], None)
        if call is None:  # user code wrote into the pipe
            return
        call.stop_timer()
        failure = message.get("failure")
        if failure is None:
            if not call.future.done():
                call.future.set_result(message["answer"])
        elif failure == "time":
            self._out_of_time(call)
        elif failure == "raised" and message["out_of_memory"] and self.in_flight:
            # The calls beside it may have used the memory: all become suspects.
            assert self._process is not None
            self.in_flight[call.number] = call
            self._process.end("its memory was full")
        elif failure == "raised":
            call.fail("raised", message["detail"], message["traceback"], message["place"])
        else:  # cancelled by the pool (no caller waits) or by itself (the caller must know)
            call.fail("raised", "the call was cancelled in its worker, by no limit")
        self._pool.deal()

    def _out_of_time(self, call: _Call) -> None:
        """Retry a timed-out async call once, because the machine may have been paused."""
        call.losses += 1
        if call.may_be_repeated():
            self._pool.waiting.appendleft(call)
        else:
            call.fail("time", call.late())

    # --- the end of a process --------------------------------------------------------------------

    def _sort_out(self, reason: str) -> None:
        """Requeue or fail the ended process's calls and the calls that need its objects."""
        suspects, waiting = list(self.in_flight.values()), list(self.own)
        self.in_flight.clear()
        self.own.clear()
        self.held.clear()
        self.life += 1
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
        """Requeue a call of an ended worker with fewer calls beside it, or fail it."""
        call.losses += suspects == 1
        call.crowd = max(1, min(call.crowd, suspects) // LOTS)
        if call.may_be_repeated():
            self.own.append(call)
            return
        beside = f", with {suspects - 1} other calls in flight" if suspects > 1 else ""
        call.fail("time" if is_overdue else "died", reason + beside, beside=suspects - 1)
