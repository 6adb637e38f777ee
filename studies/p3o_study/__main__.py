"""Program of the P3O study: runs the arms, several at a time, then writes studies/results/p3o_study.md.

    python -m studies.p3o_study --parallel 2      # continues after an interruption
    python -m studies.p3o_study --write           # only the page of finished arms

Arms are forked from a process with preloaded imports; those on the real model need `make real-model`, and
7 GB of memory each. Results: a line per finished arm in studies/results/p3o_study.jsonl. Exit code 1 if an
arm fails.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated

import tyro
from annotated_types import Ge

from bapo_megatron.config.flags import parse_options
from bapo_megatron.runtime.files import write_atomically
from studies.p3o_study.arms import CHAT, ROOT, SUMS, Arm, Line, arms, prepare_problems, prepare_task, run_arm
from studies.p3o_study.page import page

RESULTS = ROOT / "studies/results/p3o_study"
_POLL_S = 1.0


@dataclass(frozen=True)
class StudyOptions:
    """Flags of `python -m studies.p3o_study`."""

    folder: Path = Path("runs/p3o_study")
    """Folder of the task and the arms; a study that is there is continued."""
    parallel: Annotated[int, Ge(1)] = 2
    """Arms at a time, each with one thread."""
    write: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Run no arm: write results and page of those that are done."""


def main() -> int:
    """Run the missing arms, and write the page after each."""
    options = parse_options(StudyOptions, "python -m studies.p3o_study", sys.argv[1:])
    every = arms(options.folder.resolve())
    missing = (
        [] if options.write else [arm for arm in every if arm.name not in stored() and not arm.is_done()]
    )
    write(every)
    if missing:
        if any(arm.task == CHAT for arm in missing):
            prepare_problems()
        os.environ.update(STUDY_TASK=str(prepare_task(options.folder.resolve())), OMP_NUM_THREADS="1")
    failed = run_arms(missing, every, options.parallel)
    for arm in failed:
        print(f"failed: {arm.name}; its log is {arm.run_dir}.log; the same command tries it again")
    return 1 if failed else 0


def run_arms(missing: list[Arm], every: list[Arm], parallel: int) -> list[Arm]:
    """Run the ``missing`` arms in order, ``parallel`` at a time. Returns those that failed."""
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(["bapo_megatron.train", "bapo_megatron.trainer.build"])
    waiting, running, failed = list(missing), list[tuple[Arm, BaseProcess]](), list[Arm]()
    process: BaseProcess
    while waiting or running:
        while waiting and len(running) < parallel:
            arm = waiting.pop(0)
            process = forked.Process(target=run_arm, args=(arm,), name=arm.name)
            process.start()
            running.append((arm, process))
        time.sleep(_POLL_S)
        for arm, process in [pair for pair in running if not pair[1].is_alive()]:
            running.remove((arm, process))
            if process.exitcode or not arm.is_done():
                failed.append(arm)
            write(every)
            print(f"{arm.name}: exit code {process.exitcode}; {len(waiting) + len(running)} left", flush=True)
    return failed


def stored() -> dict[str, Line]:
    """Lines of the results, by arm."""
    path = RESULTS.with_suffix(".jsonl")
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    return {line["arm"]: line for line in map(json.loads, lines)}


def write(every: list[Arm]) -> None:
    """Write results and page of the finished arms."""
    lines = stored()
    lines |= {arm.name: arm.line() for arm in every if arm.name not in lines and arm.is_done()}
    done = [lines[arm.name] for arm in every if arm.name in lines]
    head = {"design": "p3o-1", "steps": SUMS.steps}
    write_atomically(RESULTS.with_suffix(".jsonl"), "".join(f"{json.dumps(one)}\n" for one in (head, *done)))
    write_atomically(RESULTS.with_suffix(".md"), page(done, len(every)))


if __name__ == "__main__":
    sys.exit(main())
