"""The paths in a run directory. Nothing else in Python spells these names; ``slurm/lib/run_paths.sh`` mirrors
those that a job's shell needs.

It imports the standard library alone: the checkpoint tools and the commands for a cluster use it, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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

_LEFT = (".tmp", ".deleted")
"""Ends of the names of folders that are half-written or half-deleted."""

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
    for path in folder.glob(f".step_*{suffix}"):
        if path.name.endswith(_LEFT) and moment_of(path.name.split(".")[1]):
            yield path


class RunPaths:
    """The paths in the run directory ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock = root / ".lock"
        """The file that the only writer holds locked."""
        self.config = root / "config.json"
        """The resolved configuration, with the format's version."""
        self.fork = root / "fork.json"
        """The checkpoint of another run that this one began at."""
        self.metrics = root / "metrics.jsonl"
        """The metrics of each step."""
        self.updates = root / "updates.jsonl"
        """The metrics of each update."""
        self.evaluations = root / "evaluations.jsonl"
        """The metrics of each evaluation during training."""
        self.events = root / "events.jsonl"
        """What happened to the run, with UTC times."""
        self.tensorboard = root / "tensorboard"
        """TensorBoard's event files."""
        self.wandb_id = root / "wandb_id"
        """The id of the run at all trackers; the first that had one was Weights & Biases."""
        self.trackers = root / "trackers"
        """How far the trackers are (NAME.json), and the data of those without a server."""
        self.journal = root / "journal"
        """The sampler's write-ahead log, and the batch of each step."""
        self.weights = root / "weights"
        """The weights that the engines load, as a Hugging Face folder."""
        self.checkpoints = root / CHECKPOINTS
        """The checkpoints, a folder each."""
        self.evaluation = root / "evaluation"
        """The responses to held-out problems, a file for each evaluated step."""
        self.export = root / "export"
        """The final policy, as a Hugging Face folder."""
        self.step_exports = root / "exports"
        """Checkpoints as Hugging Face folders."""
        self.report = root / "report"
        """The page and plots of ``bapo report``."""
        self.profile = root / "profile"
        """Traces and memory snapshots of steps."""
        self.logs = root / "logs"
        """Logs of servers, and of Slurm jobs (JOB/RESTART/)."""
        self.after_export = root / "after_export.json"
        """The exports that ``checkpoint.after_export`` has ended well for."""
        self.on_event = root / "on_event.json"
        """How far the events were sent to each target of ``logging.on_event``."""
        self.engines = root / "engines"
        """The addresses of a Slurm job's rollout servers, a file each."""
        self.slurm_state = root / "slurm.state"
        """The state of the run's Slurm job, as name=value lines."""
        self.api_key = root / "api_key"
        """The key that the run's servers ask for; its user alone reads it."""
        self.stop = root / "stop"
        """The file that asks a Slurm job not to come back."""

    def checkpoint(self, step: int, updates: int = 0) -> Path:
        """The checkpoint after ``step``, or after ``updates`` of the step after it."""
        return self.checkpoints / step_name(step, updates)

    def evaluation_responses(self, step: int) -> Path:
        """The responses to held-out problems at the weights of ``step``, as JSON lines."""
        return self.evaluation / f"{step_name(step)}.jsonl"

    def step_export(self, step: int) -> Path:
        """The Hugging Face folder of the checkpoint of ``step``."""
        return self.step_exports / step_name(step)

    def profile_of(self, step: int, rank: int, kind: str) -> Path:
        """A profile of a rank's part of ``step``: ``kind`` is the end of its name."""
        return self.profile / f"{step_name(step)}_rank_{rank}.{kind}"

    @property
    def on_event_lock(self) -> Path:
        """The file that the process that sends events holds locked."""
        return self.logs / "on_event.lock"

    @property
    def on_event_log(self) -> Path:
        """What the process that sends events, and its commands, print."""
        return self.logs / "on_event.log"

    def after_export_log(self, name: str) -> Path:
        """What ``checkpoint.after_export`` prints for the export ``name``."""
        return self.logs / "after_export" / f"{name}.log"

    def tracker_state(self, name: str) -> Path:
        """What the observer of the tracker ``name`` says of itself."""
        return self.trackers / f"{name}.json"

    def tracker_log(self, name: str) -> Path:
        """The log of the observer of the tracker ``name``."""
        return self.logs / f"tracker-{name}.log"

    def server_log(self, number: int) -> Path:
        """The log of a rollout server that the run started."""
        return self.logs / f"server-{number}.log"
