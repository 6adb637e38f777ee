"""The record of what each step was trained on: one file a step, whole or not there.

A file holds a JSON header and four arrays, in numpy's zip format: every bit comes back, and a damaged
file is noticed by its checksums.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.run_paths import RunPaths, step_entries, step_name
from bapo_megatron.runtime.storage import writing
from bapo_megatron.types import Group, Prompt, Rollout, StepBatch


def step_path(directory: Path, step: int) -> Path:
    """Where the record of a step is."""
    return directory / f"{step_name(step)}.npz"


def write_step(directory: Path, step: int, batch: StepBatch, numbers: Sequence[int] = ()) -> Path:
    """Record ``batch``. ``numbers``: those of its groups in the sampler's book.

    RunStopped if the disk does not take it; the file is not there then.
    """
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **_arrays(batch, numbers))
    path = step_path(directory, step)
    with writing(f"the rollouts of step {step}", path):
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content.getvalue())
    return path


def steps_in(directory: Path) -> list[int]:
    """The steps that are recorded there, in order."""
    return sorted(step for (step, _), _ in step_entries(directory, ".npz"))


def step_groups(directory: Path, step: int) -> list[int]:
    """Numbers of the groups of ``step`` in the sampler's book. Raises ConfigError as ``read_step`` does."""
    with _opened(directory, step) as arrays:
        return list(json.loads(arrays["header"].tobytes()).get("numbers", []))


def read_step(directory: Path, step: int) -> StepBatch:
    """The batch of ``step``. Raises ConfigError that names the file if it is missing or damaged."""
    with _opened(directory, step) as arrays:
        return _batch(dict(arrays))


@contextmanager
def _opened(directory: Path, step: int) -> Iterator[Any]:
    path = step_path(directory, step)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            yield arrays
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; step {step} was not recorded there") from error
    except Exception as error:  # a damaged zip file makes zipfile, zlib and numpy raise all kinds
        raise ConfigError(f"{path}: the record of step {step} is damaged: {error!r}") from error


class ReplaySampler:
    """A ``Sampler`` that gives the recorded batches of another run (``config.rollout.replay``)."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = RunPaths(run_dir).journal
        if not self._directory.is_dir():
            raise ConfigError(f"rollout.replay={run_dir}: no journal there; give the directory of a run")

    def start(self, first_step: int, state: dict[str, Any] | None) -> None:
        """Nothing to do: the step says it all."""

    def next_batch(self, step: int, wait_s: float) -> StepBatch:
        """The batch that the other run trained on in ``step``."""
        return read_step(self._directory, step)

    def evaluated(self, step: int, wait_s: float) -> None:
        """Nothing is asked: there are no engines."""

    def load_weights(self, folder: Path, version: int, step: int) -> None:
        """Nothing is sampled."""

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def checkpointed(self, oldest: int) -> None:
        """The other run's record stays."""

    def close(self) -> None:
        """Nothing to do."""


def _arrays(batch: StepBatch, numbers: Sequence[int]) -> dict[str, np.ndarray]:
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    groups = [_group_header(group) for group in batch.groups]
    header = {"metrics": batch.metrics, "numbers": list(numbers), "groups": groups}
    has_masks = any(rollout.loss_mask_R is not None for rollout in rollouts)
    return {
        "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
        "prompt_ids": _joined([group.prompt.token_ids_P for group in batch.groups], np.int32),
        "token_ids": _joined([rollout.token_ids_R for rollout in rollouts], np.int32),
        "log_probs": _joined([rollout.log_probs_R for rollout in rollouts], np.float32),
        "versions": _joined([rollout.versions_R for rollout in rollouts], np.int32),
        **({"loss_masks": _joined([_loss_mask(one) for one in rollouts], np.bool_)} if has_masks else {}),
    }


def _loss_mask(rollout: Rollout) -> np.ndarray:
    ones_R = np.ones(len(rollout.token_ids_R), np.bool_)
    return ones_R if rollout.loss_mask_R is None else rollout.loss_mask_R


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, casting="same_kind")


def _group_header(group: Group) -> dict[str, Any]:
    prompt = {**dataclasses.asdict(group.prompt), "token_ids_P": len(group.prompt.token_ids_P)}
    rollouts = [(len(r.token_ids_R), r.finish_reason, float(r.reward)) for r in group.rollouts]
    return {"prompt": prompt, "rollouts": rollouts}


def _batch(arrays: dict[str, np.ndarray]) -> StepBatch:
    header = json.loads(arrays["header"].tobytes())
    prompt_ids, token_ids = _Reader(arrays["prompt_ids"]), _Reader(arrays["token_ids"])
    log_probs, versions = _Reader(arrays["log_probs"]), _Reader(arrays["versions"])
    masks = _Reader(arrays["loss_masks"]) if "loss_masks" in arrays else None

    def rollout(length: int, finish_reason: Any, reward: float) -> Rollout:
        return Rollout(
            token_ids.take(length),
            log_probs.take(length),
            versions.take(length),
            finish_reason,
            reward,
            masks.take(length) if masks else None,
        )

    def group(prompt: dict[str, Any], rollouts: list[tuple[int, str, float]]) -> Group:
        ids = prompt_ids.take(prompt.pop("token_ids_P"))
        return Group(Prompt(token_ids_P=ids, **prompt), tuple(rollout(*one) for one in rollouts))

    return StepBatch(tuple(group(**one) for one in header["groups"]), header["metrics"])


class _Reader:
    """Takes an array apart again, in order."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self._at = 0

    def take(self, length: int) -> np.ndarray:
        self._at += length
        return self._array[self._at - length : self._at].copy()
