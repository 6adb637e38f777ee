"""Every command of the pages is one that the command line takes, and says what runs it or what it needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import tyro

from bapo_megatron.commands.cluster.run_job import run_and_switches
from bapo_megatron.commands.cluster.submit import SubmitCommand
from bapo_megatron.commands.doctor.doctor import DoctorArguments
from bapo_megatron.commands.plan import PlanCommand
from bapo_megatron.commands.recipe_flags import check_names, recipe_command, recipe_config
from bapo_megatron.commands.train_flags import TrainCommand
from bapo_megatron.commands.verify_flags import VerifyConfig
from bapo_megatron.config import RunConfig, SftConfig
from bapo_megatron.config.flags import parse_options
from bapo_megatron.data.prepare.options import PrepareOptions
from bapo_megatron.errors import ConfigError
from bapo_megatron.evaluation.options import CompareOptions, EvalOptions
from bapo_megatron.rollout.engines.sglang.requirements import placement_problem
from bapo_megatron.rollout.engines.sglang.server_process import ServeCommand
from bapo_rehearsal.command import RehearseCommand
from checkpoints_tools.commands import COMMANDS as CHECKPOINT_COMMANDS
from tests.support.pages import PAGES, ROOT, Block, blocks, inline_commands

NEEDS = ("needs a GPU", "needs a network", "needs Slurm", "form")
"""What a comment before a block says whose commands no test runs. Form: it shows which flags there are."""
PLACEHOLDERS = {
    "RECIPE": "./recipes/r1_distill_qwen_7b_8k.py",
    "FILE": "slurm/clusters/h100_pyxis.toml",
    "SOURCE": "recipes/demo/train.jsonl",
    "N": "2",
    "PORT": "30000",
}
"""What stands for a word in capitals; any other is a path."""
PAGES_OF_COMMANDS = [page for page in PAGES if page.name != "CHANGELOG.md"]
GPUS = 8


def parse_run(arguments: Sequence[str]) -> RunConfig:
    run = recipe_command("train", TrainCommand, arguments)[1].run
    run.check()
    check_names(run)
    return run


def parse_training(arguments: Sequence[str], ranks: int | None = None) -> None:
    """On one machine of eight GPUs the servers that the run starts have room beside its ranks."""
    run = parse_run(arguments)
    ranks = ranks or run.parallel.model_size * (run.parallel.data or 1)
    assert ranks % run.parallel.model_size == 0, (
        f"{ranks} processes for {run.parallel.model_size} of a replica"
    )
    on_gpus = run.model.dtype == "bfloat16"
    if on_gpus and run.rollout.engine == "sglang" and arguments[0] != PLACEHOLDERS["RECIPE"]:
        problem = placement_problem(run.rollout, GPUS, ranks)
        assert problem is None, problem


def parse_submit(arguments: Sequence[str]) -> None:
    command = SubmitCommand.of(arguments)
    assert command.cluster.is_file()
    parse_run([str(command.recipe), *command.flags])


def parse_plan(kind: Callable[[RunConfig], object], arguments: Sequence[str], command: str) -> None:
    _, found = recipe_command(command, kind, arguments)
    run = found if isinstance(found, RunConfig) else getattr(found, "run", None)
    if isinstance(run, RunConfig):
        run.check()


def parse_data(arguments: Sequence[str]) -> None:
    assert arguments[0] == "prepare"
    parse_options(PrepareOptions, "bapo data prepare", arguments[1:]).check()


def parse_eval(arguments: Sequence[str]) -> None:
    if arguments[0] == "compare":
        parse_options(CompareOptions, "bapo eval compare", arguments[1:]).check()
    else:
        parse_options(EvalOptions, "bapo eval", arguments).check()


def parse_doctor(arguments: Sequence[str]) -> None:
    command = DoctorArguments.of(arguments)
    if command.recipe is not None:
        recipe_config("doctor", RunConfig, [str(command.recipe), *command.flags]).check()


def parse_report(arguments: Sequence[str]) -> None:
    assert {word for word in arguments if word.startswith("-")} <= {"--output"}
    assert not arguments[0].startswith("-")


PARSERS: dict[str, Callable[[Sequence[str]], object]] = {
    "train": parse_training,
    "sft": lambda words: recipe_config("sft", SftConfig, words).check(),
    "report": parse_report,
    "submit": parse_submit,
    "status": lambda words: run_and_switches("status", words, "--watch"),
    "logs": lambda words: run_and_switches("logs", words, "--follow", "--all"),
    "cancel": lambda words: run_and_switches("cancel", words, "--now"),
    "rollout-server": lambda words: parse_plan(ServeCommand, words, "rollout-server"),
    "plan": lambda words: parse_plan(PlanCommand, words, "plan"),
    "rehearse": lambda words: parse_plan(RehearseCommand, words, "rehearse"),
    "verify-parallel": lambda words: parse_plan(VerifyConfig.of, words, "verify-parallel"),
    "data": parse_data,
    "eval": parse_eval,
    "doctor": parse_doctor,
}


def check(words: list[str]) -> None:
    """AssertionError, SystemExit or ConfigError if the command is none that exists."""
    program, *rest = words
    if program == "torchrun":
        ranks = int(rest[rest.index("--nproc-per-node") + 1])
        parse_training(rest[rest.index("train") + 1 :], ranks)
        return
    if "bapo_megatron.cli" in rest:
        program, rest = "bapo", rest[rest.index("bapo_megatron.cli") + 1 :]
    if program == "srun":
        names = [word.rpartition("/")[2] for word in rest]
        rest = rest[next(n for n, name in enumerate(names) if name in ("bapo", "make")) :]
        program, *rest = [rest[0].rpartition("/")[2], *rest[1:]]
    rest = [word for word in rest if word not in ("...", "FLAGS", "$FLAGS", "$IN")]
    rest = [PLACEHOLDERS.get(word, word) for word in rest]
    if rest[:1] == ["study"]:
        return  # at a commit that the page names
    if program == "bapo":
        if "--help" in rest:
            assert rest[0] in PARSERS
        else:
            PARSERS[rest[0]](rest[1:])
    elif program == "bapo-ckpt":
        tyro.cli(CHECKPOINT_COMMANDS[rest[0]], args=rest[1:])
    elif program == "make":
        check_make(rest)
    elif program == "sbatch":
        check_sbatch(rest)
    elif program == "python":
        if rest[0] == "-m":
            assert rest[1].startswith("sglang") or find_spec(rest[1]) is not None, rest[1]
        else:
            assert (ROOT / rest[0]).is_file() or (ROOT / "docs" / rest[0]).is_file(), rest[0]
            assert not rest[0].startswith(("benchmarks/", "studies/")), "it imports its package: python -m"


def check_make(words: Sequence[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        variable, equals, _ = word.partition("=")
        if equals:
            assert re.search(rf"\b{variable}\b", makefile), word
        else:
            assert re.search(rf"^{word}:", makefile, re.MULTILINE), word


def check_sbatch(words: Sequence[str]) -> None:
    place = next(n for n, word in enumerate(words) if word.endswith(".sbatch"))
    script = Path(words[place])
    assert (ROOT / script).is_file(), script
    if script.stem == "colocated":
        tasks = [word.partition("=")[2] for word in words if word.startswith("--ntasks-per-node=")]
        parse_training(words[place + 1 :], int(*tasks) or GPUS)
    elif script.stem in ("train", "rollout"):
        parse_run(words[place + 1 :])


def is_whole(words: Sequence[str]) -> bool:
    """Whether words in running text are a command, and not its name alone, as in `bapo plan`."""
    if words[0] == "python":
        return True
    place = 3 if words[1:3] in (["data", "prepare"], ["eval", "compare"]) else 2
    return len(words) > place and not words[place].startswith("-")


@pytest.mark.integration
@pytest.mark.parametrize("page", PAGES_OF_COMMANDS, ids=lambda page: page.name)
def test_the_command_line_takes_every_command(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    written = {block.file for block in blocks(page) if block.file}  # by the reader, as the page says
    found = [words for block in blocks(page) for words in block.commands]
    found += [words for words in inline_commands(page) if is_whole(words)]
    refused = []
    for words in found:
        if not written & set(words):
            try:
                check(list(words))
            except (AssertionError, SystemExit, ConfigError, LookupError, StopIteration) as error:
                refused.append(f"{' '.join(words)}: {error!r}")
    assert not refused, "\n".join(refused)


@pytest.mark.parametrize("page", PAGES_OF_COMMANDS, ids=lambda page: page.name)
def test_every_block_says_what_runs_it(page: Path) -> None:
    unknown = [problem for block in blocks(page) if block.commands and (problem := unmarked(block))]
    assert not unknown, "\n".join(unknown)


def unmarked(block: Block) -> str | None:
    """Why nobody knows whether a block's commands work; None if a test runs them, or they need a cluster.

    Blocks that begin with ```sh are run by tests/e2e/test_pages.py and test_extending.py.
    """
    where = f"{block.page.name}, line {block.line}"
    if block.kind == "sh" or block.marker in NEEDS:
        return None
    tests = [ROOT / name for name in block.marker.split()]
    if not tests:
        return (
            f"{where}: a test runs a block that begins with ```sh; before any other write <!-- WHAT -->, "
            f"one of {', '.join(NEEDS)}, or the file of a test that runs its commands"
        )
    missing = [str(test) for test in tests if not test.is_file()]
    return f"{where}: {missing} do not exist" if missing else None
