"""Worker's side of the calls: answers the calls of a pool by id, until its input ends.

The ``main`` of a worker program is a call of ``serve`` with the program's ``prepare``. Settings come first,
then any number of calls, in lines of JSON; ``WorkerPool`` (pool.py) is at the other end:

    settings                                    {"notes", "is_async"}, or {"problem"}, after which it ends
    {"id", "function", "question", "limit_s"}   {"id", "answer"}, or {"id", "failure", "detail", ...}
    {"id", "cancel": true}                      the answer of that call, soon

Plain functions answer one call at a time, in the main thread; async ones any number at a time, in an event
loop. Only the standard library is imported: a program starts fast, and in any interpreter.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import resource
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO
from weakref import WeakKeyDictionary, WeakSet

from bapo_megatron.errors import ConfigError, printable
from bapo_megatron.runtime.exit_codes import ignore_signals
from bapo_megatron.runtime.processes import die_with_parent

DETAIL_CHARACTERS = 500
"""Longest text of an error in an answer."""

TRACEBACK_CHARACTERS = 4000
"""Longest traceback in an answer; of a longer one the middle is left out."""

_LONGEST_LINE = 256 << 20
"""Longest call of an async program, in bytes."""


@dataclass(frozen=True)
class Prepared:
    """What a worker program answers with: its functions, ready to be called."""

    functions: Mapping[str, Callable[[Any], Any]]
    """Name to function, of one argument, the question: all plain, or all async (``async def``)."""
    memory_limit_mb: int
    """Memory that all calls of the process together may take on top of what ``prepare`` has mapped."""
    notes: Sequence[str] = ()
    """Texts for the user."""
    own_files: Sequence[str] = ()
    """Files of the program whose frames do not belong into the traceback of a function that raised."""

    def is_async(self) -> bool:
        """Whether all functions are async; TypeError if some are and some are not."""
        kinds = {inspect.iscoroutinefunction(function) for function in self.functions.values()}
        if len(kinds) != 1:
            raise TypeError(f"the functions of a worker are all async, or none: {sorted(self.functions)}")
        return kinds.pop()


def serve(prepare: Callable[[Any], Prepared]) -> None:
    """Answer calls until the input ends; the last argument of the command is the lifeline.

    ``prepare`` takes the settings, and imports what the calls need, before the memory is limited. Its
    ConfigError is the pool's to raise.
    """
    die_with_parent(int(sys.argv[-1]))
    ignore_signals()
    calls, answers = _private_channel()
    try:
        prepared = prepare(json.loads(calls.readline()))
    except ConfigError as error:
        _send(answers, {"problem": str(error)})
        return
    is_async = prepared.is_async()
    _limit_memory(prepared.memory_limit_mb)
    _send(answers, {"notes": list(prepared.notes), "is_async": is_async})
    if is_async:
        asyncio.run(_answer_many(prepared, calls, answers))
    else:
        for line in calls:
            call = json.loads(line)
            _send_answer(answers, call["id"], _answer(prepared, call))


def _private_channel() -> tuple[BinaryIO, BinaryIO]:
    """Private descriptors of calls and answers: what a function prints goes to stderr instead."""
    calls, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return open(calls, "rb"), open(answers, "wb")  # for as long as the process lives


def _limit_memory(megabytes: int) -> None:
    """Limit the address space to what is mapped now plus ``megabytes``: libraries map more than they use."""
    with open("/proc/self/statm") as file:
        present = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = present + (megabytes << 20)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _send(answers: BinaryIO, message: object) -> None:
    answers.write(json.dumps(message).encode() + b"\n")
    answers.flush()


def _send_answer(answers: BinaryIO, number: int, answer: dict[str, Any]) -> None:
    try:
        _send(answers, {"id": number, **answer})
    except (TypeError, ValueError, RecursionError, MemoryError) as error:  # it cannot be written as JSON
        _send(answers, {"id": number, **_raised(error, ())})


# --- one call at a time --------------------------------------------------------------------------


def _answer(prepared: Prepared, call: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"answer": prepared.functions[call["function"]](call["question"])}
    except BaseException as error:  # SystemExit too: a user's function does not end the worker
        return _raised(error, prepared.own_files)


# --- many at a time ------------------------------------------------------------------------------


_withdrawn: WeakSet[asyncio.Task[Any]] = WeakSet()
"""Calls that the pool has cancelled."""
_clocks: WeakKeyDictionary[asyncio.Task[Any], asyncio.Timeout] = WeakKeyDictionary()
"""The limit of each call."""


def is_over() -> bool:
    """Whether nobody waits for the current call: the pool has cancelled it, or its limit has.

    Not ``Task.cancelling()``: before Python 3.13 a ``TaskGroup`` of which a child failed leaves it above 0.
    """
    task = asyncio.current_task()
    assert task is not None
    clock = _clocks.get(task)
    return task in _withdrawn or (clock is not None and clock.expired())


async def _answer_many(prepared: Prepared, calls: BinaryIO, answers: BinaryIO) -> None:
    reader = asyncio.StreamReader(limit=_LONGEST_LINE)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), calls)
    running: dict[int, asyncio.Task[dict[str, Any]]] = {}

    def finish(number: int, task: asyncio.Task[dict[str, Any]]) -> None:
        del running[number]
        result = {"failure": "cancelled", "detail": ""} if task.cancelled() else task.result()
        _send_answer(answers, number, result)

    while line := await reader.readline():
        call = json.loads(line)
        number: int = call["id"]
        if "cancel" in call:
            if number in running:  # else its answer is on its way
                _withdrawn.add(running[number])
                running[number].cancel()
            continue
        running[number] = asyncio.create_task(_awaited_answer(prepared, call))
        running[number].add_done_callback(partial(finish, number))


async def _awaited_answer(prepared: Prepared, call: dict[str, Any]) -> dict[str, Any]:
    """The answer of an async function, which its limit cancels. Raises only if the pool cancels it."""
    clock, task = asyncio.timeout(call["limit_s"]), asyncio.current_task()
    assert task is not None
    _clocks[task] = clock
    try:
        async with clock:
            answer = {"answer": await prepared.functions[call["function"]](call["question"])}
    except BaseException as error:  # SystemExit too, and a cancellation that nobody has asked for
        if clock.expired():
            return {"failure": "time", "detail": ""}
        if isinstance(error, asyncio.CancelledError) and task in _withdrawn:
            raise
        return _raised(error, prepared.own_files)
    return {"failure": "time", "detail": ""} if clock.expired() else answer


# --- failures ------------------------------------------------------------------------------------


def _raised(error: BaseException, own_files: Sequence[str]) -> dict[str, Any]:
    is_memory = isinstance(error, MemoryError)
    return {"failure": "raised", "out_of_memory": is_memory, **described(error, own_files)}


def described(error: BaseException, own_files: Sequence[str]) -> dict[str, str]:
    """Description of an error: ``detail`` (one line), ``traceback`` (from the user's code on), ``place``.

    ``place``, the type and the line that raised, is the same for all errors of one mistake. The frames of
    ``own_files`` before the user's are left out.
    """
    kind, frames, ours = type(error).__name__, error.__traceback__, (__file__, *own_files)
    while frames and frames.tb_frame.f_code.co_filename in ours:
        frames = frames.tb_next
    try:
        stack = traceback.extract_tb(frames, limit=-1)
        place = f"{kind} at {stack[0].filename}:{stack[0].lineno}" if stack else kind
        text = "".join(traceback.format_exception(type(error), error, frames))
    except Exception:  # no memory is left, or the error cannot be shown
        place, text = kind, kind
    return {"detail": text_of(error), "traceback": shortened(text), "place": place}


def shortened(text: str) -> str:
    """``text`` without control characters, and without its middle if it is long."""
    half = TRACEBACK_CHARACTERS // 2
    if len(text) > TRACEBACK_CHARACTERS:
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters]\n{text[-half:]}"
    # A message may quote the response: what the model wrote must not reach a terminal as it is.
    return printable(text.strip())


def text_of(value: object) -> str:
    """``repr`` of a value, at most ``DETAIL_CHARACTERS`` of it; its type if that fails."""
    try:
        return repr(value)[:DETAIL_CHARACTERS]
    except Exception:  # a user's class may fail at it
        return type(value).__name__
