"""Environment worker: a child process that holds the environment objects of many episodes and steps them.

    python -m bapo_megatron.environment.worker LIFELINE

LIFELINE is the fd of an inherited pipe that closes when the parent ends; the worker then ends, too. Calls and
answers are JSON lines on standard input and output (``workers/serving.py``; the client is ``pool.py``):

    function  argument                   answer
    step      {episode, replies, turn}   {observation, reward, metrics, note, seconds}, or {"missing": true}
    resume    {task, turns, note}        the same, or {"diverged": why}
    close     the episode's name         null

``step`` answers a turn if this process has the episode's object. If not, the pool calls ``resume``, which
creates one, restores the state before the last of ``turns``, and answers that. ``turn`` is the list of
``SampledTurn.as_json``; an item of ``turns`` has its kind before it. An answer may also have ``messages`` or
``context`` (``pool.StepResult``). The settings, sent first, are ``function``, ``settings``, ``logs_dir`` and
``memory_limit_mb``; the reply has the JSON of ``pool.Traits``. Standard library only, for any interpreter.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import importlib.util
import inspect
import json
import math
import random
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

from bapo_megatron.environment import Context, Environment, Reply, Resume, Role, SampledTurn, Task, Turn
from bapo_megatron.environment.settings import settings_type
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.dotted_path import load_dotted_path
from bapo_megatron.workers.serving import Prepared, is_over, serve

FIELD = "environment.function"

THREADS = 32
"""Maximum number of concurrent plain (not async) steps in a worker."""

MOST_CHARACTERS = 4 << 20
"""Maximum observation length in characters."""

NOTE_BYTES = 64 << 10
"""Maximum note size in bytes of JSON."""

NOTE_LEVELS = 100
"""Maximum nesting of lists and objects in a note. A policy's call may nest arbitrarily deep, and JSON is
written and read recursively on the way to the journal and back."""


def main() -> None:
    """Entry point: serve calls until the input ends."""
    serve(_prepared)


def _prepared(settings: dict[str, Any]) -> Prepared:
    kind = load_environment(settings["function"], settings["settings"])
    episodes = Episodes(kind, settings["settings"])
    kind.logs_dir = settings["logs_dir"]
    taken = settings_type(kind)
    traits = {
        "role": kind.role,
        "stops": kind.stops,
        "tools": kind.tools,
        "resume": kind.resume,
        "own_random": bool(kind.own_random),
        "wants_tokens": bool(kind.wants_tokens),
        "is_async": is_async(kind),
        "settings_type": taken and f"{taken.__module__}:{taken.__qualname__}",
    }
    functions: dict[str, Callable[[Any], Any]]
    functions = {"step": episodes.step, "resume": episodes.resume, "close": episodes.close}
    own_files = (__file__, asyncio.futures.__file__, concurrent.futures.thread.__file__)
    return Prepared(functions, settings["memory_limit_mb"], [json.dumps(traits)], own_files)


class Episodes:
    """The worker's environment objects by episode name, with its three calls: ``step``, ``resume``,
    ``close``. An object is taken out while it steps. It is closed and not put back at its episode's end, or,
    since its state is then unknown, after an error or a cancelled step."""

    def __init__(self, kind: type[Environment], settings: Mapping[str, Any]) -> None:
        self._kind, self._settings = kind, settings
        self._held: dict[str, tuple[int, Environment]] = {}
        """Object of each episode, with the number of its replies so far."""
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="environment")
        self._is_async = is_async(kind)
        self._random = RandomStates(kind.own_random)

    async def step(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a turn; ``missing`` if no object is here that has seen all earlier turns."""
        name = question["episode"]
        if name not in self._held:
            return {"missing": True}
        replies, environment = self._held.pop(name)
        with self._random.of(name, self._held):
            if replies != question["replies"]:
                await self._close(environment)
                return {"missing": True}
            return await self._advance(name, replies, environment, SampledTurn.of(*question["turn"]))

    async def resume(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return a new object's reply to the last turn; ``diverged`` if it cannot get to the state before."""
        task, turns = Task(**question["task"]), [_turn(*turn) for turn in question["turns"]]
        *before, last = turns
        await self.close(task.episode)
        if before and self._kind.resume == "never":
            return {"diverged": "its environment cannot be resumed (resume = 'never')"}
        with self._random.of(task.episode, self._held):
            environment = await self._called(self._kind, task, self._settings)
            try:
                why = await self._brought(environment, before, question["note"]) if before else None
            except BaseException:
                await self._close(environment)
                raise
            if why is not None:
                await self._close(environment)
                return {"diverged": why}
            return await self._advance(task.episode, len(before) // 2, environment, last.text)

    async def close(self, name: str) -> None:
        self._random.forget(name)
        if name in self._held:
            await self._close(self._held.pop(name)[1])

    async def _advance(self, name: str, replies: int, environment: Environment, turn: str) -> dict[str, Any]:
        try:
            began = time.monotonic()
            reply = await self._reply(environment.step, turn)
            if is_over():
                raise asyncio.CancelledError  # nobody waits for this reply or uses the object again
            seconds = time.monotonic() - began
            answer = {**_checked(reply), "seconds": seconds}
        except BaseException:
            await self._close(environment)
            raise
        if reply.observation is None:
            await self._close(environment)
        else:
            self._held[name] = replies + 1, environment
        return answer

    async def _brought(self, environment: Environment, before: list[Turn], note: Any) -> str | None:
        """Bring a new object to the state of the lost one. Returns why that failed, or None."""
        if self._kind.resume == "restore":
            await self._called(environment.restore, before, note)
            return None
        for place, (said, reply) in enumerate(zip(before[::2], before[1::2], strict=True), 1):
            again = await self._reply(environment.again, said.text, reply.text)
            if (answered := again.text) != reply.text:
                was, now = repr(reply.text)[:200], repr(answered)[:200]
                return f"its environment answered turn {place} with {was}, and after a replay with {now}"
        return None

    async def _reply(self, step: Callable[..., Any], *turn: str) -> Reply:
        reply = await self._called(step, *turn)
        if not isinstance(reply, Reply):
            raise TypeError(f"step returned {type(reply).__name__}: return a Reply")
        return reply

    async def _called(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of ``function``, called here if the class is async, else in a thread."""
        result = function(*arguments) if self._is_async else await self._in_thread(function, *arguments)
        return await result if inspect.isawaitable(result) else result

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return a plain function's result. Cancellation waits for its end, since a thread cannot be ended;
        the pool kills a worker that does not react."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, _result, function, arguments)
        was_cancelled = False
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                was_cancelled = True
        if was_cancelled:
            raise asyncio.CancelledError
        return future.result()

    async def _close(self, environment: Environment) -> None:
        try:
            await self._called(environment.close)
        except Exception:
            traceback.print_exc()


class RandomStates:
    """Per-episode states of the global generators of ``random`` and, if the interpreter has it, numpy: ``of``
    activates them for a block, one at a time. The seed derives from the episode's name, so a replay repeats
    the draws. For a class without ``own_random`` it does nothing."""

    def __init__(self, own_random: bool) -> None:
        self._generators: list[Any] = []
        self._states: dict[str, list[Any]] = {}
        if not own_random:
            return
        self._generators.append((random.seed, random.setstate, random.getstate))
        with suppress(ImportError):
            from numpy.random import get_state, seed, set_state

            self._generators.append((seed, set_state, get_state))

    @contextmanager
    def of(self, name: str, held: Container[str]) -> Iterator[None]:
        """Activate the episode's states, and save them at the end if its object is then ``held``: else the
        episode is over or starts again."""
        states = self._states.pop(name, None)
        for place, (seed, restore, _) in enumerate(self._generators):
            seed(zlib.crc32(name.encode())) if states is None else restore(states[place])
        try:
            yield
        finally:
            if name in held:
                self._states[name] = [state() for _, _, state in self._generators]

    def forget(self, name: str) -> None:
        self._states.pop(name, None)


def _turn(kind: Literal["sampled", "given"], text: str, *tokens: Any) -> Turn:
    return Turn(kind, text if kind == "given" else SampledTurn.of(text, *tokens))


def _result(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return function(*arguments)
    except StopIteration as error:  # a future does not accept it
        raise RuntimeError(f"{function} raised StopIteration") from error


def _checked(reply: Reply) -> dict[str, Any]:
    said, metrics = reply.text, {}
    if said is not None:
        if len(said) > MOST_CHARACTERS:
            raise ValueError(
                f"Reply.observation has {len(said)} characters; at most {MOST_CHARACTERS} may be"
            )
        said.encode()  # UnicodeEncodeError, a ValueError: lone surrogates are not text
    reward = None if reply.reward is None else _number("reward", reply.reward)
    for name, value in dict(reply.metrics).items():
        metrics[str(name)] = _number(f"metrics[{name!r}]", value)
    if _is_deep(reply.note, NOTE_LEVELS):
        raise ValueError(f"Reply.note has more than {NOTE_LEVELS} lists and objects within each other")
    size = len(json.dumps(reply.note))
    if size > NOTE_BYTES:
        raise ValueError(f"Reply.note has {size} bytes as JSON; at most {NOTE_BYTES} may be")
    answer = {"observation": said, "reward": reward, "metrics": metrics, "note": reply.note}
    if reply.context is not None:
        return {**answer, "context": _plain(reply.context)}
    several = reply.observation
    if several is None or isinstance(several, str) or len(several) < 2:
        return answer
    return {**answer, "messages": list(several)}


def _plain(context: Context) -> dict[str, Any]:
    """Return a conversation as JSON. Raises TypeError or ValueError for invalid messages."""
    for message in context.messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TypeError(f"Reply.context has the message {repr(message)[:200]}: give each a role")
    plain: dict[str, Any] = json.loads(json.dumps(asdict(context)))
    return plain


def _is_deep(value: Any, levels: int) -> bool:
    if not isinstance(value, (dict, list, tuple)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deep(item, levels - 1) for item in inner)


def _number(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"Reply.{name}={value!r} is not a finite number")
    return number


def load_environment(path: str, settings: Mapping[str, Any]) -> type[Environment]:
    """Return the class at ``path``, ``package.module:Name`` or ``file.py:Name``, whose folder becomes part of
    the import path. Raises ConfigError if the import fails or the class is not a valid ``Environment``."""
    file, _, name = path.rpartition(":")
    dotted = path
    if file.endswith(".py"):
        _import_file(path, Path(file))
        dotted = f"{Path(file).stem}:{name}"
    kind = load_dotted_path(FIELD, dotted, "class", path)
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise ConfigError(f"{FIELD}={path} is not a subclass of bapo_megatron.environment.Environment")
    if wrong := list(problems(kind, settings)):
        raise ConfigError("\n".join(f"{FIELD}={path}: {problem}" for problem in wrong))
    return kind


def problems(kind: type[Environment], settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the errors of a class: no ``step``, invalid attributes, an unsuitable constructor."""
    if kind.step is Environment.step:
        yield "it has no step(self, turn) of its own: define one that returns a Reply"
    if kind.role not in get_args(Role):
        yield f"role={kind.role!r} is unknown: set it to 'tool' or 'user'"
    if not (isinstance(kind.stops, tuple) and all(isinstance(stop, str) and stop for stop in kind.stops)):
        yield f"stops={kind.stops!r} must be a tuple of texts, such as ('</call>',)"
    if problem := _tools_problem(kind.tools):
        yield f"tools={kind.tools!r} {problem}"
    if kind.resume not in get_args(Resume):
        yield f"resume={kind.resume!r} is unknown: set it to one of {', '.join(get_args(Resume))}"
    if kind.resume == "restore" and kind.restore is Environment.restore:
        yield "resume='restore' needs a method restore(self, turns, note): define it, or set 'replay'"
    try:
        inspect.signature(kind).bind(None, settings)
    except TypeError as error:
        yield f"it cannot be made of a task and its settings ({error}): define __init__(self, task, settings)"


def _tools_problem(tools: object) -> str | None:
    if not isinstance(tools, (tuple, list)) or not all(isinstance(tool, dict) for tool in tools):
        return "must be a tuple of schemas, dicts as OpenAI's chat completions have"
    for tool in tools:
        if not isinstance(tool.get("function"), dict) or not tool["function"].get("name"):
            return f'has {tool!r} without a name: write {{"type": "function", "function": {{"name": ...}}}}'
    return None


def is_async(kind: type[Environment]) -> bool:
    """Whether ``step`` is an async function."""
    return inspect.iscoroutinefunction(kind.step)


def _import_file(path: str, file: Path) -> None:
    """Make ``file`` importable as the module of its name, together with its neighbours."""
    name, folder = file.stem, str(file.resolve().parent)
    if not file.is_file():
        raise ConfigError(f"{FIELD}={path}: there is no file {file.resolve()}; name one, or a dotted path")
    other = importlib.util.find_spec(name)
    if other is not None and Path(other.origin or "").resolve() != file.resolve():
        raise ConfigError(f"{FIELD}={path}: {name} is also the name of {other.origin}: rename the file")
    sys.path.append(folder)


if __name__ == "__main__":
    main()
