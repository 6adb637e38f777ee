"""Command `bapo study controller`: calibration, rates, study; each stage runs the arms that it lacks.

Used by ``benchmarks/study/command.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from bapo_megatron.checkpoint.run_directory import only_writer
from bapo_megatron.config.flags import parse_options
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import check_output_file, write_atomically
from benchmarks.study.command import run_missing
from benchmarks.study.controller.arms import (
    base_of,
    calibration_arms,
    main_arms,
    make_plan,
    quick_arms,
    rate_arms,
)
from benchmarks.study.controller.gates import CHANCE, MARGIN, Calibration, calibrated
from benchmarks.study.controller.options import ControllerOptions
from benchmarks.study.controller.page import Progress, page, picture_of
from benchmarks.study.controller.verdicts import chosen_rates
from benchmarks.study.lives import Main
from benchmarks.study.measures import ArmRecord
from benchmarks.study.plan import Arm, check_same_study, store_plan
from benchmarks.study.results import read_results, store_results, stored_arms
from benchmarks.study.runner import Failure


def controller_command(arguments: Sequence[str], main: Main) -> int:
    """Run the stages of the study as far as they may go, and write its page; ``main`` runs ``bapo``.

    The page is written before the first arm runs, with the design alone, and after each stage. 1 if an arm
    has failed, else 0. ConfigError for wrong flags, and where the calibration does not allow the study;
    Preempted on a stop signal.
    """
    options = parse_options(ControllerOptions, "bapo study controller", arguments).resolved()
    options.check()
    study = _Study(options, main)
    if options.analyse:
        study.analyse()
        return 0
    store_plan(make_plan(options, study.all_arms()))
    with only_writer(options.folder):
        study.write()
        return study.run()


class _Study:
    """The stages of one study. Made by ``controller_command``."""

    def __init__(self, options: ControllerOptions, main: Main) -> None:
        self._options, self._main = options, main
        self._base = base_of(options)
        self._failures: list[Failure] = []

    def all_arms(self) -> list[Arm]:
        """All arms that are known: those of the study itself only once the rates are chosen."""
        if self._options.quick:
            return quick_arms(self._options, self._base)
        arms = calibration_arms(self._options, self._base)
        if self._options.calibrate:
            return arms
        arms += rate_arms(self._options, self._base)
        chosen = self._chosen()
        return arms + (main_arms(self._options, self._base, chosen) if chosen else [])

    def run(self) -> int:
        """Run the stages; 1 if an arm has failed: the next stage would choose without it."""
        if self._options.quick:
            return self._stage("quick", quick_arms(self._options, self._base))
        if self._stage("calibration", calibration_arms(self._options, self._base)):
            return 1
        if self._options.calibrate:
            return 0
        _check_sound(self._calibration(), self._options)
        if self._stage("rates", rate_arms(self._options, self._base)):
            return 1
        chosen = self._chosen()
        assert chosen is not None  # no arm of the stage has failed
        return self._stage("study", main_arms(self._options, self._base, chosen))

    def analyse(self) -> None:
        """Store the results of the arms that are done, and write the page; run nothing."""
        check_output_file("--write", self._options.document)
        plan = make_plan(self._options, self.all_arms())
        check_same_study(plan)
        store_results(plan)
        self.write()

    def write(self) -> None:
        """The page of the arms that are done."""
        progress = Progress(
            self._records(self.all_arms()),
            tuple(self._failures),
            len(self.all_arms()),
            self._calibration(),
            self._chosen(),
        )
        write_atomically(self._options.document, page(self._options, self._base, progress))
        self._draw(progress)
        print(f"{len(progress.records)} of {progress.arms} known arms: {self._options.document}", flush=True)

    def _draw(self, progress: Progress) -> None:
        """The picture beside the page, once the study has arms of its own."""
        if progress.chosen is None or not progress.own:
            return
        from benchmarks.study.controller.picture import draw

        draw(progress.own, progress.chosen, picture_of(self._options))

    def _stage(self, name: str, arms: list[Arm]) -> int:
        plan = make_plan(self._options, arms)
        store_plan(plan)
        stored = stored_arms(plan)
        print(f"stage: {name}", flush=True)
        missing = [arm for arm in arms if arm.name not in stored]
        self._failures = run_missing(missing, self._options.parallel, self._main)
        store_results(plan)
        self.write()
        for failure in self._failures:
            print(f"failed: {failure.arm.name}, {failure.reason}; the same command tries it again")
        return 1 if self._failures else 0

    def _records(self, arms: list[Arm]) -> list[ArmRecord]:
        return read_results(make_plan(self._options, arms)) if arms else []

    def _calibration(self) -> Calibration:
        records = self._records(calibration_arms(self._options, self._base))
        return calibrated(records, self._options.seeds)

    def _chosen(self) -> dict[str, float] | None:
        return chosen_rates(self._records(rate_arms(self._options, self._base)))


def _check_sound(calibration: Calibration, options: ControllerOptions) -> None:
    """ConfigError unless the calibration gives the study its chance."""
    if calibration.is_sound:
        return
    narrow = "; ".join(f"{one.gate.text}: {one.shown}, {one.gate.range}" for one in calibration.narrow)
    raise ConfigError(
        f"the study does not begin: by its calibration all gates would hold with a chance of "
        f"{calibration.chance:.2f}, and {CHANCE:g} is asked for"
        + (f"; narrower than {MARGIN:g} standard errors, or failed: {narrow}" if narrow else "")
        + f". Calibrate another learning rate (--calibrate --lr RATE --folder {options.folder}-RATE), then "
        "run the study with it"
    )
