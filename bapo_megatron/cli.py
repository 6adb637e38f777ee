"""The ``bapo`` command. Imports stay inside the commands: help must answer at once, and processes that
write checkpoints import this module again."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from bapo_megatron.errors import ConfigError, Preempted, RunStopped
from bapo_megatron.runtime.exit_codes import end_with

if TYPE_CHECKING:
    from bapo_megatron.commands.verify.check import VerifyConfig
    from bapo_megatron.config import RunConfig, SftConfig

C = TypeVar("C")

USAGE = """\
usage: bapo COMMAND ...

  train RECIPE [flags]   run or continue a recipe; flags override its fields (--help lists them)
  sft RECIPE [flags]     supervised warm start of a model, written as a Hugging Face folder
  report RUN [RUN ...] [--output DIR]
                         plots and one HTML page of a run, or of several compared
  submit RECIPE --cluster FILE [--dry-run] [--force] [flags]
                         run a recipe as a Slurm job; --dry-run prints its script
  status RUN [--watch]   how a run is, on Slurm or here
  logs RUN [--follow] [--all]
                         the ends of its newest logs, of all ranks with --all
  cancel RUN [--now]     let a run save and stop; --now: at once
  rollout-server RECIPE [flags]
                         an SGLang server with the recipe's model and settings, in the foreground
  plan RECIPE [flags]    memory, traffic and speed on a kind of GPU; exit code 1 if it does not fit
  verify-parallel RECIPE [flags]
                         does the recipe's layout compute what a smaller one does?
  data prepare SOURCE ... --output DIR [flags]
                         a public dataset, checked, filtered and decontaminated, as one folder with a card
  eval CHECKPOINT --suite NAME,... [flags]
                         avg@n, pass@k, maj@n with intervals; goes on where it stopped
  eval compare A B       two evaluations, problem by problem, with a p-value
  study staleness [flags]
                         the paper's claims about stale data, tried with small runs; goes on where it stopped
  doctor [RECIPE] [--json]
                         what is installed and what is missing; exit code 1 if a run could not start
"""


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command.

    The exit code: 0 done, 1 the plan does not fit or the doctor has found a problem, 2 bad input,
    3 the run cannot go on now, 4 its file system fails, 85 it was told to stop and is saved, 130 interrupted,
    128 + N a rank was killed by signal N; other errors propagate.
    ``verify-parallel`` ends with SystemExit(1) where a layout differs.
    """
    commands: dict[str, Callable[[Sequence[str]], int | None]] = {
        "train": _train,
        "sft": _sft,
        "report": _report,
        "rollout-server": _rollout_server,
        "plan": _plan,
        "verify-parallel": _verify_parallel,
        "data": _data,
        "eval": _eval,
        "study": _study,
        "doctor": _doctor,
        "submit": _on_cluster("submit"),
        "status": _on_cluster("status"),
        "logs": _on_cluster("logs"),
        "cancel": _on_cluster("cancel"),
    }
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    try:
        if arguments[0] not in commands:
            raise ConfigError(f"unknown command {arguments[0]!r}; there are {', '.join(commands)}")
        if arguments[0] == "data":
            os.environ.setdefault("HF_HUB_OFFLINE", "0")  # its sources may be on the hub
        _quiet()
        return commands[arguments[0]](arguments[1:]) or 0
    except (ConfigError, Preempted, RunStopped) as error:
        return end_with(error)
    except KeyboardInterrupt:
        print(
            "\nstopped; the same command continues from its last checkpoint, if it has one", file=sys.stderr
        )
        return 130


def _train(arguments: Sequence[str]) -> None:
    from bapo_megatron.checkpoint.run_directory import check_writable
    from bapo_megatron.config import RunConfig
    from bapo_megatron.policy.layout import data_parallel_size
    from bapo_megatron.runtime.distributed import launched_world_size, run_processes
    from bapo_megatron.trainer.preflight import check_run

    config = _configured("train", RunConfig, arguments)
    launched = launched_world_size()
    first = launched is None or os.environ["RANK"] == "0"
    data = data_parallel_size(config.parallel, launched)
    check_run(config, read_dataset=first)
    check_writable(config.directory)
    if launched is not None:
        train_process(config)
    else:
        run_processes(train_process, (config,), data * config.parallel.model_size)


