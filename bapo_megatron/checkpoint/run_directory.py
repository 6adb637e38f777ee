"""Run directory: its lock, its stored configuration, and the rules for changing settings on a resume.

Rank 0 holds the lock during a run (``only_writer``) and writes config.json at each start (``store_config``).
``check_same_run``, a preflight, refuses a resume that changes a fixed setting without ``--allow-change``;
``check_partial_step``, once the newest checkpoint is known, refuses even an allowed change of what the
updates compute within a step. Both raise ConfigError. Older runs are migrated: ``read_config`` adds new
fields and drops removed ones at their default; ``with_former_defaults`` keeps what they began with.
"""

from __future__ import annotations

import errno
import fcntl
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from bapo_megatron.algo.bounds import balanced
from bapo_megatron.config import RunConfig
from bapo_megatron.config.removed import removed_settings, without_removed
from bapo_megatron.config.validation import flat, settings_of_scores
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.device import environment_variable
from bapo_megatron.runtime.files import open_lock, write_atomically
from bapo_megatron.runtime.run_paths import MANIFEST, RunPaths, step_entries
from bapo_megatron.runtime.storage import FailingDiskError

FORMAT = 2
"""Format version of the run directory; other versions are refused."""

_REQUEUED_WAIT_S, _LOOK_S = 180.0, 1.0
"""Longest wait of a requeued job for the lock (servers keep a dead node's up to 2 min); polling interval."""

_CONFIG_BYTES = 64 << 20

_SAMPLES_ONLY = "rollout_only"
"""Entry of config.json: whether it is a ``bapo train --rollout-only`` run."""

_DEFAULT_PRESET = "default_preset"
"""Entry of config.json, missing in runs that began before recipes had the preset ``paper``."""

_DEFAULT_ON_FAILURE = "default_on_failure"
"""Entry of config.json, missing in runs that began before failed scores were left out."""

_DEFAULT_FUSED = "default_fused"
"""Entry of config.json, missing in runs that began before AdamW was fused on a CPU."""

_FUSED = "optimizer.fused"

THREADS = "threads"
"""Field that keeps its stored value if a resume gives none, because CPU sums depend on it."""

_ADDED: dict[str, Any] = {
    "algorithm.advantage_settings": {},
    "algorithm.branch_reward": "whole",
    "algorithm.masks": [],
    "algorithm.terms": [],
    "algorithm.reference_kl.unbiased": False,
    _FUSED: False,
    "evaluation.last": False,  # a resumed run evaluates its last step
    "reward.on_failure": "value",
    "reward.outage_minutes": 30.0,
}
"""Fields added since commit 7181cb6, with their value at that time unless a comment says otherwise."""

_ENVIRONMENT = "environment."

Change = tuple[str, Any, Any]
"""A changed field: name, stored value, present value."""

NOT_SETTINGS = ("name", "run_dir", "allow_change", "accept_resume_mismatch", "logging.note")
"""Fields specific to a run or a start, excluded from comparisons of two runs."""

RATE_FIELDS = ("optimizer.", "steps", "algorithm.reuse_epochs", "algorithm.updates_per_epoch")
"""Fields that determine an update's learning rate, in the notation of ``is_among``."""

_OF_UPDATES = (
    *("algorithm.", "optimizer.", "seed", "steps", "model.dtype"),
    *("rollout.temperature", "rollout.max_response_tokens", "rollout.route_replay"),
)
"""Fields that the updates of a sampled step depend on, unless the change ``is_harmless``."""

