"""Commands without typed flags tell their usage when they are asked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import pytest

from bapo_megatron.cli import COMMANDS, USAGE, run
from bapo_megatron.errors import ConfigError, refuse_arguments
from checkpoints_tools.cli import USAGE as CKPT_USAGE

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("command", [["report"], ["status"], ["logs"], ["cancel"], ["eval", "compare"]])
def test_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("-h", "--help"):
        with pytest.raises(SystemExit, match="^0$"):
            run([*command, flag])
        assert capsys.readouterr().out.startswith(f"usage: bapo {' '.join(command)} ")
    with pytest.raises(ConfigError, match="usage: this"):
        refuse_arguments(["--halp"], "usage: this")


def test_every_command_exists_and_is_in_the_help() -> None:
    assert set(re.findall(r"^  ([a-z-]+) ", USAGE, re.MULTILINE)) == set(COMMANDS)
    for place in COMMANDS.values():
        module, _, function = place.partition(":")
        assert callable(getattr(import_module(module), function))


@pytest.mark.parametrize(("package", "usage"), [("bapo_megatron", USAGE), ("checkpoints_tools", CKPT_USAGE)])
def test_the_help_of_all_commands_imports_nothing_but_the_standard_library(package: str, usage: str) -> None:
    script = (
        f"import sys; before = set(sys.modules); from {package}.cli import run; run(['--help'])\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(new - {*sys.stdlib_module_names, '__mp_main__'}), file=sys.stderr)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stderr.split() == sorted({"bapo_megatron", package})
    assert found.stdout == usage


RECIPE = "recipes/qwen3_8b_16k.py"  # it takes a preset from algo.bapo, and its engines are SGLang's
HEAVY = {"torch", "megatron", "transformers", "safetensors", "sympy", "pandas", "matplotlib"}


START_NOTHING = [
    *(f"{name} {RECIPE} --help" for name in ("train", "submit", "rollout-server")),
    *(f"{name} recipes/demo_cpu.py --help" for name in ("sft", "rehearse", "verify-parallel")),
    *(f"{name} --help" for name in ("verify-parallel", "eval", "rollout-server", "report")),
    f"train {RECIPE} --steps none",  # a wrong flag is refused as fast
    *("plan recipes/demo_cpu.py --json", "status runs/none", "logs runs/none"),
]
DRAW = [
    f"plan {RECIPE}",
    f"plan {RECIPE} --memory-fraction 0.3",  # it does not fit: the search for a change
    f"plan {RECIPE} --compare 3",
    f"plan {RECIPE} --batch.hold-forwards",
]
COMMANDS_IN_TURN = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from bapo_megatron.cli import run
told = {}
for command in sys.argv[1:]:
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(output), suppress(SystemExit):
        run(command.split())
    told[command] = output.getvalue(), sorted(sys.modules)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def in_turn() -> dict[str, tuple[str, list[str]]]:
    """What each command says, and the modules after it, in an interpreter that runs all of them."""
    command = [sys.executable, "-c", COMMANDS_IN_TURN, *START_NOTHING, *DRAW]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(found.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("command", [*START_NOTHING, *DRAW])
def test_what_starts_nothing_answers_without_the_heavy_packages(
    command: str, in_turn: dict[str, tuple[str, list[str]]]
) -> None:
    """torch, megatron and transformers take seconds; rich, which draws the tables of a plan, some tenths."""
    output, modules = in_turn[command]
    assert output
    assert not (HEAVY if command in DRAW else HEAVY | {"rich"}) & set(modules)


def test_ctrl_c_ends_a_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(COMMANDS["status"].replace(":", "."), Mock(side_effect=KeyboardInterrupt))
    assert run(["status", "x"]) == 130
    assert capsys.readouterr().err == "\nstopped\n"
