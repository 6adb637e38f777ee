"""Configuration of environments (``EnvironmentConfig``) and of a run's training files (``SourceConfig``).

``data.sources`` has the type ``Sources``: in a recipe a tuple of ``SourceConfig``, as a flag a JSON list
(ValueError if malformed). ``source_problems`` yields its errors.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from bapo_megatron.config.flags import Settings, json_flag

PREPARED = "data.jsonl"
"""File of problems in a folder that `bapo data prepare` has written."""


@dataclass(frozen=True)
class EnvironmentConfig:
    """The environment, which answers the model's turns: its class, limits, and worker processes."""

    function: str | None = None
    """`package.module:Name` or `file.py:Name` of a subclass of `bapo_megatron.environment.Environment`. None:
    a response is one turn."""
    settings: Settings = field(default_factory=dict)
    """Settings of the environment: the second argument of its constructor."""
    max_turns: Annotated[int, Ge(1)] = 8
    """Most turns of the model in a response; then it ends, with the finish reason `turns`."""
    step_limit_s: Annotated[float, Gt(0)] = 60.0
    """Time limit of one step. A response whose step takes longer has failed (`reward.on_failure`)."""
    episode_limit_s: Annotated[float, Gt(0)] = 600.0
    """Time limit of all steps of a response together."""
    workers: Annotated[int, Ge(1)] = 2
    """Processes that hold environments, on rank 0's machine. Each takes thousands of async steps at a time,
    32 plain ones, or one with `own_random`."""
    memory_limit_mb: Annotated[int, Ge(256)] = 16384
    """Memory that the environments of one process may take together."""
    python: Path | None = None
    """Python interpreter (3.11 or newer) of these processes, for packages that conflict with the run's. None:
    the run's."""
    history: Literal["exact", "sampled"] = "exact"
    """`exact`: a run starts only if the tokens of several turns are those of the whole chat in the model's
    template. `sampled`: sampled tokens stay as they are, also where the template would leave some out
    (thoughts of earlier turns)."""


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
        """Name in metrics: the file's without its suffix, or the prepared folder's."""
        return self.path.parent.name if self.path.name == PREPARED else self.path.stem

    @property
    def file(self) -> Path:
        """Path of the problem file; a folder that is ``path`` contains it."""
        return self.path / PREPARED if self.path.is_dir() else self.path


def _source(fields: dict[str, Any]) -> SourceConfig:
    environment = _environment(fields.get("environment"))
    return SourceConfig(**{**fields, "path": Path(str(fields["path"])), "environment": environment})


def _environment(fields: dict[str, Any] | None) -> EnvironmentConfig | None:
    if fields is None:
        return None
    python = fields.get("python")
    return EnvironmentConfig(**{**fields, "python": None if python is None else Path(str(python))})


def _is_sources(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(source, dict) and "path" in source for source in value)


def _to_json(sources: tuple[SourceConfig, ...]) -> str:
    return json.dumps([dataclasses.asdict(source) for source in sources], default=str)


Sources = Annotated[
    tuple[SourceConfig, ...],
    json_flag(
        tuple,
        'list of sources: write [{"path": "data/math", "weight": 2, "reward": "math"}, {"path": '
        '"data/mine.jsonl"}]',
        _is_sources,
        lambda found: tuple(_source(one) for one in found),
        _to_json,
    ),
]
"""Several sources: a tuple in a recipe, a JSON list as a flag."""


def source_problems(path: Path | None, sources: tuple[SourceConfig, ...]) -> Iterator[str]:
    """Yield errors of `data.path` and `data.sources`: not exactly one is set, or two sources share a name."""
    if path is None and not sources:
        yield "data.path is None: name a file of training prompts, or several in data.sources"
    if path is not None and sources:
        yield f"data.path={path} and data.sources are both set: make the file one of the sources, or drop one"
    for name, count in Counter(source.name for source in sources).items():
        if count > 1:
            yield f"data.sources: {count} of them are called {name}: rename a file, or its folder"