def train_process(config: RunConfig) -> None:
    """One rank of a training run, from its process group to its end."""
    from contextlib import nullcontext

    from bapo_megatron.checkpoint.run_directory import only_writer
    from bapo_megatron.commands.finish import finish
    from bapo_megatron.policy.layout import parallel_processes
    from bapo_megatron.runtime.distributed import is_main
    from bapo_megatron.runtime.out_of_memory import naming_memory
    from bapo_megatron.runtime.preemption import PreemptionSignal
    from bapo_megatron.runtime.storage import writing
    from bapo_megatron.train import train
    from bapo_megatron.trainer.build import open_run

    _quiet()
    preemption = PreemptionSignal()
    with (
        preemption.heeding(),
        naming_memory(),
        writing("a file of the run, or its output,", config.directory),
        parallel_processes(config.parallel),
        only_writer(config.directory) if is_main() else nullcontext(),
        open_run(config, preemption) as run,
    ):
        train(run)
        finish(run)


def _sft(arguments: Sequence[str]) -> None:
    from bapo_megatron.config import SftConfig
    from bapo_megatron.policy.layout import data_parallel_size
    from bapo_megatron.runtime.distributed import launched_world_size, run_processes
    from bapo_megatron.trainer.preflight import check_sft

    config = _configured("sft", SftConfig, arguments)
    launched = launched_world_size()
    data = data_parallel_size(config.parallel, launched)
    check_sft(config)
    if launched is not None:
        sft_process(config)
    else:
        run_processes(sft_process, (config,), data * config.parallel.model_size)


def sft_process(config: SftConfig) -> None:
    """One rank of a warm start."""
    from bapo_megatron.policy.layout import parallel_processes
    from bapo_megatron.runtime.storage import writing
    from bapo_megatron.trainer.sft import run_sft

    _quiet()
    with writing("the model", config.output), parallel_processes(config.parallel):
        run_sft(config)


def _report(arguments: Sequence[str]) -> None:
    from bapo_megatron.commands.report.page import report_command

    print(report_command(arguments))


def _rollout_server(arguments: Sequence[str]) -> None:
    from bapo_megatron.config import RunConfig
    from bapo_megatron.config.recipe import load_recipe
    from bapo_megatron.policy.device import has_cuda
    from bapo_megatron.rollout.engines.sglang.server_process import ServeCommand, serve

    recipe = _recipe("rollout-server", arguments)
    default = ServeCommand(load_recipe(recipe, RunConfig))
    command = _flags("rollout-server", recipe, ServeCommand, default, arguments)
    command.run.check()
    serve(command, has_cuda())


def _plan(arguments: Sequence[str]) -> int:
    import json

    from bapo_megatron.commands.plan.advice import fastest_layouts, problems, smallest_changes
    from bapo_megatron.commands.plan.job import Job, find_shape
    from bapo_megatron.commands.plan.options import PlanCommand
    from bapo_megatron.commands.plan.plan import as_dict, make_plan
    from bapo_megatron.commands.plan.table import render
    from bapo_megatron.config import RunConfig
    from bapo_megatron.config.recipe import load_recipe

    recipe = _recipe("plan", arguments)
    command = _flags("plan", recipe, PlanCommand, PlanCommand(load_recipe(recipe, RunConfig)), arguments)
    command.options.check()
    job = Job(command.run, find_shape(recipe, command.run.model.hf_path), command.options)
    if found := problems(job):
        raise ConfigError("\n".join(found))
    plan = make_plan(job)
    fits = not any(plan.misfits())
    advice = [] if fits else smallest_changes(plan)
    if command.options.as_json:
        print(json.dumps({**as_dict(plan), "advice": [vars(change) for change in advice]}, indent=2))
    else:
        print(render(plan, advice, fastest_layouts(plan, command.options.compare)), end="")
    return 0 if fits and plan.engine_misfit() is None else 1


