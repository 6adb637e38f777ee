"""Paths of a run directory: what its files and folders are called, but for those within the journal.

Modules ask here instead of spelling the names. Nothing here creates or opens a file.
``slurm/lib/run_paths.sh`` mirrors the names that a job's shell needs. Only the standard library is imported:
the checkpoint tools and the commands for a cluster use it, too.
"""

from __future__ import annotations

import os
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

JOB_END = "end_time"
"""File in the logs of a job's start: the job's end in seconds since 1970, once Slurm has moved it."""

_STEP_NAME = re.compile(r"step_(\d{6,})(?:_update_(\d{3,}))?")

_LEFT = (".tmp", ".deleted")
"""Suffixes of half-written and half-deleted folders."""

Moment = tuple[int, int]
"""Position of a checkpoint in a run: finished steps, and finished updates of the next step."""


def step_name(step: int, updates: int = 0) -> str:
    """File or folder name of ``step``, or of ``updates`` of the step after it: `step_000120_update_003`."""
    return f"step_{step:06d}" + (f"_update_{updates:03d}" if updates else "")


def moment_of(name: str) -> Moment | None:
    """Inverse of ``step_name``: the moment (step, updates) of a name; None for any other name."""
    match = _STEP_NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def step_entries(folder: Path, suffix: str = "") -> Iterator[tuple[Moment, Path]]:
    """Files or folders of steps in ``folder`` whose names end with ``suffix``, unordered.

    OSError if the folder is there and cannot be listed: that it has none would be a new run, from step 1.
    """
    for name in _names(folder):
        if name.endswith(suffix) and (moment := moment_of(name.removesuffix(suffix))):
            yield moment, folder / name


def step_leftovers(folder: Path, suffix: str = "") -> Iterator[Path]:
    """Leftovers of a killed process in ``folder``: hidden, half-written or half-deleted folders of steps."""
    for name in _names(folder):
        is_left = name.startswith(".step_") and name.endswith(_LEFT) and name.endswith(suffix)
        if is_left and moment_of(name.split(".")[1]):
            yield folder / name


def _names(folder: Path) -> list[str]:
    """Names in ``folder``; none if it is absent. pathlib's glob finds none where it may not look, either."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


class RunPaths:
    """Paths of the files and folders of the run directory ``root``, which need not exist. Reads no file.

    Made by whatever in this package reads or writes a run, in place of spelled names; ``slurm/launch.py``,
    which must not import it, spells ``logs`` itself.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock = root / ".lock"
        """The lock file of the run's only writer."""
        self.config = root / "config.json"
        """The resolved configuration, with the format's version."""
        self.fork = root / "fork.json"
        """The checkpoint of another run that this one began at."""
        self.reference = root / "reference.json"
        """The model of the frozen reference policy, with the digest of its weights."""
        self.metrics = root / "metrics.jsonl"
        """The metrics of each step."""
        self.updates = root / "updates.jsonl"
        """The metrics of each update."""
        self.evaluations = root / "evaluations.jsonl"
        """The metrics of each evaluation during training."""
        self.events = root / "events.jsonl"
        """The event log: starts, checkpoints, failures, with UTC times."""
        self.tensorboard = root / "tensorboard"
        """TensorBoard's event files."""
        self.wandb_id = root / "wandb_id"
        """The id of the run at all trackers, under the name of the first one that had it."""
        self.trackers = root / "trackers"
        """The data of trackers without a server."""
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
        self.comparison = root / "comparison"
        """Those of several runs, of which this is the first."""
        self.profile = root / "profile"
        """Traces and memory snapshots of steps."""
        self.logs = root / "logs"
        """Logs of servers, and of Slurm jobs (JOB/RESTART/)."""
        self.agent_logs = root / "logs" / "agents"
        """The logs of agent programs, one for an episode, the newest."""
        self.submitted_job = root / "logs" / "submitted.job"
        """The id of the last job that ``bapo submit`` has submitted."""
        self.after_export = root / "after_export.json"
        """The exports for which ``checkpoint.after_export`` has succeeded."""
        self.on_event = root / "on_event.json"
        """The resume offset in events.jsonl of each target of ``logging.on_event``."""
        self.engines = root / "engines"
        """The addresses of a Slurm job's rollout servers, a file each."""
        self.slurm_state = root / "slurm.state"
        """The state of the run's Slurm job, as name=value lines."""
        self.api_key = root / "api_key"
        """The API key of the run's servers, readable by its user alone."""
        self.stop = root / "stop"
        """The stop file: a Slurm job that finds it does not requeue itself."""

    def checkpoint(self, step: int, updates: int = 0) -> Path:
        """The checkpoint after ``step``, or after ``updates`` of the step after it."""
        return self.checkpoints / step_name(step, updates)

    def evaluation_responses(self, step: int) -> Path:
        """The responses to held-out problems at the weights of ``step``, as JSON lines."""
        return self.evaluation / f"{step_name(step)}.jsonl"

    def step_export(self, step: int) -> Path:
        return self.step_exports / step_name(step)

    def profile_of(self, step: int, rank: int, kind: str) -> Path:
        """The profile of a rank in ``step``; ``kind`` is the end of its name."""
        return self.profile / f"{step_name(step)}_rank_{rank}.{kind}"

    @property
    def on_event_lock(self) -> Path:
        return self.logs / "on_event.lock"

    @property
    def on_event_log(self) -> Path:
        return self.logs / "on_event.log"

    def after_export_log(self, name: str) -> Path:
        """The log of ``checkpoint.after_export`` for the export ``name``."""
        return self.logs / "after_export" / f"{name}.log"

    def tracker_log(self, name: str) -> Path:
        return self.logs / f"tracker-{name}.log"

    def server_log(self, number: int) -> Path:
        """The log of a rollout server that the run started."""
        return self.logs / f"server-{number}.log"
