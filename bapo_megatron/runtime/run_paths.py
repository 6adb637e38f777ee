"""Paths of the files and folders in a run directory, except those within the journal: ``RunPaths(root)``.

``step_name`` and ``moment_of`` convert between steps and folder names; ``step_entries`` lists a folder's
steps. Nothing here creates or opens a file. ``slurm/lib/run_paths.sh`` mirrors the names that a job's shell
needs. Imports only the standard library, for the checkpoint tools and cluster commands.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

MANIFEST = "manifest.json"
"""Checkpoint file, written last: size and SHA-256 of every other file."""

TRAINER_STATE = "trainer.json"
"""Checkpoint file: state of the training loop."""

POLICY = "policy"
"""Checkpoint folder: model and optimizer (torch_dist)."""

CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints."""

JOB_END = "end_time"
"""File in a job start's logs: the job's end in seconds since 1970, once Slurm has moved it."""

_STEP_NAME = re.compile(r"step_(\d{6,})(?:_update_(\d{3,}))?")

_LEFT = (".tmp", ".deleted")
"""Suffixes of half-written and half-deleted folders."""

Moment = tuple[int, int]
"""Position of a checkpoint in a run: finished steps, and finished updates of the next step."""


def step_name(step: int, updates: int = 0) -> str:
    """Return the name of ``step``, or of ``updates`` of the step after it: `step_000120_update_003`."""
    return f"step_{step:06d}" + (f"_update_{updates:03d}" if updates else "")


def moment_of(name: str) -> Moment | None:
    """Return the moment (step, updates) of a name by ``step_name``; None for any other name."""
    match = _STEP_NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def step_entries(folder: Path, suffix: str = "") -> Iterator[tuple[Moment, Path]]:
    """Yield the files or folders of steps in ``folder`` whose names end with ``suffix``, unordered. Raises
    OSError if an existing folder cannot be listed: an empty one would mean a new run from step 1."""
    for name in _names(folder):
        if name.endswith(suffix) and (moment := moment_of(name.removesuffix(suffix))):
            yield moment, folder / name


def step_leftovers(folder: Path) -> Iterator[Path]:
    """Yield a killed process's leftovers in ``folder``: hidden, half-written or half-deleted step folders."""
    for name in _names(folder):
        if name.startswith(".step_") and name.endswith(_LEFT) and moment_of(name.split(".")[1]):
            yield folder / name


def _names(folder: Path) -> list[str]:
    """Return the names in ``folder``, [] if absent; unlike glob, raises if the folder is unreadable."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


class RunPaths:
    """Paths in the run directory ``root``, as attributes and methods. The directory need not exist; reads no
    file. Code takes all names from here; only ``slurm/launch.py``, which must not import the package, has its
    own ``logs``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock = root / ".lock"
        """Lock file of the run's only writer."""
        self.config = root / "config.json"
        """Resolved configuration, with the format version."""
        self.fork = root / "fork.json"
        """Checkpoint of another run at which this one started."""
        self.metrics = root / "metrics.jsonl"
        """Metrics of each step."""
        self.updates = root / "updates.jsonl"
        """Metrics of each update."""
        self.evaluations = root / "evaluations.jsonl"
        """Metrics of each evaluation during training."""
        self.events = root / "events.jsonl"
        """Event log: starts, checkpoints, failures, with UTC times."""
        self.tensorboard = root / "tensorboard"
        """TensorBoard event files."""
        self.wandb_id = root / "wandb_id"
        """The run's id at all trackers, named after the first one."""
        self.trackers = root / "trackers"
        """Data of trackers without a server."""
        self.journal = root / "journal"
        """The sampler's write-ahead log, and each step's batch."""
        self.weights = root / "weights"
        """Weights for the engines, as a Hugging Face folder."""
        self.checkpoints = root / CHECKPOINTS
        """Checkpoints, one folder each."""
        self.evaluation = root / "evaluation"
        """Responses to held-out problems, one file per evaluated step."""
        self.export = root / "export"
        """Final policy, as a Hugging Face folder."""
        self.step_exports = root / "exports"
        """Checkpoints as Hugging Face folders."""
        self.report = root / "report"
        """Page and plots of ``bapo report``."""
        self.comparison = root / "comparison"
        """Page and plots comparing this run, the first, with others."""
        self.profile = root / "profile"
        """Traces and memory snapshots of steps."""
        self.logs = root / "logs"
        """Logs of servers, and of Slurm jobs (JOB/RESTART/)."""
        self.agent_logs = root / "logs" / "agents"
        """Newest logs of agent programs, one per episode."""
        self.submitted_job = root / "logs" / "submitted.job"
        """Id of the last job from ``bapo submit``."""
        self.after_export = root / "after_export.json"
        """Exports with a successful ``checkpoint.after_export``."""
        self.on_event = root / "on_event.json"
        """Resume offset in events.jsonl of each ``logging.on_event`` target."""
        self.on_event_lock = self.logs / "on_event.lock"
        self.on_event_log = self.logs / "on_event.log"
        self.engines = root / "engines"
        """Addresses of a Slurm job's rollout servers, one file each."""
        self.slurm_state = root / "slurm.state"
        """State of the run's Slurm job, as name=value lines."""
        self.api_key = root / "api_key"
        """API key of the run's servers, readable only by its user."""
        self.stop = root / "stop"
        """Stop file: a Slurm job that finds it does not requeue itself."""

    def checkpoint(self, step: int, updates: int = 0) -> Path:
        """Return the checkpoint after ``step``, or after ``updates`` of the next step."""
        return self.checkpoints / step_name(step, updates)

    def evaluation_responses(self, step: int) -> Path:
        """Return the held-out responses at the weights of ``step``, JSON lines."""
        return self.evaluation / f"{step_name(step)}.jsonl"

    def step_export(self, step: int) -> Path:
        return self.step_exports / step_name(step)

    def profile_of(self, step: int, rank: int, kind: str) -> Path:
        """Return a rank's profile in ``step``; ``kind`` ends its name."""
        return self.profile / f"{step_name(step)}_rank_{rank}.{kind}"

    def after_export_log(self, name: str) -> Path:
        """Return the log of ``checkpoint.after_export`` for the export ``name``."""
        return self.logs / "after_export" / f"{name}.log"

    def tracker_log(self, name: str) -> Path:
        return self.logs / f"tracker-{name}.log"

    def server_log(self, number: int) -> Path:
        """Return the log of a rollout server started by the run."""
        return self.logs / f"server-{number}.log"
