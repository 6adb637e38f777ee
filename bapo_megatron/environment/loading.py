"""Loader and checks of a user's environment class, in a worker of environments.

Only the standard library is imported: the worker may run in an interpreter of its own. Used by ``worker.py``.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from bapo_megatron.environment.interface import Environment, Resume
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.dotted_path import load_dotted_path

FIELD = "environment.function"


def load_environment(path: str, settings: Mapping[str, Any]) -> type[Environment]:
    """The class that ``path`` names, ``package.module:Name`` or ``file.py:Name``.

    ConfigError if it cannot be imported, is no ``Environment``, or contradicts itself (``problems``).
    """
    file, _, name = path.rpartition(":")
    if file.endswith(".py"):
        _import_file(path, Path(file))
        path = f"{Path(file).stem}:{name}"
    kind = load_dotted_path(FIELD, path, "class")
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise ConfigError(
            f"{FIELD}={path} is no subclass of bapo_megatron.environment.Environment: derive it from that"
        )
    if found := list(problems(kind, settings)):
        raise ConfigError("\n".join(f"{FIELD}={path}: {problem}" for problem in found))
    return kind


def problems(kind: type[Environment], settings: Mapping[str, Any]) -> Iterator[str]:
    """Mistakes of a class: a step that is missing, values that its attributes must not have."""
    if kind.step is Environment.step:
        yield "it has no step(self, turn) of its own: define one that returns a Reply"
    if kind.role not in ("tool", "user"):
        yield f"role={kind.role!r} is unknown: set it to 'tool' or 'user'"
    if not (isinstance(kind.stops, tuple) and all(isinstance(one, str) and one for one in kind.stops)):
        yield f"stops={kind.stops!r} must be a tuple of texts, such as ('</call>',)"
    if problem := _tools_problem(kind.tools):
        yield f"tools={kind.tools!r} {problem}"
    if kind.resume not in get_args(Resume):
        yield f"resume={kind.resume!r} is unknown: set it to one of {', '.join(get_args(Resume))}"
    if kind.resume == "restore" and kind.restore is Environment.restore:
        yield "resume='restore' needs a method restore(self, turns, note): define it, or set 'replay'"
    if inspect.iscoroutinefunction(kind.restore) and not is_async(kind):
        yield "restore is async and step is not: make both async, or none"
    try:
        inspect.signature(kind).bind(None, settings)
    except TypeError as error:
        yield f"it cannot be made of a task and its settings ({error}): define __init__(self, task, settings)"
    except ValueError:  # some classes in C have no signature
        return


def _tools_problem(tools: object) -> str | None:
    """What is wrong with schemas of tools; None if they can be given to a chat template."""
    if not isinstance(tools, (tuple, list)) or not all(isinstance(one, dict) for one in tools):
        return "must be a tuple of schemas, dicts as OpenAI's chat completions have"
    for one in tools:
        if not isinstance(one.get("function"), dict) or not one["function"].get("name"):
            return f'has {one!r} without a name: write {{"type": "function", "function": {{"name": ...}}}}'
    try:
        json.dumps(tools)
    except (TypeError, ValueError) as error:
        return f"must be plain JSON: {error}"
    return None


def is_async(kind: type[Environment]) -> bool:
    """Whether ``step`` is an async function."""
    return inspect.iscoroutinefunction(kind.step)


def _import_file(path: str, file: Path) -> None:
    """Let ``file`` be found as the module of its name, and beside it what it imports."""
    name, folder = file.stem, str(file.resolve().parent)
    if not file.is_file():
        raise ConfigError(f"{FIELD}={path}: there is no file {file.resolve()}; name one, or a dotted path")
    if not name.isidentifier():
        raise ConfigError(f"{FIELD}={path}: {name} is no name of a module: rename the file")
    other = importlib.util.find_spec(name)
    if other is not None and Path(other.origin or "").resolve() != file.resolve():
        raise ConfigError(f"{FIELD}={path}: {name} is also the name of {other.origin}: rename the file")
    sys.path.append(folder)
