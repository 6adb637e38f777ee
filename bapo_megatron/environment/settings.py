"""Dataclasses that check ``environment.settings`` of built-in environments and adapters before a run.

``settings_type(kind)`` returns the dataclass of an environment class, or None. It is checked in the run's own
process, so this module imports no adapter; only the standard library, for a separate interpreter.
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
    """Return the settings dataclass of a class or of its base. Returns None if there is none, or if the class
    overrides one of ``READERS`` and so may take other settings than its base."""
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
    """Longest output; of a longer one the middle is left out."""
    allow_weak_sandbox: bool = False
    """Whether it may run where the kernel does not grant every wall of the sandbox."""


@dataclass(frozen=True)
class AgentSettings:
    """``environment.settings`` of ``EndpointEnvironment``: the agent program, its memory, its reward."""

    command: Annotated[list[str], MinLen(1)]
    """The program and its arguments."""
    tools_in_prompts: bool = False
    """Whether the text of the prompts describes the ``tools`` of the program's requests; else the first has
    those of its row, which the chat template shows, and other ones begin a branch."""
    memory_mb: Annotated[int, Ge(16)] | None = None
    """Memory of each process of the program; None: no limit of its own."""
    reward: Literal["printed", "exit_code"] = "printed"
    """Reward of a program that writes none into the file of `BAPO_REWARD_FILE`: the last word of its output,
    and a program that ends with another exit code than 0 has failed; or 1 for exit code 0, else 0."""


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
    """``environment.settings`` of ``TextArena``: how much of the game's text an observation repeats."""

    new_text_only: bool = True
    """Whether an observation leaves out what the one before has said: games repeat all of it each time."""


@dataclass(frozen=True)
class VerifiersSettings:
    """``environment.settings`` of ``VerifiersV1``: verifiers' own configuration."""

    taskset: dict[str, Any]
    env: dict[str, Any] = field(default_factory=dict)
