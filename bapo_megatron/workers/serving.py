"""The worker's side of a ``WorkerPool`` (pool.py): ``serve`` answers the pool's calls until the input ends.

The ``main`` of a worker program calls ``serve(prepare)``; ``prepare`` takes the settings and returns the
functions, as ``Prepared``. The pool sends JSON lines on standard input, first the settings, then calls:

    settings                                    {"notes", "is_async"}, or {"problem"}, after which it ends
    {"id", "function", "question", "limit_s"}   {"id", "answer"}, or {"id", "failure", "detail", ...}
    {"id", "cancel": true}                      the answer of that call, soon

Plain functions answer one call at a time in the main thread, async functions any number in an event loop. The
command's last argument, the lifeline, is a pipe's descriptor: when it closes, the parent has ended, and this
process is killed. Imports no third-party package, so that a program starts fast, in any interpreter.
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

from bapo_megatron.errors import ConfigError, ProgramError, printable
from bapo_megatron.runtime.exit_codes import ignore_signals
from bapo_megatron.runtime.processes import die_with_parent

DETAIL_CHARACTERS = 500
"""Maximum length of an error text in an answer."""
TRACEBACK_CHARACTERS = 4000
"""Maximum length of a traceback in an answer; a longer one loses its middle."""
_LONGEST_LINE = 256 << 20  # maximum bytes of a call of an async program


@dataclass(frozen=True)
class Prepared:
    """Result of a worker program's ``prepare``: its functions, memory limit, and notes for the user."""

    functions: Mapping[str, Callable[[Any], Any]]
    """Functions of one argument, the question, by name: all plain or all async (``async def``)."""
    memory_limit_mb: int
    """Address space for all calls together, beyond what ``prepare`` has mapped, in 2^20 bytes."""
    notes: Sequence[str] = ()
    """Texts for the user."""
    own_files: Sequence[str] = ()
    """Program files whose frames are omitted from tracebacks."""


def serve(prepare: Callable[[Any], Prepared]) -> None:
    """Answer calls until the input ends. ``prepare`` takes the settings and imports dependencies, before
    memory is limited; its ConfigError is raised in the pool. Takes over standard input and output: what
    functions print goes to stderr."""
    die_with_parent(int(sys.argv[-1]))
    ignore_signals()
    calls, answers = _private_channel()
    try:
        prepared = prepare(json.loads(calls.readline()))
    except ConfigError as error:
        _send(answers, {"problem": str(error)})
        return
    is_async = all(map(inspect.iscoroutinefunction, prepared.functions.values()))
    _limit_memory(prepared.memory_limit_mb)
    _send(answers, {"notes": list(prepared.notes), "is_async": is_async})
    if is_async:
        asyncio.run(_answer_many(prepared, calls, answers))
    else:
        for line in calls:
            call = json.loads(line)
            _send_answer(answers, call["id"], _answer(prepared, call))


def _private_channel() -> tuple[BinaryIO, BinaryIO]:
    """Return private files for calls and answers; redirect what functions print to stderr."""
    calls, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return open(calls, "rb"), open(answers, "wb")  # open while the process lives


def _limit_memory(megabytes: int) -> None:
    """Limit the address space to its current size plus ``megabytes``: libraries map more than they use."""
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
    except (TypeError, ValueError, RecursionError, MemoryError) as error:  # not serializable as JSON
        _send(answers, {"id": number, **_raised(error, ())})


# --- one call at a time --------------------------------------------------------------------------


def _answer(prepared: Prepared, call: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"answer": prepared.functions[call["function"]](call["question"])}
    except BaseException as error:  # SystemExit too: a user's function must not end the worker
        return _raised(error, prepared.own_files)


# --- concurrent calls ----------------------------------------------------------------------------


_withdrawn: WeakSet[asyncio.Task[Any]] = WeakSet()  # calls cancelled by the pool
_clocks: WeakKeyDictionary[asyncio.Task[Any], asyncio.Timeout] = WeakKeyDictionary()
"""Time limit of each call."""


def is_over() -> bool:
    """Return whether the pool or the time limit has cancelled the current call. ``Task.cancelling()`` does
    not tell: before Python 3.13, a failed child of a ``TaskGroup`` leaves it above 0."""
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
            if number in running:  # otherwise its answer is on its way
                _withdrawn.add(running[number])
                running[number].cancel()
            continue
        running[number] = asyncio.create_task(_awaited_answer(prepared, call))
        running[number].add_done_callback(partial(finish, number))


async def _awaited_answer(prepared: Prepared, call: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of an async function, or its failure; cancel it at its limit. Raises only
    CancelledError, if the pool cancels it."""
    clock, task = asyncio.timeout(call["limit_s"]), asyncio.current_task()
    assert task is not None
    _clocks[task] = clock
    try:
        async with clock:
            answer = {"answer": await prepared.functions[call["function"]](call["question"])}
    except BaseException as error:  # including SystemExit and unrequested cancellation
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
    """Return an error's ``detail`` (``repr``), ``traceback`` (without leading frames of ``own_files``) and
    ``place``: its type and the line that raised it, which identify a bug."""
    kind, frames, ours = type(error).__name__, error.__traceback__, (__file__, *own_files)
    while frames and frames.tb_frame.f_code.co_filename in ours:
        frames = frames.tb_next
    try:
        stack = traceback.extract_tb(frames, limit=-1)
        place = f"{kind} at {stack[0].filename}:{stack[0].lineno}" if stack else kind
        text = "".join(traceback.format_exception(type(error), error, frames))
    except Exception:  # out of memory, or the error cannot be formatted
        place, text = kind, kind
    if isinstance(error, ProgramError):
        return {"detail": shortened(str(error)), "traceback": "", "place": place}
    return {"detail": text_of(error), "traceback": shortened(text), "place": place}


def shortened(text: str) -> str:
    """Return ``text`` without control characters, and without its middle if it is long."""
    half = TRACEBACK_CHARACTERS // 2
    if len(text) > TRACEBACK_CHARACTERS:
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters]\n{text[-half:]}"
    # A message may quote the response, and raw model output must not reach a terminal.
    return printable(text.strip())


def text_of(value: object) -> str:
    """Return the ``repr`` of a value, cut to ``DETAIL_CHARACTERS``; its type name if ``repr`` fails."""
    try:
        return repr(value)[:DETAIL_CHARACTERS]
    except Exception:  # a user's class may raise
        return type(value).__name__
