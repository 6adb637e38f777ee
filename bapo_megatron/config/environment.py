"""Configuration section of the environment: what answers the turns of a model, and where it runs.

A frozen dataclass, a field of ``RunConfig`` and of each source; the docstring of a field is its text in
``--help``. Used in ``environment/`` and this folder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from bapo_megatron.config.free_settings import Settings


@dataclass(frozen=True)
class EnvironmentConfig:
    """The environment: what answers the model's turns, and the worker processes that hold its episodes."""

    function: str | None = None
    """`package.module:Name` or `file.py:Name` of a subclass of `bapo_megatron.environment.Environment`. None:
    a response is one turn."""
    settings: Settings = field(default_factory=dict)
    """Settings of the environment, a JSON object: the second argument of its constructor."""
    max_turns: Annotated[int, Ge(1)] = 8
    """Most turns of the model in a response; then it ends, with the finish reason `turns`."""
    step_limit_s: Annotated[float, Gt(0)] = 60.0
    """Time limit of one step. A response whose step takes longer has the reward `reward.failed`."""
    episode_limit_s: Annotated[float, Gt(0)] = 600.0
    """Time limit of all steps of a response together."""
    workers: Annotated[int, Ge(1)] = 2
    """Processes that hold environments, on rank 0's machine. Each takes thousands of async steps at a time,
    32 plain ones, or one if `own_random` is set."""
    memory_limit_mb: Annotated[int, Ge(256)] = 16384
    """Memory that the environments of one process may take together."""
    python: Path | None = None
    """Python interpreter (3.11 or newer) of these processes, for environments whose packages conflict with
    those of the run. None: the run's."""
    history: Literal["exact", "sampled"] = "exact"
    """`exact`: a run starts only if the tokens of a response over several turns are those of the whole chat,
    rendered by the model's template. `sampled`: the tokens that were sampled stand as they are, also where
    the template would have left some out (thoughts of earlier turns)."""
