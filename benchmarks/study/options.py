"""Command-line flags of `bapo study staleness`, and their checks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from annotated_types import Ge, Gt

from bapo_megatron.algo.settings import out_of_range
from bapo_megatron.config.validation import raise_problems
from bapo_megatron.errors import ConfigError
from benchmarks.study.methods import BASELINE, METHODS, PASSES

RECIPE = Path(__file__).parents[2] / "recipes/demo_study.py"
"""Base recipe of the study: task, model, steps and learning rate."""
CALIBRATION_SEED = 100
"""First seed of a calibration; the study's own begin at 0, so that no seed serves both."""
QUICK_METHODS, QUICK_PASSES, QUICK_SEEDS = ("grpo", "paper", "fixed_0.9_1.2"), (1, 8), 2
CALIBRATION_SEEDS = 4


@dataclass(frozen=True)
class StudyOptions:
    """The flags of the study: what is run, where, and what is written."""

    folder: Path = Path("runs/study")
    """Folder of the arms; a study that is there is continued."""
    recipe: Path = RECIPE
    """Task, model, steps and learning rate of all arms."""
    seeds: Annotated[int, Ge(1)] = 12
    """Runs of each arm: seeds 0, 1, ..."""
    steps: Annotated[int | None, Ge(1)] = None
    """Steps of each arm. None: the recipe's."""
    lr: Annotated[float | None, Gt(0)] = None
    """Peak learning rate. None: the recipe's."""
    parallel: Annotated[int, Ge(1)] = 2
    """Arms that run at the same time."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Methods by name; docs/results.md lists them."""
    passes: tuple[int, ...] = PASSES
    """Passes over each batch, the paper's staleness: 1, 2, 4, 8. At 1 and 2 only grpo runs."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Three methods at 1 and 8 passes, two seeds, four minutes: to see the study work. Judges nothing."""
    calibrate: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """GRPO alone at this --lr, with seeds of its own (100, ...), in FOLDER/calibrate/lrRATE: the gates."""
    analyse: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Run nothing; write the document of the arms that are done, also while others run."""
    write: Path | None = None
    """Path of the document. None: FOLDER/study.md. Beside it lie its pictures, in figures/, and the results
    of all arms, as .jsonl: arms that stand there are not run again."""

    @property
    def document(self) -> Path:
        """Path of the document."""
        return self.write or self.folder / "study.md"

    @property
    def results(self) -> Path:
        """Path of the results of all arms, from which the document is computed."""
        return self.document.with_suffix(".jsonl")

    @property
    def seed_numbers(self) -> range:
        """The seeds of each arm."""
        first = CALIBRATION_SEED if self.calibrate else 0
        return range(first, first + self.seeds)

    def resolved(self) -> StudyOptions:
        """The options with ``quick`` and ``calibrate`` spelled out."""
        if self.calibrate:
            rate = f"lr{self.lr:g}" if self.lr else "recipe"
            return replace(
                self,
                folder=self.folder / "calibrate" / rate,
                methods=(BASELINE,),
                seeds=min(self.seeds, CALIBRATION_SEEDS),
            )
        if self.quick:
            seeds = min(self.seeds, QUICK_SEEDS)
            return replace(self, seeds=seeds, methods=QUICK_METHODS, passes=QUICK_PASSES)
        return self

    def check(self) -> None:
        """Raise ConfigError for what cannot be done."""
        raise_problems(list(out_of_range(self)))
        if self.quick and self.calibrate:
            raise ConfigError("--quick --calibrate: a calibration is small as it is; give one of them")
        known: dict[str, tuple[object, ...]] = {"methods": tuple(METHODS), "passes": PASSES}
        for name, allowed in known.items():
            given: tuple[object, ...] = getattr(self, name)
            said = " ".join(map(str, given))
            if [one for one in given if one not in allowed]:
                raise ConfigError(f"--{name} {said}: choose from {' '.join(map(str, allowed))}")
            if not given or len(set(given)) < len(given):
                raise ConfigError(f"--{name} {said}: name at least one, and each once")
        if self.write is not None and self.write.suffix != ".md":
            raise ConfigError(
                f"--write {self.write}: the document is Markdown; give it a name that ends in .md"
            )
