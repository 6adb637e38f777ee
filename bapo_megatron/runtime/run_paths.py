"""The paths in a run directory. Nothing else in Python spells these names; ``slurm/lib/run_paths.sh`` mirrors
those that a job's shell needs.

It imports the standard library alone: the checkpoint tools and the commands for a cluster use it, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MANIFEST = "manifest.json"
"""File of a checkpoint that is written last: size and SHA-256 of every other file."""

TRAINER_STATE = "trainer.json"
"""File of a checkpoint: the state of the training loop."""

POLICY = "policy"
"""Folder of a checkpoint: the model and the optimizer (torch_dist)."""

CHECKPOINTS = "checkpoints"
"""Folder of a run directory: its checkpoints."""

_STEP_NAME = re.compile(r"step_(\d{6,})(?:_update_(\d{3,}))?")

Moment = tuple[int, int]
"""A point of a run: the steps that are finished, and the updates that are made of the step after them."""


def step_name(step: int, updates: int = 0) -> str:
    """The name, without a suffix, of what belongs to ``step``, or to ``updates`` of the step after it."""
    return f"step_{step:06d}" + (f"_update_{updates:03d}" if updates else "")


def moment_of(name: str) -> Moment | None:
    """The moment that ``step_name`` wrote into a name; None if the name is another one."""
    match = _STEP_NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def step_entries(folder: Path, suffix: str = "") -> Iterator[tuple[Moment, Path]]:
    """Files or folders of steps in ``folder`` whose names end with ``suffix``, in no order."""
    for path in folder.glob(f"step_*{suffix}"):
        if moment := moment_of(path.name.removesuffix(suffix)):
            yield moment, path


def step_leftovers(folder: Path, suffix: str = "") -> Iterator[Path]:
    """Hidden folders of steps in ``folder``, which a process that died left half-written or half-deleted."""
    return folder.glob(f".step_*{suffix}")


@dataclass(frozen=True)
class RunPaths:
    """The paths in the run directory ``root``."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved configuration, with the format's version."""
        return self.root / "config.json"

    @property
    def lock(self) -> Path:
        """The file that the only writer holds locked."""
        return self.root / ".lock"

    @property
    def metrics(self) -> Path:
        """The metrics of each step, as JSON lines."""
        return self.root / "metrics.jsonl"

    @property
    def updates(self) -> Path:
        """The metrics of each update, as JSON lines."""
        return self.root / "updates.jsonl"

    @property
    def evaluations(self) -> Path:
        """The metrics of each evaluation during training, as JSON lines."""
        return self.root / "evaluations.jsonl"

    @property
    def events(self) -> Path:
        """What happened to the run, with UTC times, as JSON lines."""
        return self.root / "events.jsonl"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.root / "tensorboard"

    @property
    def wandb_id(self) -> Path:
        """The id of the Weights & Biases run."""
        return self.root / "wandb_id"

    @property
    def journal(self) -> Path:
        """The sampler's write-ahead log and the batch of each step."""
        return self.root / "journal"

    @property
    def weights(self) -> Path:
        """The Hugging Face folder of the weights that the engines load."""
        return self.root / "weights"

    @property
    def checkpoints(self) -> Path:
        """The checkpoints, a folder each."""
        return self.root / CHECKPOINTS

    def checkpoint(self, step: int, updates: int = 0) -> Path:
        """The checkpoint after ``step``, or after ``updates`` of the step after it."""
        return self.checkpoints / step_name(step, updates)

    @property
    def evaluation(self) -> Path:
        """The responses to held-out problems, a file for each evaluated step."""
        return self.root / "evaluation"

    def evaluation_responses(self, step: int) -> Path:
        """The responses to held-out problems at the weights of ``step``, as JSON lines."""
        return self.evaluation / f"{step_name(step)}.jsonl"

    @property
    def export(self) -> Path:
        """The Hugging Face folder of the final policy."""
        return self.root / "export"

    @property
    def step_exports(self) -> Path:
        """The Hugging Face folders of checkpoints."""
        return self.root / "exports"

    def step_export(self, step: int) -> Path:
        """The Hugging Face folder of the checkpoint of ``step``."""
        return self.step_exports / step_name(step)

    @property
    def report(self) -> Path:
        """The page and pictures of ``bapo report``."""
        return self.root / "report"

    @property
    def logs(self) -> Path:
        """Logs of servers, and of Slurm jobs (JOB/RESTART/)."""
        return self.root / "logs"

    def server_log(self, number: int) -> Path:
        """The log of a rollout server that the run started."""
        return self.logs / f"server-{number}.log"

    @property
    def engines(self) -> Path:
        """The addresses of a Slurm job's rollout servers, a file each."""
        return self.root / "engines"

    @property
    def slurm_state(self) -> Path:
        """The state of the run's Slurm job, as name=value lines."""
        return self.root / "slurm.state"

    @property
    def stop(self) -> Path:
        """The file that asks a Slurm job not to come back."""
        return self.root / "stop"
