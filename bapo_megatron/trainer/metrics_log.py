"""Where a run's metrics go: JSON lines (steps, updates, evaluations), TensorBoard and W&B when asked for."""

from __future__ import annotations

import uuid
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from bapo_megatron.config import LoggingConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.jsonl_log import JsonlLog, finite_json, read_jsonl
from bapo_megatron.runtime.storage import writing
from bapo_megatron.types import Metrics

EVALUATIONS = "evaluations.jsonl"
_WANDB_ID_FILE = "wandb_id"


def check_logging(logging: LoggingConfig) -> None:
    """Raise ConfigError when a logger that is asked for is not installed. Call before the run starts."""
    problems = []
    if logging.tensorboard and find_spec("tensorboard") is None:
        problems.append(
            "logging.tensorboard is on, but tensorboard is not installed: "
            "`pip install tensorboard`, or set it to False"
        )
    if logging.wandb_project is not None and find_spec("wandb") is None:
        problems.append(
            f"logging.wandb_project={logging.wandb_project} is set, but wandb is not installed: "
            "`pip install wandb`, or unset it"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def evaluation_means(run_dir: Path) -> dict[int, float]:
    """``eval/mean`` of the steps that were evaluated."""
    log = run_dir / EVALUATIONS
    rows = read_jsonl(log) if log.exists() else []
    return {row["step"]: row["eval/mean"] for row in rows}


class MetricsLog:
    """The metrics of one run. Steps count from 1; ``resume_step`` is the last that a checkpoint holds.

    A new run has ``resume_step`` 0. Lines of later steps, left by a run that died after its checkpoint,
    are dropped: they will be written again.
    """

    def __init__(
        self, run_dir: Path, logging: LoggingConfig, resume_step: int, run_config: dict[str, Any]
    ) -> None:
        self._steps = JsonlLog(run_dir / "metrics.jsonl")
        self._updates = JsonlLog(run_dir / "updates.jsonl")
        self._evaluations = JsonlLog(run_dir / EVALUATIONS)
        for log in (self._steps, self._updates, self._evaluations):
            log.rewind(resume_step)
        self._evaluated = evaluation_means(run_dir).keys()
        self._run_dir = run_dir
        self._boards = _boards(run_dir, logging, resume_step, run_config)

    def write_step(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of one step everywhere."""
        self._steps.append({"step": step, **metrics})
        self._show(step, metrics)

    def write_evaluation(self, step: int, metrics: Metrics) -> bool:
        """Write everywhere what the weights that ``step`` has made are worth; False if it is there."""
        if step in self._evaluated:
            return False
        self._evaluations.append({"step": step, **metrics})
        self._show(step, metrics)
        return True

    def _show(self, step: int, metrics: Metrics) -> None:
        numbers = {name: value for name, value in finite_json(metrics).items() if value is not None}
        for board in self._boards:
            with writing("what the boards show", self._run_dir):
                board.write(step, numbers)

    def write_update(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of one update of ``step``. Only to updates.jsonl: boards show steps."""
        self._updates.append({"step": step, **metrics})

    def close(self) -> None:
        """Flush and release everything."""
        self._steps.close()
        self._updates.close()
        self._evaluations.close()
        for board in self._boards:
            board.close()


class _Board(Protocol):
    """A viewer that is fed beside the files."""

    def write(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def _boards(
    run_dir: Path, logging: LoggingConfig, resume_step: int, run_config: dict[str, Any]
) -> list[_Board]:
    boards: list[_Board] = []
    if logging.tensorboard:
        boards.append(_TensorBoard(run_dir / "tensorboard", resume_step))
    if logging.wandb_project is not None:
        boards.append(_WandB(run_dir, logging.wandb_project, run_config))
    return boards


class _TensorBoard:
    """Event files. Tags are the metrics' names."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        # Imported here because it takes seconds.
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what earlier event files say of the steps to come.
        self._writer: Any = SummaryWriter(str(folder), purge_step=resume_step + 1)  # type: ignore[no-untyped-call]

    def write(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """One Weights & Biases run for all continuations of a run directory."""

    def __init__(self, run_dir: Path, project: str, run_config: dict[str, Any]) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=project,
            id=_wandb_id(run_dir),
            resume="allow",
            name=run_config.get("name"),
            config=run_config,
            dir=str(run_dir),
        )

    def write(self, step: int, metrics: dict[str, float]) -> None:
        # W&B keeps the first value that it got for a step. A continuation repeats those steps with the
        # same values, so nothing is lost.
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


def _wandb_id(run_dir: Path) -> str:
    """The id kept in the run directory, made up at the first call."""
    path = run_dir / _WANDB_ID_FILE
    if not path.exists():
        write_atomically(path, uuid.uuid4().hex)
    return path.read_text().strip()
