"""Evaluation of test expressions, and a plain JSON form of their values for comparison in another process.

``told`` runs a program and a case, or only judgements, and returns the value as JSON text; ``encoded`` gives
a value its plain form, and ``decoded`` inverts that, in another process. None, booleans, numbers and text
stay unchanged, numbers and text as exactly int, float and str, so that a subclass's equality does not count.
numpy arrays and numbers become lists and numbers. A list, tuple, set or dict is [kind, items]. On request, a
range, bytes, complex number or deque is [``written``, type name, parts], an iterator or dict view is
[``iterator``, items], and another object is [``object``, type name, attributes]. Anything else is
[``other``, type name]. Standard library only: a SandboxFusion server gets this file's text.
"""

from __future__ import annotations

import builtins
import itertools
import json
from collections import deque
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

LONGEST_ITERATOR = 100_000

_WRITTEN: dict[type, Callable[[Any], Any]] = {
    range: lambda value: [value.start, value.stop, value.step],
    bytes: list,
    complex: lambda value: [value.real, value.imag],
    deque: lambda value: [encoded(item, True) for item in value],
}
_READ: dict[str, Callable[[Any], Any]] = {
    "range": lambda parts: range(*parts),
    "bytes": lambda items: bytes(list(items)),  # a number would be a size
    "complex": lambda parts: complex(*parts),
    "deque": lambda items: deque(map(decoded, items)),
}
"""Further types with a plain form, written if objects are requested."""

_SEQUENCES = (("list", list), ("tuple", tuple), ("set", (set, frozenset)))


def told(case: Mapping[str, Any], prelude: str, source: str, space: dict[str, Any]) -> str:
    """Run a case of ``Sandbox.value`` or ``judge`` in a module's ``space``; return its value as JSON. The
    test sees the original builtins, even if ``source`` replaced some. Judgements run without ``source``."""
    run, plainly, dumps, names = evaluate, encoded, json.dumps, vars(builtins)
    execute(prelude, "<solution>", space)
    if "judgements" in case:
        execute(case["setup"], "<test>", space)
        return dumps(all(_is_true(expression, values, space) for expression, values in case["judgements"]))
    originals = dict(names)
    execute(source, "<solution>", space)
    names.update(originals)
    execute(case["setup"], "<test>", space)
    space["ARGUMENTS"] = case["arguments"]
    value = run(case["expression"], space)
    if case["truth"]:
        return "true" if value else "false"  # no encoder, which the source may have replaced
    return dumps(plainly(value, case["objects"]))


def _is_true(expression: str, values: str, space: dict[str, Any]) -> bool:
    space["ARGUMENTS"] = decoded(json.loads(values), space)
    return bool(evaluate(expression, space))


def evaluate(expression: str, space: dict[str, Any]) -> Any:
    """Return the value of a test's expression."""
    return eval(compile(expression, "<test>", "eval", dont_inherit=True), space)


def execute(source: str, name: str, space: dict[str, Any]) -> None:
    """Run statements; ``name``: file name for tracebacks."""
    exec(compile(source, name, "exec", dont_inherit=True), space)


def encoded(value: Any, objects: bool = False) -> Any:
    """Return a value as plain JSON. ``objects`` includes attributes of objects and items of iterators."""
    if hasattr(value, "tolist"):  # numpy
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    for name, container in _SEQUENCES:
        if isinstance(value, container):  # type: ignore[arg-type]
            return [name, [encoded(item, objects) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[encoded(key, objects), encoded(item, objects)] for key, item in value.items()]]
    if objects and type(value) in _WRITTEN:
        return ["written", type(value).__name__, _WRITTEN[type(value)](value)]
    if objects and isinstance(value, (Iterator, KeysView, ValuesView, ItemsView)):
        items = itertools.islice(value, LONGEST_ITERATOR)
        return ["iterator", [encoded(item, objects) for item in items]]
    if objects and hasattr(value, "__dict__") and not callable(value):
        fields = {str(key): encoded(item, objects) for key, item in vars(value).items()}
        return ["object", type(value).__name__, fields]
    return ["other", type(value).__name__]


def decoded(value: Any, classes: dict[str, Any] | None = None) -> Any:
    """Invert `encoded`; values without a form become an object that equals nothing. ``classes``: names of a
    module, whose own classes become the types of objects. Raises ValueError, TypeError, KeyError or
    AttributeError if ``value`` does not come from `encoded`."""
    if not isinstance(value, list):
        return value
    kind, items, *rest = value
    if kind == "dict":
        return {decoded(key, classes): decoded(item, classes) for key, item in items}
    if kind == "object":
        return _object(items, {k: decoded(v, classes) for k, v in rest[0].items()}, classes or {})
    if kind == "written":
        return _READ[items](rest[0])
    if kind == "other":
        return object()
    sequence: Any = {"list": list, "tuple": tuple, "set": frozenset, "iterator": iter}[kind]
    return sequence([decoded(item, classes) for item in items])


def _object(name: str, fields: dict[str, Any], classes: dict[str, Any]) -> Any:
    kind = classes.get(name)
    if not isinstance(kind, type) or kind.__module__ != classes["__name__"]:
        return object()
    made: Any = object.__new__(kind)
    vars(made).update(fields)
    return made
