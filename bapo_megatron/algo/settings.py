"""Settings of a loss or a reward: keyword arguments of its constructor, validated before any work starts.

``build_loss`` and the reward endpoints call this. Types and ranges come from the arguments' annotations,
``Annotated[float, Gt(0)]``; an argument without an annotation has the type of its default. ``check_settings``
raises one ConfigError with all mistakes. Used by ``algo/losses/`` and ``reward/endpoints/settings.py``.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from bapo_megatron.algo.ranges import members, range_problem, range_words, type_problem
from bapo_megatron.errors import ConfigError


@dataclass(frozen=True)
class Setting:
    """One setting of a loss or a reward, as plain data: a constructor's argument with type and default.

    Made by ``settings_of`` from the constructor, validated against by ``check_settings``.
    """

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
        skip: number of first arguments that are no settings.
    """
    parameters = list(inspect.signature(build).parameters.values())[skip:]
    cls: type = getattr(build, "func", build)  # type: ignore[arg-type]
    hints = _hints(cls)
    return [
        Setting(one.name, hints.get(one.name, _type_of(one.default)), one.default)
        for one in parameters
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]


def check_settings(field: str, owner: str, taken: list[Setting], settings: Mapping[str, Any]) -> None:
    """Validate ``settings``: ConfigError with every unknown, invalid or missing one.

    Args:
        field: the configuration field that holds the settings.
        owner: the loss or reward, for messages: ``algorithm.loss=sapo``.
        taken: the settings that it takes.
        settings: the values to check.
    """
    if problems := list(_problems(field, owner, taken, settings)):
        raise ConfigError("\n".join(problems))


def _problems(field: str, owner: str, taken: list[Setting], settings: Mapping[str, Any]) -> Iterator[str]:
    known = {one.name: one for one in taken}
    for name, value in settings.items():
        if name not in known:
            takes = "; ".join(map(str, taken)) or "none"
            near = difflib.get_close_matches(name, known, 1)
            fix = f"is it {near[0]}?" if near else "leave it out"
            yield f"{field}.{name}={value!r}: {owner} has no such setting, {fix}; its settings: {takes}"
        elif problem := known[name].problem(value):
            yield f"{field}.{name}={value!r} {problem}; {owner} takes {known[name]}"
    for one in taken:
        if one.needed and one.name not in settings:
            yield f"{field}.{one.name} is missing: {owner} takes {one}"


def _hints(cls: type) -> dict[str, Any]:
    """Annotations of the constructor's arguments; none if a name in them cannot be resolved."""
    try:
        return get_type_hints(cls.__init__, include_extras=True)  # type: ignore[misc]
    except NameError:  # an import for the type checker alone
        return {}


def _type_of(default: Any) -> Any:
    return Any if default in (None, inspect.Parameter.empty) else type(default)


def _type_words(annotation: Any) -> str:
    return " or ".join(
        "None" if one is type(None) else getattr(one, "__name__", str(one)) for one in members(annotation)
    )
