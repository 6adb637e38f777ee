"""Validator of settings against annotations such as ``Annotated[float, Gt(0)]``: names, types and ranges.

One for all that a user sets: the fields of a configuration (``wrong_types``, ``out_of_range``) and of a
command's options (``out_of_range``), the arguments of a loss, a reward or an environment
(``check_settings``), the tables of a cluster file (``table_problems``). An error is one line with the field
and, in most, its value and the fix. Rules between fields are in ``config/validation.py``.
"""

from __future__ import annotations

import dataclasses
import difflib
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
from typeguard import TypeCheckError, check_type

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
    """Type error of a value, as the end of a sentence (``must be a number``); None if its type is right."""
    allowed = members(annotation)
    wrong = isinstance(value, bool) and not {bool, Any} & set(allowed)  # which for Python is a number
    try:
        check_type(value, annotation)
    except TypeCheckError:
        wrong = True
    if not wrong:
        return None
    return f"must be {' or '.join(map(_in_words, allowed))}"


def _in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    plain = get_origin(kind) or kind
    return _TYPES[plain] if plain in _TYPES else str(getattr(plain, "__name__", plain))


def members(annotation: Any) -> tuple[Any, ...]:
    """Types that an annotation allows: those of a union, or itself."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if union else (annotation,)


def range_words(annotation: Any) -> str:
    """Range of an annotation in words, ``at least 0 and below 1``; empty if it has none."""
    return " and ".join(f"{words} {bound}" for words, _, bound in _limits(annotation))


def range_problem(value: Any, annotation: Any) -> str | None:
    """Range error of a number, a text or a list, as the end of a sentence; None if it is in range, or none of
    these."""
    if not isinstance(value, (int, float, str, list)):
        return None
    if isinstance(value, (int, float)) and not math.isfinite(value):
        return "is not a finite number"
    if all(holds(value, bound) for _, holds, bound in _limits(annotation)):
        return None
    return f"must be {range_words(annotation)}"


def _limits(annotation: Any) -> list[tuple[str, Callable[[Any, Any], bool], Any]]:
    """Limits of an annotation: words, comparison and bound of each."""
    metadata = getattr(annotation, "__metadata__", ())
    return [
        (*_LIMITS[type(limit)], *dataclasses.astuple(limit)) for limit in metadata if type(limit) in _LIMITS
    ]


# --- fields of dataclasses ---------------------------------------------------------------------------


def wrong_types(config: object) -> Iterator[str]:
    """Type errors: fields whose value does not have the annotated type, as a recipe may set it."""
    for path, value, annotation in _checked(config):
        if problem := type_problem(value, annotation):
            yield f"{path}={value!r} {problem}"


def out_of_range(config: object, equals: str = "=") -> Iterator[str]:
    """Range errors: numbers that are not finite, or outside the annotated range of their field.

    ``equals``: the sign between name and value, as the user writes it.
    """
    for path, value, annotation in _checked(config):
        if problem := range_problem(value, annotation):
            yield f"{path}{equals}{value} {problem}"


def fields_of(config: object, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted name, value and annotation of every field of nested dataclasses, outer ones first."""
    annotations = _annotations(type(config))  # type: ignore[arg-type]  # a class is hashable
    for item in dataclasses.fields(config):  # type: ignore[arg-type]
        value, path = getattr(config, item.name), f"{prefix}{item.name}"
        yield path, value, annotations[item.name]
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, f"{path}.")


@functools.cache
def _annotations(kind: type) -> dict[str, Any]:
    """Resolved annotations of a dataclass, cached: the layout search of ``bapo plan`` checks thousands of
    configurations."""
    return get_type_hints(kind, include_extras=True)


def _checked(config: object) -> Iterator[tuple[str, Any, Any]]:
    """``fields_of``, and those of the dataclasses in lists, such as ``data.sources[0].weight``."""
    for path, value, annotation in fields_of(config):
        yield path, value, annotation
        for number, item in enumerate(value if isinstance(value, tuple) else ()):
            if dataclasses.is_dataclass(item):
                yield from fields_of(item, f"{path}[{number}].")


