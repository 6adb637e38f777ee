"""Configuration sections of the outputs: checkpoints, evaluations, profiles, logs and hooks.

Frozen dataclasses, fields of ``RunConfig``; the docstring of a field is its text in ``--help``. Used by
``config/`` and ``run.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints: how often they are made, which are kept, which are exported."""

    every: Annotated[int, Ge(1)] = 10
    """Steps between checkpoints; the last step always has one."""
    keep_last: Annotated[int, Ge(0)] = 2
    """Newest checkpoints that are kept; older ones are deleted once a newer one is complete. 0 keeps all."""
    keep_every: Annotated[int | None, Ge(1)] = None
    """Steps between checkpoints that are never deleted, a multiple of `every`, nor the rollouts since the
    first of them. None: there are none."""
    keep_best: Annotated[int, Ge(0)] = 0
    """Checkpoints that are kept for the highest `eval/mean` of their weights (see `evaluation`)."""
    export_every: Annotated[int, Ge(0)] = 0
    """Steps between Hugging Face folders, exports/step_NNNNNN in the run directory, which a process of low
    priority makes of the checkpoint. A multiple of `every`; 0: only the export at the end of the run."""
    after_export: str | None = None
    """A command that runs for each complete export, such as an upload: {folder}, {step} and {name} (the
    run's) are replaced in it. It runs without a shell. Its failure is an event, and does not fail the run
    (docs/operations.md#commands-of-yours)."""
    after_export_minutes: Annotated[float, Gt(0)] = 60.0
    """Longest time of one such command; then it is killed, and counts as failed."""
    background: bool = True
    """Write in the background while training continues; meanwhile host memory holds a copy of the state."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation during training on held-out problems. Training waits for the answers."""

    every: Annotated[int, Ge(0)] = 0
    """Steps between evaluations; the weights that the run begins with are evaluated too. 0, and whenever
    `rollout.replay` leaves a run without engines: never."""
    suites: tuple[str, ...] = ()
    """Suites that `bapo data prepare` has written, by name, or files with the format of `data.path`."""
    samples: Annotated[int, Ge(1)] = 4
    """Responses to each problem."""
    temperature: Annotated[float | None, Ge(0)] = None
    """Sampling temperature. None: that of the rollouts."""
    max_response_tokens: Annotated[int | None, Ge(1)] = None
    """Longest response, in tokens. None: that of the rollouts."""


@dataclass(frozen=True)
class ProfileConfig:
    """Profiles of single steps, in profile/ of the run directory."""

    steps: tuple[int, ...] = ()
    """Steps whose updates and weight sync are traced by torch's profiler."""
    ranks: tuple[int, ...] = (0,)
    """Ranks that are traced."""
    memory: bool = False
    """Put allocations into the trace, and on a GPU write a memory snapshot."""


TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]


@dataclass(frozen=True)
class LoggingConfig:
    """Logging: trackers of metrics besides the files, targets of events, and a note for the report."""

    tensorboard: bool = True
    """Former way to leave TensorBoard out: False takes it from `trackers`."""
    wandb_project: str | None = None
    """Former way to log to Weights & Biases: adds `wandb` to `trackers`, and is the project of W&B alone."""
    on_event: tuple[str, ...] = ()
    """Targets to which the run's events are sent (done, stalled, failed, requeued, engine lost, ...):
    commands, which get them as JSON on standard input, http(s) URLs, such as a Slack webhook, or $NAME, an
    environment variable with one of them (docs/operations.md#commands-of-yours)."""
    stalled_minutes: Annotated[float | None, Gt(0)] = None
    """Silence (no step, evaluation or rollout) that is an event `stalled`. None: three times the longest of
    the last ten steps, at least ten minutes; an hour before the first step, and where an evaluation is
    due."""
    note: str = ""
    """Note on the run's purpose and limits for its readers. `bapo report` shows it first."""
    trackers: tuple[TrackerName, ...] = ("tensorboard",)
    """Boards that get the metrics of steps and evaluations: any of `tensorboard`, `wandb`, `trackio`,
    `mlflow`. The last three need their packages (extra `trackers`), and cannot slow or end the run."""
    catch_up_minutes: Annotated[float, Gt(0)] = 1.0
    """Longest wait at a run's end until W&B, trackio and MLflow have all rows; what is missing then is
    sent by the same command, given again. A preempted run waits ten seconds."""
    project: str = "bapo-megatron"
    """Project of W&B and trackio, experiment of MLflow. The run has its `name` there."""

    @property
    def chosen(self) -> tuple[TrackerName, ...]:
        """The chosen trackers, each once, including those of the former fields."""
        named = dict.fromkeys(self.trackers)
        if not self.tensorboard:
            named.pop("tensorboard", None)
        if self.wandb_project is not None:
            named["wandb"] = None
        return tuple(named)
