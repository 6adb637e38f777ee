"""Command-line flags of `bapo study controller`, and their checks. Used in this folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from annotated_types import Ge

from bapo_megatron.algo.settings import out_of_range
from bapo_megatron.config.validation import raise_problems
from bapo_megatron.errors import ConfigError
from benchmarks.study.options import StudyOptions

RECIPE = Path(__file__).with_name("recipe.py")
_QUICK_SEEDS, _QUICK_STEPS = 1, 4


@dataclass(frozen=True)
class ControllerOptions(StudyOptions):
    """The flags of the second study: what is run, where, and what is written."""

    folder: Path = Path("runs/controller")
    """Folder of the arms; a study that is there is continued."""
    recipe: Path = RECIPE
    """Task, model, steps and learning rate of all arms."""
    seeds: Annotated[int, Ge(1)] = 12
    """Runs of each arm of the study itself: seeds 0, 1, ..."""
    methods: tyro.conf.Suppress[tuple[str, ...]] = ()
    passes: tyro.conf.Suppress[tuple[int, ...]] = ()
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Three arms of four steps: to see the study work. Judges nothing."""
    calibrate: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """The calibration alone: the arms of the gates, with seeds of their own, at this --lr."""

    def resolved(self) -> ControllerOptions:
        """The options with ``quick`` spelled out; its arms lie in a folder of their own."""
        if not self.quick:
            return self
        return replace(
            self,
            folder=self.folder / "quick",
            seeds=min(self.seeds, _QUICK_SEEDS),
            steps=self.steps or _QUICK_STEPS,
        )

    def check(self) -> None:
        """Raise ConfigError for what cannot be done."""
        raise_problems(list(out_of_range(self)))
        if self.quick and self.calibrate:
            raise ConfigError("--quick --calibrate: a calibration has all its arms; give one of them")
        if self.write is not None and self.write.suffix != ".md":
            raise ConfigError(
                f"--write {self.write}: the document is Markdown; give it a name that ends in .md"
            )
