"""docs/config.md, made from the dataclasses of a run's configuration.

`python -m tests.support.config_page` writes it.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Lt

from bapo_megatron.config import RunConfig, SftConfig

PAGE = Path(__file__).parents[2] / "docs/config.md"
COMMAND = "python -m tests.support.config_page"

_HEAD = f"""\
# Configuration

Every field of a recipe ([customize.md](customize.md)), with its type, its default and its meaning. A flag
overrides the recipe:

```sh
bapo plan recipes/bp_math_32b_64k.py --optimizer.lr 1e-6 --batch.recompute selective     # the form of --help
bapo plan recipes/bp_math_32b_64k.py optimizer.lr=1e-6 batch.recompute=selective         # Hydra's form
bapo train recipes/demo_cpu.py --help                      # every flag, with the recipe's values
```

A list takes its values one after another (`--evaluation.suites aime24 math500`). A `bool` is a switch:
`--parallel.sequence`, `--parallel.no-sequence`, `parallel.sequence=false`. `None` is written as such:
`--rollout.keep-steps None`. *required*: a recipe must set the field. `{COMMAND}` writes this page.
"""


def config_page() -> str:
    sections = [*_sections(RunConfig, "", "The run"), ("Warm start: `bapo sft`", SftConfig, "")]
    body = [_section(title, kind, prefix) for title, kind, prefix in sections]
    names = [f"[{title}](#{_anchor(title)})" for title, _, _ in sections]
    return "\n".join([_HEAD, "Sections: " + ", ".join(names) + ".\n", *body])


def _anchor(title: str) -> str:
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def _sections(kind: type, prefix: str, title: str) -> Iterator[tuple[str, type, str]]:
    """Title, dataclass and dotted prefix of ``kind`` and of all dataclasses within it."""
    yield title, kind, prefix
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            path = f"{prefix}{field.name}"
            yield from _sections(hints[field.name], f"{path}.", f"`{path}`")


def _section(title: str, kind: type, prefix: str) -> str:
    rows = list(_rows(kind, prefix))
    described = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0]
    lines = [f"## {title}", "", _markdown(described), "", "| field | type | default | what it is |"]
    return "\n".join([*lines, "|---|---|---|---|", *rows, ""])


def _rows(kind: type, prefix: str) -> Iterator[str]:
    texts = field_texts(kind)
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        name = f"`{prefix}{field.name}`"
        if not dataclasses.is_dataclass(hint):
            text = _markdown(texts.get(field.name, ""))
            yield f"| {name} | {_type(hint)} | {_default(field)} | {text} |"
        elif kind is SftConfig:
            text = f"{_markdown(texts.get(field.name, ''))} The fields of [`{field.name}`](#{field.name})."
            yield f"| {name} | section | | {text.strip()} |"


@cache
def field_texts(kind: type) -> dict[str, str]:
    """The docstring of every field of a dataclass, those of its bases included."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(one):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0].body  # type: ignore[attr-defined]
        for field, text in itertools.pairwise(body):
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                found[field.target.id] = inspect.cleandoc(text.value.value)
    return found


def _markdown(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def _type(hint: Any) -> str:
    """A type with its range, as in ``int, >= 1, or None``."""
    limits: list[str] = []
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        limits = [text for note in notes if (text := _limit(note))]
    choices = get_args(hint) if isinstance(hint, types.UnionType) or get_origin(hint) is Union else (hint,)
    named = [_plain_type(one) for one in choices if one is not type(None)]
    text = ", ".join([" or ".join(named), *limits])
    if type(None) not in choices:
        return text
    return f"{text}, or None" if limits else f"{text} or None"


def _limit(note: object) -> str:
    match note:
        case Ge(ge):
            return f"at least {ge}"
        case Gt(gt):
            return f"above {gt}"
        case Lt(lt):
            return f"below {lt}"
    return ""


def _plain_type(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(hint))
    if get_origin(hint) is tuple:
        return f"list of {get_args(hint)[0].__name__}"
    if get_origin(hint) is dict:
        return "dict, or a JSON object"
    name: str = hint.__name__
    return {"Path": "path", "str": "text"}.get(name, name)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    elif field.default is not dataclasses.MISSING:
        value = field.default
    else:
        return "*required*"
    if isinstance(value, float):
        return f"`{value:g}`".replace("e+0", "e").replace("e-0", "e-")
    if isinstance(value, tuple) and value:
        value = " ".join(map(str, value))
    return "empty" if value in ((), {}) else f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(config_page())
    print(PAGE)