# Fields that may change on a resume: length, place, speed, logging and deadlines, not computed values.
_STEPS = "steps"
_MAY_CHANGE = (
    *(_STEPS, "name", "run_dir", "allow_change", "accept_resume_mismatch", "hang_minutes"),
    *("parallel.", "checkpoint.", "logging.", "evaluation.", "batch.", "optimizer.device", "profile."),
    *("algorithm.gap_", "algorithm.on_gap", "algorithm.route_mismatch_limit"),
    *(f"algorithm.distillation.{name}" for name in ("urls", "api_key_env", "concurrency")),
    *("algorithm.distillation.timeout_s", "algorithm.distillation.give_up_s"),
    *("reward.workers", "reward.time_limit_s", "reward.memory_limit_mb"),
    *("reward.allow_weak_sandbox", "reward.sandbox_url", "reward.outage_minutes"),
    *("environment.workers", "environment.memory_limit_mb", "environment.python"),
    *("environment.step_limit_s", "environment.episode_limit_s"),
    *("rollout.max_batch", "rollout.segment_tokens", "rollout.keep_steps"),
    *("rollout.sglang.", "rollout.custom_engine."),
)
_MAY_NOT_CHANGE = ("rollout.sglang.on_update",)  # it decides which keys and values tokens attend to


def check_writable(directory: Path) -> None:
    """Preflight: create the run directory and its lock file; raise ConfigError if that fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        open_lock(RunPaths(directory).lock).close()
    except OSError as error:
        raise ConfigError(f"the run directory {directory} cannot be written: {error}; name another") from None


@contextmanager
def only_writer(directory: Path) -> Iterator[None]:
    """Context manager: hold the lock of a run directory, or of an evaluation's folder. Raises ConfigError if
    another process holds it (a requeued job first waits up to three minutes) or the file system has no locks;
    FailingDiskError if the lock server does not answer."""
    with open_lock(RunPaths(directory).lock) as lock:
        try:
            _take(lock)
        except BlockingIOError:
            raise ConfigError(f"another process is writing to the run {directory}; stop it first") from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):  # NFS: its lock server does not answer
                raise FailingDiskError(f"the run directory {directory}: {error.strerror}") from None
            raise ConfigError(
                f"the run directory {directory} cannot be locked ({error.strerror}), so two jobs could write "
                "to it: mount it with locks (Lustre: -o flock), or name another directory"
            ) from None
        yield


def _take(lock: BinaryIO) -> None:
    """Lock the file. Raises BlockingIOError if another process holds it, in a requeued job after a wait."""
    is_requeued = (environment_variable("BAPO_RESTART") or "0") != "0"
    deadline = time.monotonic() + (_REQUEUED_WAIT_S if is_requeued else 0.0)
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_LOOK_S)


def check_same_run(config: RunConfig, samples_only: bool = False) -> None:
    """Preflight of a resume: raise ConfigError with all changed settings that may not change; before the
    first finished step any may. Also raises ConfigError if training would continue a ``--rollout-only`` run
    or vice versa (``samples_only``: what starts now), or if a checkpoint is later than ``steps``."""
    stored = _stored(config.directory)
    _check_kind(config.paths, stored or {}, samples_only)
    _check_last_step(config)
    if stored is None or not has_steps(config.directory):
        return
    present = with_present_fields(stored["config"])
    for told in removed_settings(present):
        raise ConfigError(f"the run {config.directory} was started with a setting that is gone. {told}")
    changes = differences(plain_values(config), present)
    different = [
        change
        for change in changes
        if change[0] not in config.allow_change and not is_harmless(change, config)
    ]
    if different:
        raise ConfigError(
            f"the run {config.directory} was started with other settings:\n"
            + "\n".join(f"{name}: {then!r} in the run, {now!r} now" for name, then, now in different)
            + "\ngive them as they were to continue it, or another --run-dir to start anew\n"
            + "to change them in this run: --allow-change "
            + " ".join(name for name, *_ in different)
        )


def _check_last_step(config: RunConfig) -> None:
    """Raise ConfigError for a checkpoint later than ``steps``: it would be exported as the result."""
    entries = step_entries(config.paths.checkpoints)
    newest = max((moment for moment, path in entries if (path / MANIFEST).is_file()), default=(0, 0))
    if newest > (config.steps, 0):
        done, updates = newest
        within = f" and {updates} updates of the next" if updates else ""
        raise ConfigError(
            f"steps={config.steps}, but {config.directory} has trained {done} steps{within}: give --steps "
            f"{done + bool(updates)} or more; for weights of an earlier step, bapo-ckpt to-hf "
            f"{config.directory} OUT --step N"
        )


def has_steps(directory: Path) -> bool:
    """Return whether the run has finished a step."""
    metrics = RunPaths(directory).metrics
    return metrics.exists() and metrics.stat().st_size > 0


def known_suites(directory: Path) -> list[str]:
    """Return the evaluation suites of a run's last start; empty before its first finished step."""
    stored = read_config(directory) if has_steps(directory) else None
    return list((stored or {}).get("evaluation.suites") or [])


