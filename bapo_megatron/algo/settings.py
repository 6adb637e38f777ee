"""Validator of settings against annotations such as ``Annotated[float, Gt(0)]``: names, types and ranges.

For a configuration dataclass ``wrong_types`` and ``out_of_range`` yield the errors. For the settings of a
loss, advantage, mask or loss term, built-in or custom, and of a built-in reward or environment,
``settings_of`` lists them from the signature, and ``check_settings`` raises ConfigError. For a TOML table:
``table_problems``. An error is one line with the field and, usually, its value and the fix.
``config/validation.py`` has the rules between fields.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MinLen
from typeguard import CollectionCheckStrategy, TypeCheckError, check_type

from bapo_megatron.errors import ConfigError

_LIMITS: dict[type, tuple[str, Callable[[Any, Any], bool]]] = {
    Ge: ("at least", operator.ge),
    Gt: ("above", operator.gt),
    Le: ("at most", operator.le),
    Lt: ("below", operator.lt),
    MinLen: ("of a length of at least", lambda value, bound: len(value) >= bound),
}

_TYPES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    Path: "a path",
    tuple: "a list",
    list: "a list",
    dict: "a table",
    type(None): "None",
}


def type_problem(value: Any, annotation: Any) -> str | None:
    """Type error of a value, as the end of a sentence (``must be a number``); None if there is none."""
    allowed = members(annotation)
    wrong = isinstance(value, bool) and not {bool, Any} & set(allowed)  # a bool is a number in Python
    try:
        check_type(value, annotation, collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS)
    except TypeCheckError:
        wrong = True
    if not wrong:
        return None
    return f"must be {' or '.join(map(_in_words, allowed))}"


def _in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    plain = get_origin(kind) or kind
    word = _TYPES[plain] if plain in _TYPES else str(getattr(plain, "__name__", plain))
    items = [item for item in get_args(kind) if item is not Ellipsis]
    return word if items[-1:] in ([], [Any]) else f"{word}, each item {_in_words(items[-1])}"


def members(annotation: Any) -> tuple[Any, ...]:
    """The types allowed by an annotation: a union's members, or the annotation itself."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if union else (annotation,)


def range_words(annotation: Any) -> str:
    """The range of an annotation in words, ``at least 0 and below 1``; empty without one."""
    return " and ".join(f"{words} {bound}" for words, _, bound in _limits(annotation))


def range_problem(value: Any, annotation: Any) -> str | None:
    """Range error of a number, text or list, as the end of a sentence; None if there is none."""
    if not isinstance(value, (int, float, str, list)):
        return None
    if isinstance(value, (int, float)) and not math.isfinite(value):
        return "is not a finite number"
    if all(holds(value, bound) for _, holds, bound in _limits(annotation)):
        return None
    return f"must be {range_words(annotation)}"


def _limits(annotation: Any) -> list[tuple[str, Callable[[Any, Any], bool], Any]]:
    metadata = getattr(annotation, "__metadata__", ())
    return [
        (*_LIMITS[type(limit)], *dataclasses.astuple(limit)) for limit in metadata if type(limit) in _LIMITS
    ]


# --- fields of dataclasses ---------------------------------------------------------------------------


def wrong_types(config: object) -> Iterator[str]:
    """Yield type errors: fields with a value of another type than annotated, as a recipe may set it."""
    for path, value, annotation in _checked(config):
        if problem := type_problem(value, annotation):
            yield f"{path}={value!r} {problem}"


def out_of_range(config: object, equals: str = "=") -> Iterator[str]:
    """Yield numbers not finite or outside their field's range. ``equals``: sign between name and value."""
    for path, value, annotation in _checked(config):
        if problem := range_problem(value, annotation):
            yield f"{path}{equals}{value} {problem}"