def _verify_parallel(arguments: Sequence[str]) -> None:
    from bapo_megatron.commands.verify.check import VerifyConfig, check_verify
    from bapo_megatron.config import RunConfig
    from bapo_megatron.config.recipe import load_recipe
    from bapo_megatron.policy.layout import data_parallel_size
    from bapo_megatron.runtime.distributed import launched_world_size, run_processes

    recipe = _recipe("verify-parallel", arguments)
    default = VerifyConfig.of(load_recipe(recipe, RunConfig))
    config = _flags("verify-parallel", recipe, VerifyConfig, default, arguments)
    launched = launched_world_size()
    processes = data_parallel_size(config.parallel, launched) * config.parallel.model_size
    check_verify(config, launched is not None)
    if launched is not None:
        verify_process(config)
    elif config.by_hand:
        _verify_by_hand(config, processes)
    else:
        run_processes(verify_process, (config,), processes, apart=True)


def _verify_by_hand(config: VerifyConfig, processes: int) -> None:
    """Run the reference, then the recipe's layout against it."""
    import dataclasses
    import tempfile

    from bapo_megatron.runtime.distributed import run_processes

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reference.npz"
        reference = dataclasses.replace(config, parallel=config.reference, save=path)
        count = config.reference.model_size * (config.reference.data or 1)
        print(f"the reference, in {count} process(es), then the recipe's layout, in {processes}", flush=True)
        run_processes(verify_process, (reference,), count, apart=True)
        compared = dataclasses.replace(config, certificate=path)
        run_processes(verify_process, (compared,), processes, apart=True)


def verify_process(config: VerifyConfig) -> None:
    """One rank of a layout's check. SystemExit(1), on every rank, if the layout differs."""
    from bapo_megatron.commands.verify.check import verify_layout
    from bapo_megatron.policy.layout import parallel_processes

    _quiet()
    with parallel_processes(config.parallel):
        code = verify_layout(config)
    if code:
        sys.exit(code)


def _doctor(arguments: Sequence[str]) -> int:
    from bapo_megatron.commands.doctor.doctor import run_doctor

    return run_doctor(arguments)


def _data(arguments: Sequence[str]) -> None:
    from bapo_megatron.data.prepare.command import data_command

    data_command(arguments)


def _eval(arguments: Sequence[str]) -> None:
    from bapo_megatron.evaluation.command import eval_command

    eval_command(arguments)


def _study(arguments: Sequence[str]) -> int:
    from benchmarks.study.command import study_command

    return study_command(arguments, run)


def _on_cluster(name: str) -> Callable[[Sequence[str]], None]:
    def command(arguments: Sequence[str]) -> None:
        from bapo_megatron.commands.cluster import commands

        getattr(commands, f"{name}_command")(arguments)

    return command


def _configured(command: str, kind: type[C], arguments: Sequence[str]) -> C:
    """The recipe's configuration with the flags laid over it."""
    from bapo_megatron.config.recipe import load_recipe

    recipe = _recipe(command, arguments)
    return _flags(command, recipe, kind, load_recipe(recipe, kind), arguments)


def _recipe(command: str, arguments: Sequence[str]) -> Path:
    """The recipe's path, which comes first."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: bapo {command} RECIPE [flags]\n\n`bapo {command} RECIPE --help` lists the flags.")
        sys.exit(0 if arguments else 2)
    if arguments[0].startswith("-"):
        raise ConfigError(f"usage: bapo {command} RECIPE [flags]; the recipe comes first")
    return Path(arguments[0])


def _flags(command: str, recipe: Path, kind: type[C], default: C, arguments: Sequence[str]) -> C:
    """``default`` with the flags after the recipe laid over it."""
    import tyro

    return tyro.cli(
        type(default),
        prog=f"bapo {command} {recipe}",
        description=f"Defaults are those of {recipe}.",
        default=default,
        args=list(arguments[1:]),
    )


def _quiet() -> None:
    """Libraries warn once for each process of what is missing on a CPU; it is known and meant."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin starve their neighbours
    for module in ("megatron", "torch", "transformers", "bapo_megatron.policy.device"):
        warnings.filterwarnings("ignore", module=rf"{module}(\.|$)")
    for module in ("megatron", "torch.multiprocessing.spawn"):  # the latter tells of each process it ends
        logging.getLogger(module).setLevel(logging.ERROR)


if __name__ == "__main__":
    main()
