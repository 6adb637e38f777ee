"""The flags of `bapo study staleness`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from annotated_types import Ge, Gt

from bapo_megatron.config.validation import out_of_range, raise_problems
from bapo_megatron.errors import ConfigError
from benchmarks.study.methods import METHODS, SETTINGS

RECIPE = Path(__file__).parents[2] / "recipes/demo_study.py"
QUICK_STEPS, QUICK_SEEDS = 6, 2


@dataclass(frozen=True)
class StudyOptions:
    """The flags of the study: what is run, where, and what is written."""

    folder: Path = Path("runs/study")
    """Folder of the arms; a study that is there is continued."""
    recipe: Path = RECIPE
    """Task, model and learning rate of all arms."""
    seeds: Annotated[int, Ge(1)] = 5
    """Runs of each arm: seeds 0, 1, ..."""
    steps: Annotated[int | None, Ge(1)] = None
    """Steps of each arm. None: the recipe's."""
    lr: Annotated[float | None, Gt(0)] = None
    """Peak learning rate. None: the recipe's."""
    parallel: Annotated[int, Ge(1)] = 2
    """Arms that run at the same time."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Methods: grpo, clip_higher, paper, balanced, balanced_half, published_code, papo_grpo, papo."""
    settings: tuple[str, ...] = tuple(SETTINGS)
    """Staleness settings: fresh, stale_3, stale_7, stale_15, partial, fresh_matched."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Only grpo and balanced, fresh and stale_7, two seeds of six steps: to see that it works."""
    analyse: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Run nothing; write the document of the arms that are done, also while others run."""
    write: Path | None = None
    """Path of the document. None: FOLDER/study.md. Its pictures lie beside it, in figures/."""

    @property
    def document(self) -> Path:
        """Path of the document."""
        return self.write or self.folder / "study.md"

    def resolved(self) -> StudyOptions:
        """The options with ``quick`` spelled out."""
        if not self.quick:
            return self
        return replace(
            self,
            seeds=min(self.seeds, QUICK_SEEDS),
            steps=self.steps or QUICK_STEPS,
            methods=("grpo", "balanced"),
            settings=("fresh", "stale_7"),
        )

    def check(self) -> None:
        """Raise ConfigError for what cannot be done."""
        raise_problems(list(out_of_range(self)))
        for name, known in (("methods", METHODS), ("settings", SETTINGS)):
            given: tuple[str, ...] = getattr(self, name)
            if unknown := [one for one in given if one not in known]:
                raise ConfigError(f"--{name} {' '.join(unknown)}: choose from {' '.join(known)}")
            if not given or len(set(given)) < len(given):
                raise ConfigError(f"--{name} {' '.join(given)}: name at least one, and each once")
        if self.write is not None and self.write.suffix != ".md":
            raise ConfigError(
                f"--write {self.write}: the document is Markdown; give it a name that ends in .md"
            )
