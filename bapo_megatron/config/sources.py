"""Sources of training prompts: files that one run mixes, each with a weight, a reward and an environment.

The entries of ``data.sources``, and their form as a flag (JSON; ValueError if it is malformed). Used in
this folder and ``data/prepare/``.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Gt
from tyro.constructors import PrimitiveConstructorSpec

from bapo_megatron.config.environment import EnvironmentConfig

PREPARED = "data.jsonl"
"""File of problems in a folder that `bapo data prepare` has written."""


@dataclass(frozen=True)
class SourceConfig:
    """A source of training prompts: a file, its weight in the mixture, its reward, its environment."""

    path: Path
    """A file as that of `data.path`, or a folder that `bapo data prepare` has written."""
    weight: Annotated[float, Gt(0)] = 1.0
    """Share of the prompts, as a multiple of the other sources' weights."""
    reward: str | None = None
    """Reward function of its responses, as `reward.function`. None: that one."""
    environment: EnvironmentConfig | None = None
    """What answers the model's turns, as the section `environment`. None: that section. One without a
    `function`: nothing, a response is one turn."""

    @property
    def name(self) -> str:
        """Name in metrics: that of the file without its ending, or of the prepared folder."""
        return self.path.parent.name if self.path.name == PREPARED else self.path.stem

    @property
    def file(self) -> Path:
        """The file of problems."""
        return self.path / PREPARED if self.path.is_dir() else self.path


_FIELDS = ", ".join(f'"{field.name}"' for field in dataclasses.fields(SourceConfig))
_FORM = '[{"path": "data/math", "weight": 2, "reward": "math"}, {"path": "data/mine.jsonl"}]'


def _from_json(words: list[str]) -> tuple[SourceConfig, ...]:
    """The value of a flag. ValueError if it is no JSON list of sources."""
    try:
        found = json.loads(words[0])
    except ValueError:  # the decoder's message names neither the value nor the form
        found = None
    if not isinstance(found, list) or not all(isinstance(one, dict) and "path" in one for one in found):
        raise ValueError(f"{words[0]} is no JSON list of sources: write {_FORM}")
    return tuple(_source(one) for one in found)


def _source(fields: dict[str, Any]) -> SourceConfig:
    known = {field.name for field in dataclasses.fields(SourceConfig)}
    if unknown := fields.keys() - known:
        raise ValueError(f"a source has no {', '.join(sorted(unknown))}: its fields are {_FIELDS}")
    environment = _environment(fields.get("environment"))
    return SourceConfig(**{**fields, "path": Path(str(fields["path"])), "environment": environment})


def _environment(fields: Any) -> EnvironmentConfig | None:
    """The environment of a source, from its JSON. ValueError if it is no object of the section's fields."""
    if fields is None:
        return None
    if not isinstance(fields, dict):
        raise ValueError(
            f"the environment of a source is {json.dumps(fields)}: write an object such as "
            '{"function": "tool.py:Tool"}, or {"function": null} for none; left out it is that of the run'
        )
    known = [field.name for field in dataclasses.fields(EnvironmentConfig)]
    if unknown := fields.keys() - set(known):
        raise ValueError(
            f"the environment of a source has no {', '.join(sorted(unknown))}: its fields are "
            f"{', '.join(known)}"
        )
    python = fields.get("python")
    return EnvironmentConfig(**{**fields, "python": None if python is None else Path(str(python))})


def _to_json(sources: tuple[SourceConfig, ...]) -> list[str]:
    return [json.dumps([dataclasses.asdict(one) for one in sources], default=str)]


Sources = Annotated[
    tuple[SourceConfig, ...],
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=_from_json,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=_to_json,
    ),
]
"""Several sources: a tuple in a recipe, a JSON list as a flag."""


def source_problems(path: Path | None, sources: tuple[SourceConfig, ...]) -> Iterator[str]:
    """Rules of `data.path` and `data.sources`: exactly one of them, and unique names of the sources."""
    if path is None and not sources:
        yield "data.path is None: name a file of training prompts, or several in data.sources"
    if path is not None and sources:
        yield f"data.path={path} and data.sources are both set: make the file one of the sources, or drop one"
    for name, count in Counter(source.name for source in sources).items():
        if count > 1:
            yield f"data.sources: {count} of them are called {name}: rename a file, or its folder"
        if not name or name.startswith("."):
            yield f"data.sources: a path has no file name to call the source by: {name!r}"
