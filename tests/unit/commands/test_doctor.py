"""``bapo doctor``: packages, the report."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.commands.doctor import doctor, packages
from bapo_megatron.commands.doctor.doctor import DoctorArguments, guarded, run_doctor
from bapo_megatron.commands.doctor.packages import (
    PACKAGES,
    SGLANG,
    TRAINING,
    Import,
    Package,
    canonical,
    gpu_row,
    is_permitted,
    package_row,
    package_rows,
    permitted,
    pins,
    try_imports,
)
from bapo_megatron.commands.doctor.recipe import RecipeFacts
from bapo_megatron.commands.doctor.rows import DoctorRow, as_json, lines, one_line, summary_line
from bapo_megatron.commands.doctor.sglang import sglang_gpu_row
from bapo_megatron.errors import MISSING_BOARD, ConfigError
from bapo_megatron.runtime.child_process import CommandResult

ROOT = Path(__file__).parents[3]
NEEDED = Package("torch", "torch")
FOR_GPUS = Package("transformer-engine", "te", "fused layers", "transformer-engine", on_gpu=True)
OPTIONAL = Package("wandb", None, "logging", "wandb")


def test_pins(tmp_path: Path) -> None:
    assert {"torch", "megatron-core", "transformers", "math-verify"} <= pins(TRAINING).keys()
    assert {"sglang", "sglang-router"} <= pins(SGLANG).keys()
    path = tmp_path / "pins.txt"
    path.write_text("# tested\nJinja2==3.1.6\nast_serialize==0.1  # why\nloose>=2\n\n")
    assert pins(path) == {"jinja2": "3.1.6", "ast-serialize": "0.1"}
    markers = (
        'a==1; python_version < "3"',
        'a==2; python_version >= "3"  # ours',
        'a==3; python_version < "3"',
    )
    path.write_text("\n".join(markers))
    assert pins(path) == {"a": "2"}


def test_every_package_that_setup_requires_has_a_row() -> None:
    (call,) = (
        node
        for node in ast.walk(ast.parse((ROOT / "setup.py").read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setup"
    )
    (stated,) = (word.value for word in call.keywords if word.arg == "install_requires")
    names = {canonical(text.partition(">")[0].partition("=")[0]) for text in ast.literal_eval(stated)}
    rows = {package.name for package in PACKAGES if not package.purpose}
    assert names == rows


def test_what_metadata_permits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "some_thing-1.dist-info"
    folder.mkdir()
    stated = ("a_b<3,>=1.2", "c (>=4)", "d[x,y]==5", "e", 'f>=6; extra == "dev"', "g>7;python_version>'3'")
    text = "".join(f"Requires-Dist: {line}\n" for line in stated)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: some-thing\nVersion: 1\n{text}")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert permitted("some-thing") == {"a-b": "<3,>=1.2", "c": ">=4", "d": "==5", "e": "", "g": ">7"}
    assert permitted("not-installed-anywhere") == {}


def test_a_range() -> None:
    versions = ("2.13.0+cpu", "2.14.0", "2.5.1", "2.6.0rc1")
    assert [is_permitted(version, "<2.14,>=2.6") for version in versions] == [True, False, False, False]


STARTS = """
import pkgutil, sys
from importlib import import_module
before = set(sys.modules)
from bapo_megatron.commands import doctor
for info in pkgutil.iter_modules(doctor.__path__, "bapo_megatron.commands.doctor."):
    import_module(info.name)
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - {*sys.stdlib_module_names, "__mp_main__"}))
"""


def test_the_doctor_starts_where_nothing_is_installed() -> None:
    found = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["bapo_megatron"]


@pytest.mark.parametrize(
    ("package", "version", "imported", "state", "found"),
    [
        (NEEDED, "2.13.0", Import(), "ok", "2.13.0"),
        (NEEDED, None, Import(), "problem", "not installed"),
        (NEEDED, "2.14.0", Import(), "problem", "2.14.0"),
        (NEEDED, "2.13.0", Import("OSError: libcudart"), "problem", "2.13.0, and its import fails: OSError"),
        (OPTIONAL, None, Import(), "optional", "not installed"),
        (FOR_GPUS, "2.3", Import("ImportError: abi"), "problem", "2.3, and its import fails: ImportError"),
    ],
)
def test_a_package(package: Package, version: str | None, imported: Import, state: str, found: str) -> None:
    row = package_row(package, version, imported, "<2.14,>=2.6", "2.13.0")
    assert row.state == state
    assert row.found.startswith(found)
    assert "tested: 2.13.0" in row.needed
    assert bool(row.fix) is (state != "ok")


def test_a_board_that_the_recipe_names_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    boards = [one for one in PACKAGES if one.purpose == packages.BOARDS]
    monkeypatch.setattr(packages, "installed_version", lambda _name: None)
    for trackers, states in (
        ((), ["optional"] * 3),
        (("tensorboard", "mlflow"), ["optional", "optional", "problem"]),
        (("wandb", "trackio"), ["problem", "problem", "optional"]),
    ):
        rows = list(package_rows(boards, trackers))[1:]
        assert [row.state for row in rows] == states
        assert [row.fix for row in rows] == [f"pip install {board.install}" for board in boards]


def test_a_missing_board_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the row of its package, not by the recipe's, too; a problem with another name stays."""
    names = (("mlflow", "mlflow-skinny"), ("trackio", "trackio"))
    said = [f"{MISSING_BOARD.format(name=name, package=package)}: ..." for name, package in names]
    told = [DoctorRow("recipe", "r.py", "problem", text) for text in said]
    package = DoctorRow("training", "mlflow-skinny", "problem", "not installed")
    monkeypatch.setattr(doctor, "check_recipe", lambda *_: (told, None))
    for section in ("sglang_rows", "machine_rows", "sandbox_rows", "server_rows"):
        monkeypatch.setattr(doctor, section, lambda *_: iter(()))
    monkeypatch.setattr(doctor, "package_rows", lambda **_: iter([package]))
    assert list(doctor.all_rows(DoctorArguments(Path("r.py")))) == [package, told[1]]


