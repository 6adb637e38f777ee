"""The ``bapo`` command line: ``main``, the console script, and the table of its commands.

``main`` runs the command in ``sys.argv`` and exits with the code that ``run`` returns. ConfigError, Preempted
and RunStopped print one message and have exit codes of their own (``runtime/exit_codes.py``); any other error
prints its traceback and exits with 1. A command's module is imported only when the command runs.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from bapo_megatron.errors import ConfigError, Preempted, RunStopped
from bapo_megatron.runtime.device import prepare_device, set_default, silence_libraries
from bapo_megatron.runtime.exit_codes import exit_process, report_error
from bapo_megatron.runtime.garbage import collect_rarely

COMMANDS = {
    "train": "bapo_megatron.commands.train:train_command",
    "sft": "bapo_megatron.commands.train:sft_command",
    "report": "bapo_megatron.commands.report.page:report_command",
    "submit": "bapo_megatron.commands.cluster.submit:submit_command",
    "status": "bapo_megatron.commands.cluster.status:status_command",
    "logs": "bapo_megatron.commands.cluster.run_job:logs_command",
    "cancel": "bapo_megatron.commands.cluster.run_job:cancel_command",
    "rollout-server": "bapo_megatron.commands.train:rollout_server_command",
    "plan": "bapo_megatron.commands.plan:plan_command",
    "rehearse": "bapo_rehearsal.command:rehearse_command",
    "verify-parallel": "bapo_megatron.commands.train:verify_command",
    "data": "bapo_megatron.data.prepare.command:data_command",
    "eval": "bapo_megatron.evaluation.command:eval_command",
    "doctor": "bapo_megatron.commands.doctor.doctor:run_doctor",
}
"""Each command's function, ``module:name``, which takes the arguments and returns an exit code (None: 0)."""
# Names instead of imports: help must be fast, and processes that write checkpoints import this module again.

USAGE = """\
usage: bapo COMMAND ...

  train RECIPE [flags]   run or continue a recipe; flags override its fields (--help lists them)
                         --rollout-only: no trainer; --train-only [RUN]: no engines
                         --fork RUN[:STEP]: begin at a checkpoint of another run
  sft RECIPE [flags]     supervised warm start of a model, written as a Hugging Face folder
  report RUN [RUN ...] [--output DIR]
                         plots and one HTML page of a run, or of several compared: in
                         RUN/report, or in comparison of the first run
  submit RECIPE --cluster FILE [--dry-run] [--force] [--rehearse] [flags]
                         run a recipe as a Slurm job; --dry-run prints its script
  status RUN [--watch]   how a run is, on Slurm or here
  logs RUN [--follow] [--all]
                         the ends of its newest logs, of all ranks with --all
  cancel RUN [--now]     let a run save and stop; --now: at once
  rollout-server RECIPE [flags]
                         an SGLang server with the recipe's model and settings, in the foreground
  plan RECIPE [flags]    memory, traffic and speed on a kind of GPU; exit code 1 if it does not fit
  rehearse RECIPE [--all-ranks] [flags]
                         the recipe's real program, rank by rank, without GPU and weights: peak memory,
                         collectives, waits; exit code 1 if a rank fails or does not fit
  verify-parallel RECIPE [flags]
                         does the recipe's layout compute what a smaller one does?
  data prepare SOURCE ... --output DIR [flags]
                         a public dataset, checked, filtered and decontaminated, as one folder with a card
  eval CHECKPOINT --suite NAME,... [flags]
                         avg@n, pass@k, maj@n with intervals; continues where it stopped
  eval compare A B       two evaluations, problem by problem, with a p-value
  doctor [RECIPE] [--json]
                         what is installed and what is missing; exit code 1 if a run could not start
"""


REMOVED = {
    "study": "the studies are done, docs/results.md has their results; for their code `git checkout f6aa2582`"
}
"""Removed commands, each with the advice to print."""


def main() -> None:
    """Run the command in ``sys.argv`` and exit with its code."""
    collect_rarely()
    try:
        code = run(sys.argv[1:])
    except Exception:
        traceback.print_exc()
        code = 1
    exit_process(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code.

    0 done, 1 a plan or rehearsal does not fit or the doctor found a problem, 2 bad input, 3 the run cannot
    continue, 4 its file system failed, 85 stopped and saved, 130 interrupted, 128 + N a rank was killed by
    signal N. Other errors propagate. ``verify-parallel`` raises SystemExit(1) if a layout differs.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    try:
        if arguments[0] in REMOVED:
            raise ConfigError(f"bapo {arguments[0]} is gone: {REMOVED[arguments[0]]}")
        if arguments[0] not in COMMANDS:
            raise ConfigError(f"unknown command {arguments[0]!r}; there are {', '.join(COMMANDS)}")
        if arguments[0] == "data":
            set_default("HF_HUB_OFFLINE", "0")  # sources may be on the hub
        prepare_device()  # before anything imports torch, which reads these variables once
        silence_libraries()
        module, _, function = COMMANDS[arguments[0]].partition(":")
        code: int | None = getattr(import_module(module), function)(arguments[1:])
        return code or 0
    except (ConfigError, Preempted, RunStopped) as error:
        return report_error(error)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    main()