# --- arguments of a loss, a reward or an environment -------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A setting of a loss, a reward, ..., as plain data: a constructor's argument with type and default."""

    name: str
    annotation: Any
    default: Any
    """``inspect.Parameter.empty`` for a setting that must be given."""

    @property
    def needed(self) -> bool:
        """Whether the setting has no default."""
        return self.default is inspect.Parameter.empty

    def __str__(self) -> str:
        """Description of the setting: ``temperature: float above 0, default 1.0``."""
        words = " ".join(filter(None, (_type_words(self.annotation), range_words(self.annotation))))
        return f"{self.name}: {words}, " + ("needed" if self.needed else f"default {self.default!r}")

    def problem(self, value: Any) -> str | None:
        """Error of a value, as the end of a sentence; None for a valid one."""
        return type_problem(value, self.annotation) or range_problem(value, self.annotation)


def settings_of(build: Callable[..., Any], skip: int = 1) -> list[Setting]:
    """Settings of a loss, in order: the arguments of its constructor after ``algorithm``.

    Args:
        build: the class, or a ``functools.partial`` of it, whose values are then the defaults.
        skip: number of first arguments that are not settings.
    """
    parameters = list(inspect.signature(build).parameters.values())[skip:]
    cls: type = getattr(build, "func", build)  # type: ignore[arg-type]
    hints, factories = _hints(cls), getattr(cls, "__dataclass_fields__", {})
    settings = []
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            default = parameter.default
            if repr(default) == "<factory>":  # a dataclass's, in place of what its factory makes
                default = factories[parameter.name].default_factory()
            settings.append(Setting(parameter.name, hints.get(parameter.name, _type_of(default)), default))
    return settings


def check_settings(field: str, owner: str, taken: list[Setting], settings: Mapping[str, Any]) -> None:
    """Validate ``settings`` against those ``taken``: ConfigError with every unknown, invalid or missing one.

    ``field``: the configuration field that holds them. ``owner``: whose they are, for messages:
    ``algorithm.loss=sapo``.
    """
    if problems := list(_problems(field, owner, taken, settings)):
        raise ConfigError("\n".join(problems))


def _problems(field: str, owner: str, taken: list[Setting], settings: Mapping[str, Any]) -> Iterator[str]:
    known = {setting.name: setting for setting in taken}
    for name, value in settings.items():
        if name not in known:
            takes = "; ".join(map(str, taken)) or "none"
            near = difflib.get_close_matches(name, known, 1)
            fix = f"is it {near[0]}?" if near else "leave it out"
            yield f"{field}.{name}={value!r}: {owner} has no such setting, {fix}; its settings: {takes}"
        elif problem := known[name].problem(value):
            yield f"{field}.{name}={value!r} {problem}; {owner} takes {known[name]}"
    for setting in taken:
        if setting.needed and setting.name not in settings:
            yield f"{field}.{setting.name} is missing: {owner} takes {setting}"


def _hints(cls: type) -> dict[str, Any]:
    """Annotations of the constructor's arguments; none if a name in them cannot be resolved."""
    try:
        called = cls.__init__ if inspect.isclass(cls) else cls  # type: ignore[misc]
        return get_type_hints(called, include_extras=True)
    except NameError:  # an import for the type checker alone
        return {}


def _type_of(default: Any) -> Any:
    return Any if default in (None, inspect.Parameter.empty) else type(default)


def _type_words(annotation: Any) -> str:
    return " or ".join(
        _in_words(member)
        if member is type(None) or get_origin(member) is Literal
        else getattr(member, "__name__", str(member))
        for member in members(annotation)
    )


# --- tables of a file ------------------------------------------------------------------------------


def table_problems(kind: type, table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Errors of a table that is to become the dataclass ``kind``: a field's name, and the sentence's rest.

    Unknown names, missing ones, and values of a wrong type; nested dataclasses are tables, too.
    """
    hints = get_type_hints(kind)
    fields = {item.name: item for item in dataclasses.fields(kind)}
    for name, value in table.items():
        path = f"{prefix}{name}"
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1, 0.5)
            known = f"did you mean {prefix}{near[0]}?" if near else f"there are {', '.join(fields)}"
            yield path, f" is unknown; {known}"
        elif dataclasses.is_dataclass(hints[name]) and isinstance(value, dict):
            yield from table_problems(cast(type, hints[name]), value, f"{path}.")
        elif problem := type_problem(tuple(value) if isinstance(value, list) else value, hints[name]):
            yield path, f" = {value!r} {problem}"
    for name, item in fields.items():
        required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if required and name not in table:
            yield f"{prefix}{name}", " is missing"
