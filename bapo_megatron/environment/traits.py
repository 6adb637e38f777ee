"""Traits of an environment's class, read by a worker process: no code of a user runs in the run's own.

Used in ``commands/doctor/``, ``rollout/sampler/`` and this folder.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bapo_megatron.config.sources import EnvironmentConfig
from bapo_megatron.environment import own_interpreter
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.child_process import AnsweringChild, ChildError, with_import_path
from bapo_megatron.workers.process import START_LIMIT_S, WorkerProgram


@dataclass(frozen=True)
class Traits:
    """What a run must know of ``environment.function`` before it starts. Plain data, made by a worker."""

    role: Literal["tool", "user"]
    stops: tuple[str, ...]
    resume: Literal["replay", "restore", "never"]
    own_random: bool
    is_async: bool
    tools: tuple[dict[str, Any], ...] = ()

    @staticmethod
    def of(note: str) -> Traits:
        """From the first note of the worker program."""
        found: dict[str, Any] = json.loads(note)
        return Traits(**{**found, "stops": tuple(found["stops"]), "tools": tuple(found["tools"])})


def worker_program(config: EnvironmentConfig) -> WorkerProgram:
    """How the workers of ``config`` start."""
    settings = {
        "function": config.function,
        "settings": config.settings,
        "memory_limit_mb": config.memory_limit_mb,
    }
    if config.python is None:
        return WorkerProgram((sys.executable, "-m", "bapo_megatron.environment.worker"), settings)
    # Not the run's import path: its packages are those that conflict.
    return WorkerProgram((str(config.python), own_interpreter.__file__), settings, os.environ)


def read_traits(config: EnvironmentConfig, limit_s: float = START_LIMIT_S) -> Traits:
    """Start a worker, and read the traits of the class. Blocking, while it imports, for at most ``limit_s``.

    ConfigError if there is no such class, it contradicts itself, or the interpreter does not run.
    """
    program = worker_program(config)
    environment = with_import_path(os.environ) if program.environment is None else program.environment
    try:
        child = AnsweringChild(program.command, environment)
    except OSError as error:
        raise ConfigError(f"environment.python={config.python} cannot be started: {error}") from error
    try:
        answer = child.ask(program.settings, limit_s)
    except ChildError as error:
        of = "" if config.python is None else f" in environment.python={config.python}"
        raise ConfigError(
            f"environment.function={config.function}: its worker did not start{of}: {error}; its own "
            "messages are above"
        ) from error
    finally:
        child.close()
    if "problem" in answer:
        raise ConfigError(answer["problem"])
    return Traits.of(answer["notes"][0])


def stop_ids(traits: Traits, tokenizer: Any) -> tuple[int, ...]:
    """The ids of the texts that end a turn. ConfigError for one that is not a single token."""
    found = []
    for text in traits.stops:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            pieces = [tokenizer.decode([one]) for one in ids]
            raise ConfigError(
                f"environment.function: stops has {text!r}, which is {len(ids)} tokens of this model "
                f"({pieces}): a turn can end at a single token; give one, or let step() look for the text"
            )
        found.append(int(ids[0]))
    return tuple(found)


def interpreter_problem(python: Path | None) -> str | None:
    """Why ``environment.python`` cannot be an interpreter; None if it may be one."""
    if python is not None and not os.access(python, os.X_OK):
        return f"environment.python={python} is no program: give the path of a Python interpreter"
    return None
