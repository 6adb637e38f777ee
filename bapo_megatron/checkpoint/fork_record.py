"""Fork record, ``fork.json``: which run and step a forked run began from, and that run's settings.

``write_fork`` writes it once; ``read_fork`` returns it, or None for a run that is not a fork. The other run
is then no longer read: it may continue, move or be deleted. ``changes_algorithm``, ``changed_data`` and
``may_differ`` return which restored state its changed settings affect. Nothing here is collective.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bapo_megatron.checkpoint.run_directory import (
    NOT_SETTINGS,
    RATE_FIELDS,
    Change,
    differences,
    is_among,
    is_harmless,
    plain_values,
    read_config,
    with_present_fields,
)
from bapo_megatron.config import RunConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.run_paths import RunPaths

_FORMAT = 1


@dataclass(frozen=True)
class ForkSource:
    """Parsed value of ``--fork``, ``RUN`` or ``RUN:STEP``: the other run's directory, and a step or None."""

    run: Path
    step: int | None
    """None: the newest checkpoint that is not within a step."""

    @classmethod
    def of(cls, text: str) -> ForkSource:
        """Parse ``RUN`` or ``RUN:STEP``."""
        run, colon, step = text.rpartition(":")
        if colon and run and step.isdecimal():
            return cls(Path(run), int(step))
        return cls(Path(text), None)

    def __str__(self) -> str:
        return str(self.run) if self.step is None else f"{self.run}:{self.step}"


@dataclass(frozen=True)
class Origin:
    """Origin of a fork: the other run's absolute path and the step of its checkpoint."""

    run: str
    """Absolute path of the other run's directory."""
    step: int

    def __str__(self) -> str:
        return f"{self.run} at step {self.step}"


@dataclass(frozen=True)
class Fork:
    """Content of ``fork.json``: the fork's origin, the digest of the checkpoint's manifest, the other run's
    settings by dotted names, and, if the other run is itself a fork, its lineage."""

    origin: Origin
    manifest_sha256: str
    """SHA-256 of the checkpoint's manifest, which contains the digests of all its files."""
    settings: dict[str, Any]
    """The other run's configuration by dotted names."""
    ancestors: tuple[Origin, ...] = ()
    """Origins of the other run, if it is a fork, nearest first."""

    @property
    def lineage(self) -> tuple[Origin, ...]:
        """Origin and ancestors, nearest first."""
        return self.origin, *self.ancestors

    def changed(self, settings: dict[str, Any]) -> list[Change]:
        """Return the fields of ``settings``, by dotted names, that differ from the other run's."""
        return [change for change in differences(settings, self.settings) if change[0] not in NOT_SETTINGS]


def write_fork(paths: RunPaths, fork: Fork) -> None:
    """Write ``fork.json`` into the run directory."""
    write_atomically(paths.fork, json.dumps({"format": _FORMAT, **asdict(fork)}, indent=2) + "\n")


def read_fork(run_dir: Path) -> Fork | None:
    """Return the content of ``fork.json``, with settings migrated to the present fields; None without one."""
    path = RunPaths(run_dir).fork
    if not path.exists():
        return None
    stored = json.loads(path.read_bytes())
    if stored["format"] != _FORMAT:
        raise ConfigError(f"{path} has format {stored['format']}, this version reads {_FORMAT}")
    return Fork(
        Origin(**stored["origin"]),
        stored["manifest_sha256"],
        with_present_fields(stored["settings"]),
        tuple(Origin(**origin) for origin in stored["ancestors"]),
    )


# --- changed settings, and the state that they affect ---


def changes_algorithm(config: RunConfig, fork: Fork) -> bool:
    """Return whether the fork changes the algorithm, so that the stored ``UpdateLoss`` state may not fit."""
    changes = fork.changed(plain_values(config))
    return any(change[0].startswith("algorithm.") and not is_harmless(change, config) for change in changes)


def _changed_names(config: RunConfig, fork: Fork, fields: Iterable[str]) -> list[str]:
    return [name for name, *_ in fork.changed(plain_values(config)) if is_among(name, fields)]


def changed_data(config: RunConfig, fork: Fork) -> str | None:
    """Return a text that lists the fork's changed data settings if they change its prompts; else None."""
    # The sampler itself compares the number of prompts excluded by the length limit.
    told = [
        f"{name} is {now}, and was {then}"
        for name, then, now in fork.changed(plain_values(config))
        if name.startswith("data.") and name != "data.max_prompt_tokens"
        if _order_of(name, then) != _order_of(name, now)
    ]
    return ", ".join(told) or None


def _order_of(name: str, value: Any) -> Any:
    """Return the part of a data field that determines the order of prompts: file paths and weights."""
    if name == "data.path":
        return Path(str(value)).resolve()
    if name == "data.sources" and value:
        return [(Path(source["path"]).resolve(), source["weight"]) for source in value]
    return value


def may_differ(config: RunConfig, fork: Fork) -> set[str]:
    """Return the parts of the resume check (``resume_check.py``) that may differ at a fork's first start. The
    sampler's position is the fork's own. The learning rate follows the fork's schedule; the canary's
    log-probs follow its temperature and model folder. Weights and optimizer must be equal."""
    names = {"sampler"}
    if _changed_names(config, fork, RATE_FIELDS):
        names.add("learning_rate")
    if _changed_names(config, fork, ("rollout.temperature", "model.hf_path")):
        names.add("canary")
    return names


# --- texts ---


def lineage_text(run_dir: Path) -> str | None:
    """Return a forked run's lineage and changed settings as text; None if it is not a fork."""
    fork = read_fork(run_dir)
    if fork is None:
        return None
    changed = fork.changed(read_config(run_dir) or fork.settings)
    told = ", ".join(f"{name} {_plain(now)} (there {_plain(then)})" for name, then, now in changed)
    lineage = ", which was forked from ".join(map(str, fork.lineage))
    return lineage + (f"; here {told}" if told else "")


def _plain(value: object) -> str:
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
