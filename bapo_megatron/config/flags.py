"""Command-line parser: ``parse_options`` parses flags into a dataclass with tyro.

Besides tyro's own form, ``--section.field VALUE``, it accepts Hydra's ``section.field=VALUE``, and a value
after a switch (``--overwrite true``). A mistake ends the program (SystemExit, code 2). ``json_flag`` returns
the annotation of a field whose flag takes JSON.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import PrimitiveConstructorSpec

C = TypeVar("C")

_DOTTED = re.compile(r"\w+(\.\w+)+")
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def parse_options(
    kind: type[C],
    prog: str,
    arguments: Sequence[str],
    default: C | None = None,
    description: str | None = None,
) -> C:
    """Return ``arguments`` parsed into the dataclass ``kind``, on top of ``default`` if it is given.
    Exits with code 2 for an unknown flag or a bad value, with 0 for --help."""
    args = in_tyros_form(kind, arguments)
    if default is None:
        return tyro.cli(kind, prog=prog, description=description, args=args)
    return tyro.cli(kind, prog=prog, description=description, args=args, default=default)


def in_tyros_form(kind: type, arguments: Sequence[str]) -> list[str]:
    """Return the arguments with ``name=VALUE`` and values of switches rewritten in tyro's form.

    ``name=VALUE`` is a flag if ``kind`` has that field, or its section, and it is not the value of the flag
    before it: the name of a file may have a ``=``.
    """
    flags = {flag.name: flag for flag in _flags_of(kind)}
    sections = {name.partition(".")[0] for name in flags if "." in name}
    rewritten: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        is_flag = word.startswith("--")
        known = name in flags or (name.partition(".")[0] in sections and bool(_DOTTED.fullmatch(name)))
        if equals and not word.startswith("-") and known and not _wants_value(rewritten, flags):
            word, is_flag = f"--{word}", True
        flag = flags.get(name) if is_flag else None
        if flag is not None and flag.is_switch:
            if not equals and rest and rest[0].lower() in _TRUTH:
                value = rest.pop(0)
            if value.lower() in _TRUTH:
                rewritten += flag.switched(_TRUTH[value.lower()])
                continue
        rewritten.append(word)
    return rewritten


def _wants_value(before: Sequence[str], flags: Mapping[str, _Flag]) -> bool:
    """Return whether the last of the words ``before`` is a flag whose value comes next."""
    last = before[-1] if before else ""
    flag = flags.get(last.removeprefix("--").replace("-", "_"))
    return last.startswith("--") and flag is not None and not flag.is_switch


@dataclasses.dataclass(frozen=True)
class _Flag:
    """A flag of a command as tyro names it: dotted name, whether it is a switch, and whether it has a
    ``--no-`` form."""

    name: str
    """Dotted, with underscores: ``checkpoint.keep_last``."""
    is_switch: bool
    has_opposite: bool
    """Whether a switch has its ``--no-`` form."""

    def switched(self, on: bool) -> list[str]:
        """Return the arguments that turn the switch on or off; none if it cannot be turned off."""
        section, dot, last = self.name.rpartition(".")
        if on or self.has_opposite:
            return [f"--{section}{dot}{'' if on else 'no-'}{last}"]
        return []


def _flags_of(kind: type, prefix: str = "") -> Iterator[_Flag]:
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint, notes = hints[field.name], tuple[Any, ...]()
        if get_origin(hint) is Annotated:
            hint, *rest = get_args(hint)
            notes = tuple(rest)
        name = next((note.name for note in notes if isinstance(getattr(note, "name", None), str)), field.name)
        if dataclasses.is_dataclass(hint):
            yield from _flags_of(hint, f"{prefix}{name}." if name else prefix)  # type: ignore[arg-type]
        else:
            yield _Flag(prefix + name, hint is bool, tyro.conf.FlagCreatePairsOff not in notes)


def json_flag(
    kind: type,
    form: str,
    fits: Callable[[Any], bool],
    read: Callable[[Any], Any],
    write: Callable[[Any], str] = json.dumps,
) -> PrimitiveConstructorSpec[Any]:
    """Return tyro's annotation of a field of type ``kind`` whose flag is one JSON text. ``fits`` checks the
    decoded value, ``read`` and ``write`` convert it. ``form``: what the text must be, for error messages."""

    def from_words(words: list[str]) -> Any:
        try:
            decoded = json.loads(words[0])
        except ValueError:  # the decoder's message names neither the value nor the form
            decoded = None
        if not fits(decoded):
            raise ValueError(f"{words[0]} is not a JSON {form}")
        try:
            return read(decoded)
        except (TypeError, AttributeError) as error:  # a field that does not exist
            raise ValueError(str(error)) from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=from_words,
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [write(value)],
    )


Settings = Annotated[
    dict[str, Any],
    json_flag(dict, 'object: write {"name": value}', lambda found: isinstance(found, dict), dict),
]
"""Free-form settings of a loss, a reward or an environment: a dict in a recipe, a JSON object as a flag."""