def fields_of(config: object, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield dotted name, value and annotation of every field of nested dataclasses, outer ones first."""
    annotations = _annotations(type(config))  # type: ignore[arg-type]  # a class is hashable
    for item in dataclasses.fields(config):  # type: ignore[arg-type]
        value, path = getattr(config, item.name), f"{prefix}{item.name}"
        yield path, value, annotations[item.name]
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, f"{path}.")


@functools.cache
def _annotations(kind: type) -> dict[str, Any]:
    """Resolved annotations of a dataclass, cached: ``bapo plan`` checks thousands of configurations."""
    return get_type_hints(kind, include_extras=True)


def _checked(config: object) -> Iterator[tuple[str, Any, Any]]:
    """``fields_of``, including dataclasses in lists, such as ``data.sources[0].weight``."""
    for path, value, annotation in fields_of(config):
        yield path, value, annotation
        for number, item in enumerate(value if isinstance(value, tuple) else ()):
            if dataclasses.is_dataclass(item):
                yield from fields_of(item, f"{path}[{number}].")


# --- arguments of a class or function -----------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """An argument of a loss, advantage or another part that a recipe may set: name, annotation, default.
    ``str`` describes it, ``problem`` returns the error of a value."""

    name: str
    annotation: Any
    default: Any
    """``inspect.Parameter.empty`` for a required setting."""

    @property
    def needed(self) -> bool:
        return self.default is inspect.Parameter.empty

    def __str__(self) -> str:
        """Describe the setting: ``temperature: a number above 0, default 1.0``."""
        kinds = " or ".join(map(_in_words, members(self.annotation)))
        words = " ".join(filter(None, (kinds, range_words(self.annotation))))
        return f"{self.name}: {words}, " + ("needed" if self.needed else f"default {self.default!r}")

    def problem(self, value: Any) -> str | None:
        """Error of a value, as the end of a sentence; None if it is valid."""
        return type_problem(value, self.annotation) or range_problem(value, self.annotation)


def settings_of(build: Callable[..., Any], skip: int = 1) -> list[Setting]:
    """Settings of a class or function, in order: its arguments except the first ``skip`` (for a loss, its
    ``algorithm``). ``build`` may be a ``functools.partial``, whose values become the defaults."""
    parameters = list(inspect.signature(build).parameters.values())[skip:]
    cls: type = getattr(build, "func", build)  # type: ignore[arg-type]
    hints, factories = _hints(cls), getattr(cls, "__dataclass_fields__", {})
    settings = []
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            default = parameter.default
            if repr(default) == "<factory>":  # a dataclass factory: use its value
                default = factories[parameter.name].default_factory()
            settings.append(Setting(parameter.name, hints.get(parameter.name, _type_of(default)), default))
    return settings


def check_settings(field: str, owner: str, taken: list[Setting], settings: Mapping[str, Any]) -> None:
    """Validate ``settings`` against ``taken``; raise ConfigError with every unknown, invalid or missing one.
    ``field``: the configuration field. ``owner``: the settings' owner, for messages: ``algorithm.loss=sapo``.
    """
    if problems := list(_problems(field, owner, taken, settings)):
        raise ConfigError("\n".join(problems))


def _problems(field: str, owner: str, taken: list[Setting], settings: Mapping[str, Any]) -> Iterator[str]:
    known = {setting.name: setting for setting in taken}
    for name, value in settings.items():
        if name not in known:
            takes = "; ".join(map(str, taken)) or "none"
            yield f"{field}.{name}={value!r}: {owner} has no such setting; its settings: {takes}"
        elif problem := known[name].problem(value):
            yield f"{field}.{name}={value!r} {problem}; {owner} takes {known[name]}"
    for setting in taken:
        if setting.needed and setting.name not in settings:
            yield f"{field}.{setting.name} is missing: {owner} takes {setting}"


def _hints(cls: type) -> dict[str, Any]:
    """Annotations of the constructor's arguments; empty if a name in them cannot be resolved."""
    try:
        called = cls.__init__ if inspect.isclass(cls) else cls  # type: ignore[misc]
        return get_type_hints(called, include_extras=True)
    except NameError:  # a type-checking-only import
        return {}


def _type_of(default: Any) -> Any:
    return Any if default in (None, inspect.Parameter.empty) else type(default)


# --- tables of a file ------------------------------------------------------------------------------


def table_problems(kind: type, table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the errors of a (nested) table for the dataclass ``kind``: field name, rest of the sentence."""
    hints = get_type_hints(kind)
    fields = {item.name: item for item in dataclasses.fields(kind)}
    for name, value in table.items():
        path = f"{prefix}{name}"
        if name not in fields:
            yield path, f" is unknown; there are {', '.join(fields)}"
        elif dataclasses.is_dataclass(hints[name]) and isinstance(value, dict):
            yield from table_problems(cast(type, hints[name]), value, f"{path}.")
        elif problem := type_problem(tuple(value) if isinstance(value, list) else value, hints[name]):
            yield path, f" = {value!r} {problem}"
    for name, item in fields.items():
        required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if required and name not in table:
            yield f"{prefix}{name}", " is missing"