def with_former_defaults(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Return ``config`` with the defaults that an older run began with, and a line to print for each (except
    ``optimizer.fused``). A new run, and fields in ``allow_change``, keep their present values."""
    stored, lines = _stored(config.directory), []
    paths = config.paths
    if stored is None or not (has_steps(paths.root) or any(step_entries(paths.checkpoints))):
        return config, []
    then, name, reward = with_present_fields(stored["config"]), "reward.on_failure", config.reward
    if _DEFAULT_PRESET not in stored and (former := _with_former_preset(config, then)):
        config, line = former
        lines.append(line)
    is_former = _DEFAULT_ON_FAILURE not in stored and then[name] == "value" != reward.on_failure
    if is_former and name not in config.allow_change:
        config = replace(config, reward=replace(reward, on_failure="value"))
        lines.append(
            f"{config.directory} began when a response that could not be scored had the reward reward.failed="
            f"{reward.failed:g}, and continues so; new runs leave it out of its group. To change over: "
            f"--allow-change {name}"
        )
    if _DEFAULT_FUSED not in stored and not then[_FUSED] and _FUSED not in config.allow_change:
        # Without a line: no change on a GPU; on a CPU only the last bits and slightly the time.
        config = replace(config, optimizer=replace(config.optimizer, fused=False))
    return config, lines


def _with_former_preset(config: RunConfig, then: dict[str, Any]) -> tuple[RunConfig, str] | None:
    """Return ``config`` with preset ``balanced`` instead of ``paper``, and the line; None if unaffected."""
    bounds, names = config.algorithm.bounds, ("algorithm.bounds.scope", "algorithm.bounds.bounds_tokens")
    former = balanced()
    is_former = tuple(then.get(name) for name in names) == (former.scope, former.bounds_tokens)
    if not is_former or not bounds.grouped or set(names) & set(config.allow_change):
        return None
    kept = replace(bounds, scope=former.scope, bounds_tokens=former.bounds_tokens)
    line = (
        f"{config.directory} began with one search of the bounds an update (preset balanced), and continues "
        f"so; recipes now have the preset paper, a search for about {bounds.bounds_tokens} tokens. To change "
        f"over: --allow-change {' '.join(names)}"
    )
    return replace(config, algorithm=replace(config.algorithm, bounds=kept)), line


def _check_kind(paths: RunPaths, stored: dict[str, Any], samples_only: bool) -> None:
    if stored.get(_SAMPLES_ONLY) and not samples_only:
        raise ConfigError(
            f"{paths.root} holds the rollouts of a run with --rollout-only, which training would mix with "
            f"its own: give another --run-dir. --train-only {paths.root} trains on them"
        )
    traces = (paths.config, paths.metrics, paths.checkpoints, paths.journal)
    if samples_only and not stored.get(_SAMPLES_ONLY) and any(path.exists() for path in traces):
        raise ConfigError(
            f"{paths.root} is the directory of a training run, which --rollout-only would damage: give "
            f"another --run-dir"
        )


def differences(ours: dict[str, Any], stored: dict[str, Any]) -> list[Change]:
    """Return the fields that differ between two configurations given by dotted names, sorted by name."""
    return [
        (name, stored.get(name), ours.get(name))
        for name in sorted(stored.keys() | ours.keys())
        if stored.get(name) != ours.get(name)
    ]


def is_harmless(change: Change, config: RunConfig) -> bool:
    """Return whether a resume may make the change to ``config`` without ``--allow-change``."""
    name, then, now = change
    if name == THREADS and now is None:
        return True
    if name == "reward.settings":  # only the endpoint's address or limits
        function = config.reward.function
        return settings_of_scores(function, then) == settings_of_scores(function, now)
    if name == "data.sources":  # only limits, workers and the like of environments
        return _without_limits(then) == _without_limits(now)
    if name == _STEPS and config.optimizer.decay != "constant":
        return False  # the decay spans all steps: more steps change the schedule
    return is_among(name, _MAY_CHANGE) and name not in _MAY_NOT_CHANGE


def is_among(name: str, fields: Iterable[str]) -> bool:
    """Return whether a field is among ``fields``; entries ending in a dot or underscore are prefixes."""
    return any(name == field or (field.endswith((".", "_")) and name.startswith(field)) for field in fields)


def _without_limits(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the sources without the environment fields that may change."""
    return [
        {
            **source,
            "environment": own and {n: v for n, v in own.items() if _ENVIRONMENT + n not in _MAY_CHANGE},
        }
        for source in sources
        for own in [source["environment"]]
    ]


def changed_settings(config: RunConfig, before: dict[str, Any] | None) -> list[Change]:
    """Return the fields of ``config`` that differ from the last start's settings; empty for a new run."""
    return differences(plain_values(config), before) if before else []


def check_partial_step(changed: list[Change], config: RunConfig) -> None:
    """Raise ConfigError if a change affects the remaining updates of a partly trained step."""
    of_updates = [change for change in changed if is_among(change[0], _OF_UPDATES)]
    if named := [change[0] for change in of_updates if not is_harmless(change, config)]:
        raise ConfigError(
            f"{', '.join(named)}: the newest checkpoint lies within a step, which must end as it began; "
            "continue without the change until the next checkpoint, and change it then"
        )


def store_config(config: RunConfig, samples_only: bool = False) -> None:
    """Write config.json, the resolved configuration, atomically; on rank 0, at each start with work left.
    ``samples_only``: whether it is a ``--rollout-only`` run."""
    before = _stored(config.directory)
    kind: dict[str, Any] = {_SAMPLES_ONLY: True} if samples_only else {}
    # An older run keeps lacking the marks after a resume.
    marks = (_DEFAULT_PRESET, "paper"), (_DEFAULT_ON_FAILURE, "leave_out"), (_DEFAULT_FUSED, True)
    for mark, default in marks:
        if before is None or mark in before or not has_steps(config.directory):
            kind[mark] = default
    stored = {"format": FORMAT, **kind, "config": plain_values(config)}
    write_atomically(config.paths.config, json.dumps(stored, indent=2) + "\n")


def read_config(directory: Path) -> dict[str, Any] | None:
    """Return the stored configuration by dotted names, migrated to the present fields; None if there is none.
    Raises ConfigError if it cannot be read or has another format version."""
    stored = _stored(directory)
    return with_present_fields(stored["config"]) if stored else None


def _stored(directory: Path) -> dict[str, Any] | None:
    path = RunPaths(directory).config
    if not path.exists():
        return None
    try:
        with path.open("rb") as file:
            stored: dict[str, Any] = json.loads(file.read(_CONFIG_BYTES))
        version, _ = stored["format"], stored["config"].items()
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read: {error!r}") from None
    if version != FORMAT:
        raise ConfigError(f"{path} has run format {version}, this version of the program reads {FORMAT}")
    return stored


def with_present_fields(stored: dict[str, Any]) -> dict[str, Any]:
    """Return a stored configuration migrated to the present fields: added ones with the value in ``_ADDED``,
    without removed ones. A removed field stays if its value was not its default."""
    return {**_ADDED, **without_removed(stored)}


def plain_values(config: RunConfig) -> dict[str, Any]:
    """Return the values of a configuration by dotted names, as JSON values."""
    values: dict[str, Any] = json.loads(json.dumps(flat(config), default=_plain))
    return values


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)