def test_the_fix_installs_what_was_tested() -> None:
    broken = package_row(NEEDED, "2.13.0", Import("ImportError: x"), None, "2.13.0")
    assert broken.fix == 'pip install --force-reinstall "torch==2.13.0"'
    assert package_row(OPTIONAL, None, Import(), None, None).needed == "for logging"


@pytest.mark.parametrize(
    ("version", "state"),
    [("0.16.1", "ok"), ("0.18.2", "optional"), ("0.19.2", "ok"), ("0.20.0", "problem")],
)
def test_a_permitted_release_may_be_an_untested_one(version: str, state: str) -> None:
    megatron = next(package for package in PACKAGES if package.name == "megatron-core")
    row = package_row(megatron, version, Import(), ">=0.16.1,<0.20", "0.19.2")
    assert row.state == state
    assert ("was tested" in row.found) == (state == "optional")
    assert row.fix == ("" if state == "ok" else 'pip install --no-deps "megatron-core==0.19.2"')


def test_a_broken_package_fails_only_its_own_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = {
        "doctor_good": "print('noise')",
        "doctor_raises": "raise RuntimeError('built for another torch')",
        "doctor_exits": "import os; os._exit(3)",
        "doctor_crashes": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "doctor_leaves": "raise SystemExit",
        "doctor_last": "",
        "doctor_hangs": "import time; time.sleep(600)",
    }
    for name, body in bodies.items():
        (tmp_path / f"{name}.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    began = time.monotonic()
    found = try_imports([*bodies, "doctor_not_there"], deadline_s=8)
    assert time.monotonic() - began < 60
    assert {name: result.error for name, result in found.items()} == {
        "doctor_good": None,
        "doctor_raises": "RuntimeError: built for another torch",
        "doctor_exits": "exit code 3: import doctor_exits",
        "doctor_crashes": "ended by SIGSEGV: import doctor_crashes",
        "doctor_leaves": "SystemExit:",
        "doctor_last": None,
        "doctor_hangs": found["doctor_hangs"].error,
        "doctor_not_there": "ModuleNotFoundError: No module named 'doctor_not_there'",
    }
    assert str(found["doctor_hangs"].error).startswith("no end within")


LATE = "2.13.0, and its import fails: no end within 5 s: import torch"


@pytest.mark.parametrize(
    ("load", "found", "state", "says"),
    [
        (17.6, LATE, "optional", "no answer within 5 s: the machine is busy (load 18 on 2 cores)"),
        (9.0, "no end within 10 s", "optional", "no answer within 10 s: the machine is busy (load 9 on"),
        (1.5, LATE, "problem", LATE),  # it hangs
        (17.6, "2.13.0, and its import fails: OSError", "problem", "2.13.0, and its import fails: OSError"),
    ],
)
def test_lack_of_time_on_a_busy_machine_is_not_a_problem(
    load: float, found: str, state: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    row = DoctorRow("training", "torch", "problem", found, "", "pip install --force-reinstall torch")
    for section in ("sglang_rows", "machine_rows", "sandbox_rows", "server_rows"):
        monkeypatch.setattr(doctor, section, lambda *_: iter(()))
    slow = replace(row, section="recipe", name="environment")  # it waits for what is not this machine's
    driver = replace(row, name="torch's GPUs")
    monkeypatch.setattr(doctor, "package_rows", lambda **_: iter([row, driver]))
    monkeypatch.setattr(doctor, "check_recipe", lambda *_: ([slow], RecipeFacts()))
    report = list(doctor.all_rows(DoctorArguments(Path("r.py"))))
    assert [row.state for row in report] == [state, "problem", "problem"]
    assert report[0].found.startswith(says)
    assert ("again when" in report[0].fix) is (state == "optional")


UNUSABLE = "this machine should have a GPU, but torch cannot use one: too old. Update it"


@pytest.mark.parametrize(
    ("facts", "state", "says"),
    [
        ({"cuda": None, "gpus": []}, "ok", "CPU build, no GPU here"),
        ({"cuda": "13.0", "gpus": [], "problem": None}, "ok", "built for CUDA 13.0, no GPU here"),
        ({"cuda": None, "gpus": [], "problem": UNUSABLE}, "problem", f"CPU build: {UNUSABLE[:-11]}"),
        ({"cuda": "13.0", "gpus": [], "asked": True}, "ok", "built for CUDA 13.0, BAPO_DEVICE=cpu"),
        ({"cuda": "13.0", "gpus": [["H100", 85]] * 2, "nccl": "2.27"}, "ok", "CUDA 13.0, NCCL 2.27, 2 x"),
    ],
)
def test_gpus(facts: dict[str, Any], state: str, says: str) -> None:
    row = gpu_row(facts)
    assert row.state == state
    assert row.found.startswith(says)
    assert row.fix == ("Update it" if state == "problem" else "")


def test_a_kernel_is_compiled_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Import(facts={"cuda": "13.0", "gpus": [["H100", 85]], "nccl": "2.30"})
    failed = CommandResult("", "gcc ...\nRuntimeError: Failed to find C compiler\n", "exit code 1", 1)
    monkeypatch.setattr(packages, "try_imports", lambda modules: dict.fromkeys(modules, found))
    for child, state in ((failed, "problem"), (CommandResult("", "", "", 0), "ok")):
        monkeypatch.setattr(packages, "run_command", lambda *_, child=child: child)
        [row] = [row for row in package_rows(PACKAGES[:1]) if row.name == "torch.compile"]
        assert row.state == state
    monkeypatch.setattr(packages, "try_imports", lambda modules: dict.fromkeys(modules, Import()))
    assert "torch.compile" not in {row.name for row in package_rows(PACKAGES[:1])}
    assert sglang_gpu_row(CommandResult("8\n", "", "", 0), required=True).found == "8 GPUs"
    row = sglang_gpu_row(failed, required=True)
    assert (row.state, row.found) == ("problem", "exit code 1: RuntimeError: Failed to find C compiler")
    assert sglang_gpu_row(failed, required=False).state == "optional"


def test_an_error_in_one_line() -> None:
    said = [one_line(error) for error in (ValueError("two\n  lines"), TimeoutError(), "x" * 300)]
    assert said == ["two lines", "TimeoutError", "x" * 199 + "…"]


ROWS = [
    DoctorRow("one", "torch", "ok", "2.13.0", "tested: 2.13.0", "is dropped"),
    DoctorRow("one", "wandb", "optional", "not installed", "for logging", "pip install wandb"),
    DoctorRow("two", "http://a-rather-long-name:30000", "problem", "no answer", "a server", "start it"),
]


def test_the_table() -> None:
    """Addresses and commands are copied from it: they stay whole."""
    assert list(lines(ROWS)) == [
        "one",
        "  ok        torch                 2.13.0                                        tested: 2.13.0",
        "  optional  wandb                 not installed                                 for logging",
        "            fix: pip install wandb",
        "",
        "two",
        "  problem   http://a-rather-long-name:30000",
        "                                  no answer                                     a server",
        "            fix: start it",
    ]


def test_no_code_of_a_terminal_is_printed() -> None:
    """Nor a lone surrogate, at which print would raise."""
    row = DoctorRow("one", "a\x1b]0;x\x07", "problem", "b\udcff", "c\x1b[2J", "d\x1b[1m\ud800")
    text = "\n".join(lines([row]))
    text.encode()
    assert "\x1b" not in text
    assert all(shown in text for shown in ("a\\x1b]0;x\\x07", "b\\udcff", "c\\x1b[2J", "d\\x1b[1m\\ud800"))


def test_the_table_where_rich_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is among what is checked."""
    monkeypatch.setitem(sys.modules, "rich.table", None)
    table = ["one", "  optional  wandb  not installed  for logging", "    fix: pip install wandb"]
    assert list(lines(ROWS[1:2])) == table


def test_the_verdict() -> None:
    said = "1 problem: a run could not start (1 optional: missing, low or untested)"
    assert summary_line(ROWS, "a run") == said
    assert summary_line(ROWS[:1], "a.py") == "no problem: a.py could start"
    told = json.loads(as_json(ROWS))
    assert [row["fix"] for row in told["rows"]] == ["", "pip install wandb", "start it"]
    assert [told["ok"], json.loads(as_json(ROWS[:2]))["ok"]] == [False, True]


def test_a_section_that_raises_fails_only_itself() -> None:
    def broken() -> Any:
        yield ROWS[0]
        raise KeyError("MemTotal")

    first, last = guarded("one", broken)
    assert first is ROWS[0]
    assert last.found == "could not be looked at: KeyError: 'MemTotal'"


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert DoctorArguments.of([]) == DoctorArguments(None)
    assert DoctorArguments.of(["--json"]) == DoctorArguments(None, (), True)
    for place in range(2):
        words = ["a.py", "--steps", "3"]
        words.insert(place, "--json")
        assert DoctorArguments.of(words) == DoctorArguments(Path("a.py"), ("--steps", "3"), True)
    with pytest.raises(ConfigError, match="--steps: the recipe comes first"):
        DoctorArguments.of(["--steps", "3"])
    assert run_doctor(["a.py", "--help"]) == 0
    assert "usage: bapo doctor [RECIPE]" in capsys.readouterr().out
