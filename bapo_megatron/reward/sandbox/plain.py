"""Serialization of tested programs' values as plain JSON, for a comparison outside the program's process.

``encoded`` runs in the program's process, ``decoded`` outside. None, booleans, numbers and text stay as they
are, numbers and text as exactly int, float and str, so that a subclass's own equality does not count. numpy's
arrays and numbers are lists and numbers. A list, tuple, set or dict is [kind, items]. On request a range,
bytes, complex number or deque is [``written``, name of its type, parts], an iterator or a view of a dict
[``iterator``, items], another object [``object``, name of its type, attributes]. Anything else is
[``other``, name of its type].
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from typing import Any

LONGEST_ITERATOR = 100_000
"""Most items that are taken from an iterator."""

_WRITTEN: dict[type, Callable[[Any], Any]] = {
    range: lambda value: [value.start, value.stop, value.step],
    bytes: list,
    complex: lambda value: [value.real, value.imag],
    deque: lambda value: [encoded(item, True) for item in value],
}
_READ: dict[str, Callable[[Any], Any]] = {
    "range": lambda parts: range(*parts),
    "bytes": lambda items: bytes(list(items)),  # not of a number, which is a size
    "complex": lambda parts: complex(*parts),
    "deque": lambda items: deque(map(decoded, items)),
}
"""Further types with a plain form, written if objects are asked for."""

_SEQUENCES = (("list", list), ("tuple", tuple), ("set", (set, frozenset)))


def encoded(value: Any, objects: bool = False) -> Any:
    """The plain JSON of a value. ``objects``: with the attributes of objects and the items of iterators."""
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
    """The inverse of `encoded`; an object that equals nothing for what has no form.

    ``classes``: a module's names, among which the types of objects are found if it defines them itself.
    ValueError, TypeError, KeyError or AttributeError if ``value`` was not made by `encoded`.
    """
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
