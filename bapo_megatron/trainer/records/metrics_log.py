"""The metrics log of a run: JSON lines (steps, updates, evaluations), and TensorBoard, W&B."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from bapo_megatron.config import LoggingConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.jsonl_log import JsonlLog, finite_json, read_jsonl
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.runtime.storage import writing
from bapo_megatron.types import Metrics

_SHOWN = "what the boards show"

_ThreadHook = Callable[[threading.ExceptHookArgs], object]


def check_logging(logging: LoggingConfig) -> None:
    """ConfigError if a configured logger is not installed. Call before the run starts."""
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
    """``eval/mean`` of each evaluated step of a run."""
    log = RunPaths(run_dir).evaluations
    rows = read_jsonl(log) if log.exists() else []
    return {row["step"]: row["eval/mean"] for row in rows}


class MetricsLog:
    """The metrics log of one run. Steps count from 1.

    ``resume_step``: the last step that the checkpoint holds; 0 for a new run. Lines of later steps, which a
    run wrote that died after its checkpoint, are dropped: they will be written again.
    """

    def __init__(
        self, run_dir: Path, logging: LoggingConfig, resume_step: int, run_config: dict[str, Any]
    ) -> None:
        paths = RunPaths(run_dir)
        self._steps = JsonlLog(paths.metrics)
        self._updates = JsonlLog(paths.updates)
        self._evaluations = JsonlLog(paths.evaluations)
        for log in (self._steps, self._updates, self._evaluations):
            log.rewind(resume_step)
        self._evaluated = evaluation_means(run_dir).keys()
        self._run_dir = run_dir
        with writing(_SHOWN, run_dir):
            self._boards = _boards(paths, logging, resume_step, run_config)

    def write_step(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of ``step`` to the files and the boards."""
        self._steps.append({"step": step, **metrics})
        self._show(step, metrics)

    def write_evaluation(self, step: int, metrics: Metrics) -> bool:
        """Write the evaluation of the weights after ``step``; False if it was written before."""
        if step in self._evaluated:
            return False
        self._evaluations.append({"step": step, **metrics})
        self._show(step, metrics)
        return True

    def _show(self, step: int, metrics: Metrics) -> None:
        numbers = {name: value for name, value in finite_json(metrics).items() if value is not None}
        for board in self._boards:
            with writing(_SHOWN, self._run_dir):
                board.write(step, numbers)

    def write_update(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of one update of ``step`` to updates.jsonl alone: boards show steps."""
        self._updates.append({"step": step, **metrics})

    def close(self) -> None:
        """Flush and release everything."""
        self._steps.close()
        self._updates.close()
        self._evaluations.close()
        for board in self._boards:
            board.close()


class _Board(Protocol):
    """A viewer of metrics beside the files."""

    def write(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def _boards(
    paths: RunPaths, logging: LoggingConfig, resume_step: int, run_config: dict[str, Any]
) -> list[_Board]:
    boards: list[_Board] = []
    if logging.tensorboard:
        boards.append(_TensorBoard(paths.tensorboard, resume_step))
    if logging.wandb_project is not None:
        boards.append(_WandB(paths, logging.wandb_project, run_config))
    return boards


class _TensorBoard:
    """TensorBoard's event files, with the metrics' names as tags."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        # Imported here because it takes seconds.
        from torch.utils.tensorboard import SummaryWriter

        threading.excepthook = _without_tensorboards(threading.excepthook)
        # purge_step hides what earlier event files say of the steps to come.
        self._writer: Any = SummaryWriter(str(folder), purge_step=resume_step + 1)  # type: ignore[no-untyped-call]

    def write(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _without_tensorboards(hook: _ThreadHook) -> _ThreadHook:
    """``hook`` for all threads but TensorBoard's, whose error the next write raises where it is handled."""

    def report(error: threading.ExceptHookArgs) -> None:
        if not type(error.thread).__module__.startswith("tensorboard."):
            hook(error)

    return report


class _WandB:
    """One Weights & Biases run for all resumes of a run directory."""

    def __init__(self, paths: RunPaths, project: str, run_config: dict[str, Any]) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=project,
            id=_wandb_id(paths.wandb_id),
            resume="allow",
            name=run_config.get("name"),
            config=run_config,
            dir=str(paths.root),
        )

    def write(self, step: int, metrics: dict[str, float]) -> None:
        # W&B keeps the first value of a step. A resumed run repeats steps with the same values.
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


def _wandb_id(path: Path) -> str:
    """The id that ``path`` holds; the first call makes it up."""
    if not path.exists():
        write_atomically(path, uuid.uuid4().hex)
    return path.read_text().strip()
