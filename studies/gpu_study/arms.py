"""Arms of the GPU study in run order, so that a shortened study has the first ones."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro
from annotated_types import Ge, Gt

from bapo_megatron.algo.bounds import BoundsConfig, fixed, grpo, paper
from bapo_megatron.algo.settings import out_of_range
from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.config.validation import raise_problems
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.jsonl_log import read_jsonl
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.trainer.records.metrics_log import evaluation_means

RECIPE = Path(__file__).with_name("recipe.py")
WARM_STEPS = 2
"""Warm-up steps at every staleness."""


@dataclass(frozen=True)
class Method:
    """A method: bounds, loss mean, passes over each batch, and mini-batches per pass."""

    label: str
    bounds: BoundsConfig
    loss_mean: str = "token"
    passes: int = 2
    parts: int = 4

    @property
    def staleness(self) -> int:
        """Updates per batch, as the paper counts staleness."""
        return self.passes * self.parts

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of `bapo train`; they set all fields of the bounds, whatever the recipe has."""
        bounds = asdict(self.bounds).items()
        return (
            *(f"--algorithm.bounds.{name.replace('_', '-')}={value}" for name, value in bounds),
            f"--algorithm.loss-mean={self.loss_mean}",
            f"--algorithm.reuse-epochs={self.passes}",
            f"--algorithm.updates-per-epoch={self.parts}",
            f"--optimizer.warmup-updates={WARM_STEPS * self.staleness}",
        )


ARMS = {
    "grpo-on-policy": Method("GRPO on-policy", grpo(), passes=1, parts=1),
    "grpo": Method("GRPO", grpo()),
    "grpo-sequence": Method("GRPO, sequence mean", grpo(), "sequence"),
    "fixed-0.9-1.2": Method("clip [0.9, 1.2]", fixed(0.9, 1.2)),
    "paper": Method("BAPO", paper()),
}


@dataclass(frozen=True)
class Arm:
    """The run of one method: its steps, folder and command."""

    name: str
    steps: int
    run_dir: Path
    command: tuple[str, ...]
    """Arguments of ``bapo``."""

    @property
    def method(self) -> Method:
        return ARMS[self.name]

    def is_done(self) -> bool:
        """Whether the last step's weights are evaluated and exported."""
        log = RunPaths(self.run_dir).events
        rows = read_jsonl(log) if log.exists() else []
        exported = any(row.get("kind") == "export" and row.get("step") == self.steps for row in rows)
        return exported and self.steps in evaluation_means(self.run_dir)


_SMALL = (
    *("--model.dtype=float32", "--rollout.engine=local", "--rollout.sglang.no-colocated"),
    *("--rollout.sglang.sync=disk", "--parallel.no-offload", "--rollout.max-batch=8"),
    *("--rollout.prompts-per-step=4", "--rollout.group-size=4", "--rollout.max-response-tokens=32"),
    *("--rollout.max-oversampling=1.0", "--rollout.no-drop-uniform-groups"),
    *("--optimizer.lr=3e-5", "--batch.pack-tokens=1024", "--reward.workers=1"),
)
"""Flags that make an arm small enough for a CPU, which shows only that the program runs."""


