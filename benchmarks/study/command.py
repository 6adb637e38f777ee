"""Command `bapo study`: `staleness`, the first study, `controller`, the second, and `real-model`, the third.

Runs the missing arms, then writes the document.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from bapo_megatron.checkpoint.run_directory import only_writer
from bapo_megatron.config.flags import parse_options
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import check_output_file, write_atomically
from benchmarks.study.forked_sampler import fork_first_sampler
from benchmarks.study.lives import Life, Main
from benchmarks.study.options import StudyOptions
from benchmarks.study.plan import Arm, StudyPlan, check_same_study, make_study_plan, store_plan
from benchmarks.study.results import store_results, stored_arms
from benchmarks.study.runner import Failure, log_of, run_arms

USAGE = (
    "usage: bapo study staleness [flags] (the first study), bapo study controller [flags] (the second: does "
    "BAPO help where its controller acts?), or bapo study real-model [flags] (the same question on a "
    "pretrained model); --help lists the flags"
)


def study_command(arguments: Sequence[str], main: Main) -> int:
    """Run the missing arms of a study, then write its document. ``main`` runs a ``bapo`` command.

    1 if an arm has failed, else 0. ConfigError for wrong flags; Preempted on SIGTERM, SIGUSR1 or Ctrl-C.
    """
    if arguments[:1] == ["controller"]:
        from benchmarks.study.controller.command import controller_command

        return controller_command(arguments[1:], main)
    if arguments[:1] == ["real-model"]:
        from benchmarks.study.real_model.command import real_model_command

        return real_model_command(arguments[1:], main)
    if arguments[:1] != ["staleness"]:
        if arguments and arguments[0] in ("-h", "--help"):
            print(USAGE)
            return 0
        raise ConfigError(USAGE)
    options = parse_options(StudyOptions, "bapo study staleness", arguments[1:]).resolved()
    plan = make_study_plan(options)
    stored = stored_arms(plan)
    if options.analyse:
        check_output_file("--write", options.document)
        check_same_study(plan)
        write_study(plan, [])
        return 0
    store_plan(plan)
    if stored:
        print(f"{len(stored)} arms have their results in {options.results}")
    with only_writer(options.folder):
        failures = run_missing([arm for arm in plan.arms if arm.name not in stored], options.parallel, main)
        write_study(plan, failures)
    if failures:
        names = ", ".join(failure.arm.name for failure in failures)
        print(f"failed: {names}; their logs lie beside them, the same command tries them again")
    return 1 if failures else 0


def run_missing(arms: Sequence[Arm], parallel: int, main: Main) -> list[Failure]:
    """Run the arms that are not done, each in a fork of this process, which has imported what they need.

    Without the import each arm would repeat it: 7 of the 28 CPU seconds of an arm of one step. Its sampler is
    forked as well.
    """
    import_module("bapo_megatron.train")
    fork_first_sampler()
    threads = max(1, (os.cpu_count() or 1) // parallel)

    def start(arm: Arm) -> Life:
        return Life(main, arm.command, Path(log_of(arm)), threads)

    return run_arms(arms, start, parallel, lambda text: print(text, flush=True))


def write_study(plan: StudyPlan, failures: Sequence[Failure]) -> None:
    """The document of the arms that are done, with its results and its pictures beside it.

    ConfigError if there are none.
    """
    from benchmarks.study.pages.document import document
    from benchmarks.study.pages.figures import draw_study

    records = store_results(plan)
    if not records:
        first = f" ({failures[0].arm.name}: {failures[0].reason})" if failures else ""
        raise ConfigError(f"no arm of the study in {plan.options.folder} is done: nothing to write{first}")
    path = plan.options.document
    folder = path.parent / "figures"
    drawn = draw_study(records, folder, path.stem)
    pictures = {f"figures/{name}": title for name, title in drawn.items()}
    write_atomically(path, document(plan, records, failures, pictures))
    print(f"{len(records)} of {len(plan.arms)} arms: {path}")
