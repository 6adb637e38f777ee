"""The record of a fork: ``fork.json`` in the directory of a run that began at a checkpoint of another.

It holds all that a fork needs to know of the other run, which may go on, move or be deleted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bapo_megatron.checkpoint.run_directory import (
    NOT_SETTINGS,
    Change,
    differences,
    plain_values,
    read_config,
    with_present_fields,
)
from bapo_megatron.config import RunConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import MOST_DESCRIPTION_BYTES, write_atomically
from bapo_megatron.runtime.run_files import read_plain
from bapo_megatron.runtime.run_paths import RunPaths

_FORMAT = 1
_SHOWN = 80
"""Characters of a value in a message."""


@dataclass(frozen=True)
class ForkSource:
    """The value of ``--fork``: a run, and which of its checkpoints."""

    run: Path
    step: int | None
    """None: its newest whole checkpoint between two steps."""

    @classmethod
    def of(cls, text: str) -> ForkSource:
        """Parse ``RUN`` or ``RUN:STEP``; a directory whose name ends like that is a RUN."""
        run, colon, step = text.rpartition(":")
        if colon and run and step.isascii() and step.isdigit() and not Path(text).is_dir():
            return cls(Path(run), int(step))
        return cls(Path(text), None)

    def __str__(self) -> str:
        return str(self.run) if self.step is None else f"{self.run}:{self.step}"


@dataclass(frozen=True)
class Origin:
    """The origin of a fork: the checkpoint of another run that it began at."""

    run: str
    """The absolute path of the other run's directory."""
    step: int

    def __str__(self) -> str:
        return f"{self.run} at step {self.step}"


@dataclass(frozen=True)
class Fork:
    """A fork: where it began, and with which settings the other run was made."""

    origin: Origin
    manifest_sha256: str
    """SHA-256 of the checkpoint's manifest, which has the digests of all of its files."""
    settings: dict[str, Any]
    """The other run's configuration by dotted names."""
    ancestors: tuple[Origin, ...] = ()
    """Where the other run began, if it is a fork, and so on."""

    @property
    def lineage(self) -> tuple[Origin, ...]:
        """The origin and all before it, the nearest first."""
        return self.origin, *self.ancestors

    def changed(self, settings: dict[str, Any]) -> list[Change]:
        """The fields in which ``settings``, by dotted names, differ from the other run's."""
        return [change for change in differences(settings, self.settings) if change[0] not in NOT_SETTINGS]


def write_fork(run_dir: Path, fork: Fork) -> None:
    """Write the record of ``fork`` into its run directory."""
    write_atomically(RunPaths(run_dir).fork, json.dumps({"format": _FORMAT, **asdict(fork)}, indent=2) + "\n")


def read_fork(run_dir: Path) -> Fork | None:
    """The fork that a run directory holds; None if its run began by itself."""
    path = RunPaths(run_dir).fork
    if not path.exists():
        return None
    try:
        with read_plain(path) as file:
            stored = json.loads(file.read(MOST_DESCRIPTION_BYTES))
        if stored["format"] != _FORMAT:
            raise ConfigError(f"{path} has format {stored['format']}, this version reads {_FORMAT}")
        return Fork(
            Origin(**stored["origin"]),
            stored["manifest_sha256"],
            with_present_fields(stored["settings"]),
            tuple(Origin(**origin) for origin in stored["ancestors"]),
        )
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read: {error!r}") from None


def began_with(run_dir: Path) -> dict[str, Any] | None:
    """The settings that a run goes on from: its own, or, before its first start, those of its origin."""
    if (stored := read_config(run_dir)) is not None:
        return stored
    fork = read_fork(run_dir)
    return fork.settings if fork else None


# --- what the settings of a fork change of the state that it begins at ---

_RATE = ("optimizer.", "steps", "algorithm.reuse_epochs", "algorithm.updates_per_epoch")
"""Fields that decide about the learning rate after so many updates. A prefix ends with a dot."""


def other_algorithm(config: RunConfig, fork: Fork) -> bool:
    """Whether the algorithm is another one, so that what it keeps between two updates may not fit."""
    names = other_settings(config, fork, ("algorithm.",))
    return any(not name.startswith(("algorithm.gap_", "algorithm.on_gap")) for name in names)


def other_settings(config: RunConfig, fork: Fork, fields: Sequence[str]) -> list[str]:
    """The names of those ``fields`` that differ from the other run's; a prefix of names ends with a dot."""
    prefixes = tuple(field for field in fields if field.endswith("."))
    names = [name for name, *_ in fork.changed(plain_values(config))]
    return [name for name in names if name in fields or (prefixes and name.startswith(prefixes))]


def other_data(config: RunConfig, fork: Fork) -> str | None:
    """Why the prompts are not those of the other run, as far as settings say; None if they are the same."""
    return ", ".join(_other_data(config, fork)) or None


def _other_data(config: RunConfig, fork: Fork) -> Iterator[str]:
    ours = plain_values(config)
    for name in other_settings(config, fork, ("data.",)):
        then, now = fork.settings.get(name), ours.get(name)
        same_order = _order_of(name, then) == _order_of(name, now)
        if (
            name != "data.max_prompt_tokens" and not same_order
        ):  # the sampler sees how many prompts are left out
            yield f"{name} is {now}, and was {then}"


def _order_of(name: str, value: Any) -> Any:
    """What a field of the data says of the order of prompts: files by where they lie, and no rewards."""
    if name == "data.path":
        return Path(str(value)).resolve()
    if name == "data.sources" and value:
        return [(Path(one["path"]).resolve(), one["weight"]) for one in value]
    return value


def may_differ(config: RunConfig, fork: Fork) -> set[str]:
    """The parts of the resume check (``resume_check.py``) in which a fork's first start may differ.

    The sampler's position is the fork's own. The learning rate follows the schedule of today; the log-probs
    of the canary those of today's temperature and model folder. Weights and optimizer must be equal.
    """
    found = {"sampler"}
    if other_settings(config, fork, _RATE):
        found.add("learning_rate")
    if other_settings(config, fork, ("rollout.temperature", "model.hf_path")):
        found.add("canary")
    return found


# --- for people ---


def lineage_text(run_dir: Path) -> str | None:
    """Where a run was forked from, in words, with the settings that differ there; None for no fork."""
    fork = read_fork(run_dir)
    if fork is None:
        return None
    changed = fork.changed(read_config(run_dir) or fork.settings)
    told = ", ".join(f"{name} {_change(_plain(now), _plain(then))}" for name, then, now in changed)
    lineage = ", which was forked from ".join(map(str, fork.lineage))
    return lineage + (f"; here {told}" if told else "")


def _plain(value: object) -> str:
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _change(now: str, then: str) -> str:
    """Two values of a setting; of long ones the part that differs."""
    if max(len(now), len(then)) > _SHOWN:
        pairs = enumerate(zip(now, then, strict=False))
        differs = next((place for place, (a, b) in pairs if a != b), min(len(now), len(then)))
        begin = max(0, differs - _SHOWN // 4)
        now, then = (_excerpt(text, begin) for text in (now, then))
    return f"{now} (there {then})"


def _excerpt(text: str, begin: int) -> str:
    end = begin + _SHOWN
    return ("..." if begin else "") + text[begin:end] + ("..." if end < len(text) else "")