@dataclass(frozen=True)
class GpuStudyOptions:
    """Flags of `make gpu-study`: model, problems and arms."""

    model: Path
    """Folder of the model: Qwen2.5-0.5B-Instruct, or another one."""
    data: str = "reasoning-gym"
    """`reasoning-gym`, which needs no network, or `openai/gsm8k`, from the hub; or give `train` and
    `held_out`."""
    train: Path | None = None
    """File of problems that train, as `bapo data prepare` writes them."""
    held_out: Path | None = None
    """File of problems that are held out."""
    reward: str | None = None
    """The run's reward.function. None: that of `data`, if it is one of these."""
    folder: Path = Path("runs/gpu_study")
    """Folder of the arms; a study that is there is continued. With `small` its folder `small`."""
    arms: tuple[str, ...] = tuple(ARMS)
    """Which arms, by name."""
    steps: Annotated[int | None, Ge(1)] = None
    """Steps of each arm. None: the recipe's."""
    lr: Annotated[float | None, Gt(0)] = None
    """Peak learning rate. None: the recipe's, or that of `small`."""
    small: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """One-digit problems of reasoning-gym, small batches, the embedded engine and float32, for a CPU: to see
    that the program runs."""

    def check(self) -> None:
        """Raise ConfigError for invalid or conflicting flags."""
        raise_problems(list(out_of_range(self)))
        said = " ".join(self.arms)
        if not self.arms or set(self.arms) - ARMS.keys() or len(set(self.arms)) < len(self.arms):
            raise ConfigError(f"--arms {said}: name some of {' '.join(ARMS)}, each once")
        if (self.train is None) != (self.held_out is None):
            raise ConfigError("--train and --held-out belong together: give both, or --data")
        if self.train is None and self.data not in SOURCES:
            raise ConfigError(f"--data {self.data}: choose from {' '.join(SOURCES)}, or give --train")
        if self.reward is None and self.data not in SOURCES:
            raise ConfigError(f"--data {self.data} says no reward for --train: give --reward")
        if self.train is None and self.small and self.data != "reasoning-gym":
            raise ConfigError(f"--data {self.data}: --small has problems of its own; or give --train")
        if not (self.model / "config.json").is_file():
            raise ConfigError(f"--model {self.model}: no config.json there; name the model's folder")

    @property
    def home(self) -> Path:
        """Folder of the study's files; `small` has its own, apart from those of a real study."""
        return self.folder / "small" if self.small else self.folder

    @property
    def source(self) -> Source:
        """Reward, and problems if no files are set."""
        return _ONE_DIGIT if self.small and self.train is None else SOURCES[self.data]

    @property
    def files(self) -> tuple[Path, Path]:
        """Files of the training and the held-out problems."""
        if self.train is not None and self.held_out is not None:
            return self.train, self.held_out
        folder = self.home / "data" / self.data.replace("/", "-")
        return folder / "train/data.jsonl", folder / "held_out/data.jsonl"


Source = tuple[str, tuple[str, ...], tuple[str, ...]]
"""A reward, and arguments of `bapo data prepare` for training and held-out problems."""
_TASKS = "reasoning-gym:chain_sum,basic_arithmetic,simple_equations"
SOURCES: dict[str, Source] = {
    "reasoning-gym": ("reasoning_gym", (_TASKS, "--size=3000"), (_TASKS, "--size=500", "--seed=1")),
    "openai/gsm8k": (
        "math",
        ("openai/gsm8k:main", "--split=train"),
        ("openai/gsm8k:main", "--split=test"),
    ),
}
_PRODUCTS = (
    *("reasoning-gym:products", '--task-settings={"min_digits": 1, "max_digits": 1}'),
    "--system-prompt=Answer with the result only.",
)
_ONE_DIGIT: Source = ("reasoning_gym", (*_PRODUCTS, "--size=48"), (*_PRODUCTS, "--size=8", "--seed=1"))
"""Problems of `small`: SmolLM2-135M-Instruct answers a quarter of them, so rewards differ within groups."""


def prepare_commands(options: GpuStudyOptions) -> list[list[str]]:
    """Commands that prepare missing problems: held-out ones first, so that none is in both sets."""
    if options.train is not None:
        return []
    _, train, held_out = options.source
    common = [f"--tokenizer={options.model}", "--max-prompt-tokens=512"]
    train_file, held_file = options.files
    commands = []
    if not held_file.exists():
        commands.append(["data", "prepare", *held_out, *common, f"--output={held_file.parent}"])
    if not train_file.exists():
        against = ["--against", str(held_file)]
        commands.append(["data", "prepare", *train, *common, f"--output={train_file.parent}", *against])
    return commands


def make_arms(options: GpuStudyOptions) -> list[Arm]:
    """The selected arms, in their order."""
    base = load_recipe(RECIPE, RunConfig)
    return [_arm(options, base, name) for name in ARMS if name in options.arms]


def _arm(options: GpuStudyOptions, base: RunConfig, name: str) -> Arm:
    steps = options.steps or base.steps
    train, held_out = options.files
    run_dir = options.home / "arms" / name
    checkpoints = 1 if options.small or steps % 2 else 2
    flags = (
        *(f"--name={name}", f"--run-dir={run_dir}", f"--steps={steps}", f"--model.hf-path={options.model}"),
        *(f"--data.path={train}", f"--reward.function={options.reward or options.source[0]}"),
        *ARMS[name].flags,
        *(_SMALL if options.small else ()),
        *((f"--optimizer.lr={options.lr:g}",) if options.lr else ()),
        *(f"--checkpoint.every={steps // checkpoints}", f"--evaluation.every={steps}"),
        *("--evaluation.suites", str(held_out)),
    )
    return Arm(name, steps, run_dir, ("train", str(RECIPE), *flags))
