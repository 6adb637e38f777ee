"""Dataclasses of ``environment.settings`` for the built-in environments and adapters.

``settings_type(kind)``, called in an environment worker, returns the dataclass of an environment class, or
None; the run's own process checks the settings against that dataclass before the run (pool.py). Needs only
the standard library, for a worker with a separate interpreter, and no adapter, whose packages a run may lack.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from bapo_megatron.environment import Environment

with contextlib.suppress(ImportError):  # absent in a separate interpreter, which reads no annotations
    from annotated_types import Ge, Gt, MinLen

READERS = frozenset({"__init__", "play", "run"})
"""Methods in which environments read their settings; ``play`` belongs to loops, ``run`` to agents."""


def settings_type(kind: type[Environment]) -> type | None:
    """Return the settings dataclass of a class, its own or its base's. Returns None without one, or if the
    class overrides one of ``READERS`` and so may take other settings than its base."""
    for base in kind.__mro__:
        if "settings_type" in vars(base):
            return base.settings_type  # type: ignore[attr-defined, no-any-return]
        if not READERS.isdisjoint(vars(base)):
            break
    return None


@dataclass(frozen=True)
class CalculatorSettings:
    """``environment.settings`` of ``Calculator``: the form of a call."""

    format: Literal["tool_call", "plain"] = "tool_call"
    """`tool_call`: `<tool_call>{"name": "calculator", "arguments": {"expression": "2+3"}}</tool_call>`.
    `plain`: the last line of the turn is an expression and nothing else."""


@dataclass(frozen=True)
class PythonSettings:
    """``environment.settings`` of ``PythonTool``: the form of a call, and limits of its sandbox."""

    format: Literal["tool_call", "fenced"] = "tool_call"
    """`tool_call`: `<tool_call>{"name": "python", "arguments": {"code": "print(2)"}}</tool_call>`. `fenced`:
    the last closed block of Python of the turn."""
    limit_s: Annotated[float, Gt(0)] = 10.0
    """Seconds for a call and those before it."""
    memory_mb: Annotated[int, Ge(16)] = 1024
    """Memory of the session."""
    most_characters: Annotated[int, Ge(2)] = 4000
    """Maximum output length; a longer output loses its middle."""
    allow_weak_sandbox: bool = False
    """Whether it may run where the kernel does not grant every wall of the sandbox."""


@dataclass(frozen=True)
class AgentSettings:
    """``environment.settings`` of ``EndpointEnvironment``: the agent program, its memory, its reward."""

    command: Annotated[list[str], MinLen(1)]
    """The program and its arguments."""
    tools_in_prompts: bool = False
    """Whether the prompts' text describes the ``tools`` of the program's requests. If not, the first request
    must have the tools of its row, which the chat template writes; others begin a branch."""
    memory_mb: Annotated[int, Ge(16)] | None = None
    """Memory of each process of the program; None: no limit of its own."""
    reward: Literal["printed", "exit_code"] = "printed"
    """Reward of a program that writes none into the file of `BAPO_REWARD_FILE`. `printed`: the last word of
    its output; an exit code other than 0 is a failure. `exit_code`: 1 for exit code 0, else 0."""


@dataclass(frozen=True)
class OpenEnvSettings:
    """``environment.settings`` of ``OpenEnv``: the server's address, fields of actions and observations."""

    url: Annotated[str, MinLen(1)]
    """Address of the server."""
    action: str = "message"
    """Field of the action that holds the model's turn, without its thinking part."""
    observation: str = ""
    """Field of the observation that the model is shown; empty: the whole observation, as JSON."""


@dataclass(frozen=True)
class TextArenaSettings:
    """``environment.settings`` of ``TextArena``: whether an observation repeats earlier text of the game."""

    new_text_only: bool = True
    """Whether an observation omits the text of the one before, which games repeat each time."""


@dataclass(frozen=True)
class VerifiersSettings:
    """``environment.settings`` of ``VerifiersV1``: verifiers' own taskset and environment configuration."""

    taskset: dict[str, Any]
    env: dict[str, Any] = field(default_factory=dict)
