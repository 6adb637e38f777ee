"""What a run leaves behind: checkpoints, evaluations, logs. Part of config.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept for a continuation."""

    every: int = 10
    """Steps between checkpoints; the last step always has one."""
    keep_last: int = 2
    """Older ones are deleted once a newer one is whole; 0 keeps all."""
    keep_every: int | None = None
    """Those of every so many steps are kept for ever."""
    keep_best: int = 0
    """So many are kept whose weights have the highest `eval/mean` (see `evaluation`)."""
    export_every: int = 0
    """Steps between Hugging Face folders, exports/step_NNNNNN in the run directory, which a process of low
    priority makes of the checkpoint. A multiple of `every`; 0 for none but that of the run's end."""
    background: bool = True
    """Write while the training goes on. Meanwhile the machine's memory holds what is saved once more."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out problems, asked at the weights of every so many steps. The training waits for the answers."""

    every: int = 0
    """Steps between evaluations; the weights that the run begins with are evaluated too. 0, and whenever
    `rollout.replay` leaves a run without engines: never."""
    suites: tuple[str, ...] = ()
    """Suites that `bapo data prepare` has written, by name, or files with the format of `data.path`."""
    samples: int = 4
    """Responses to each problem."""
    temperature: float | None = None
    """None: that of the rollouts."""
    max_response_tokens: int | None = None
    """None: that of the rollouts."""


@dataclass(frozen=True)
class LoggingConfig:
    """Where metrics go besides metrics.jsonl and updates.jsonl."""

    tensorboard: bool = True
    """Event files in the run directory."""
    wandb_project: str | None = None
    """Weights & Biases project, if given and installed."""
