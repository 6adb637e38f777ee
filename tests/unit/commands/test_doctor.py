"""``bapo doctor``: packages, the report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from bapo_megatron.commands.doctor import packages, recipe
from bapo_megatron.commands.doctor.doctor import DoctorArguments, guarded
from bapo_megatron.commands.doctor.packages import (
    fused_row,
    gpu_row,
    package_row,
    package_rows,
    permitted,
    pins,
    try_imports,
)
from bapo_megatron.commands.doctor.rows import DoctorRow, as_json, lines, summary_line
from bapo_megatron.commands.doctor.sglang import sglang_gpu_row
from bapo_megatron.runtime.child_process import CommandResult

ROOT = Path(__file__).parents[3]


def test_pins(tmp_path: Path) -> None:
    path = tmp_path / "pins.txt"
    markers = 'a==2; python_version >= "3"  # ours\na==1; python_version < "3"\n'
    path.write_text(f"# tested\nJinja2==3.1.6\nast_serialize==0.1  # why\nloose>=2\n\n{markers}")
    assert pins(path) == {"jinja2": "3.1.6", "ast-serialize": "0.1", "a": "2"}


def test_what_metadata_permits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "some_thing-1.dist-info"
    folder.mkdir()
    stated = ("a_b<3,>=1.2", "c (>=4)", "d[x,y]==5", "e", 'f>=6; extra == "dev"', "g>7;python_version>'3'")
    text = "".join(f"Requires-Dist: {line}\n" for line in stated)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: some-thing\nVersion: 1\n{text}")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {name: str(versions) for name, versions in permitted("some-thing").items()}
    assert found == {"a-b": "<3,>=1.2", "c": ">=4", "d": "==5", "e": "", "g": ">7"}
    monkeypatch.setattr(packages, "permitted", lambda: permitted("not-installed-anywhere"))
    assert [(row.name, row.state) for row in package_rows()] == [
        ("Python", "ok"),
        ("bapo-megatron", "problem"),
    ]


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


INSTALL = 'pip install --no-deps "megatron-core==0.19.2"'
AGAIN = INSTALL.replace("install", "install --force-reinstall")


@pytest.mark.parametrize(
    ("version", "error", "state", "found", "fix"),
    [
        ("0.16.1", None, "ok", "0.16.1", ""),
        (None, "ModuleNotFoundError: x", "problem", "not installed", INSTALL),
        ("0.20.0", None, "problem", "0.20.0", INSTALL),
        ("0.18.2", None, "optional", "0.18.2: no layout, checkpoint", INSTALL),
        ("0.16.1", "OSError: x", "problem", "0.16.1, and its import fails: OSError", AGAIN),
    ],
)
def test_a_package(version: str | None, error: str | None, state: str, found: str, fix: str) -> None:
    row = package_row("megatron-core", version, error, SpecifierSet(">=0.16.1,<0.20"), "0.19.2")
    assert (row.state, row.fix) == (state, fix)
    assert row.found.startswith(found)
    assert row.needed == "<0.20,>=0.16.1, tested: 0.19.2"
    other = package_row("rich", version, error, SpecifierSet(">=0.16.1,<0.20"), None)
    assert other.state == ("ok" if state == "optional" else state)
    assert other.fix.replace(" --force-reinstall", "") in ("", 'pip install "rich<0.20,>=0.16.1"')


def test_fused_layers() -> None:
    cases = ((None, None, "optional"), ("2.20.2", None, "ok"), ("2.20.2", "ImportError: abi", "problem"))
    for version, error, state in cases:
        assert fused_row(version, error).state == state


def test_a_broken_package_fails_only_its_own_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends the process, or hangs, is named; what comes after it is not tried."""
    bodies = {
        "doctor_good": "print('noise')",
        "doctor_raises": "raise RuntimeError('built for another torch')",
        "doctor_leaves": "raise SystemExit",
    }
    ends = {
        "doctor_crashes": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
        "doctor_hangs": ("import time; time.sleep(600)", "no end within 15 s"),
    }
    for name, body in (bodies | {name: body for name, (body, _) in ends.items()}).items():
        (tmp_path / f"{name}.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    for name, (_, said) in ends.items():
        if name == "doctor_hangs":
            monkeypatch.setattr(packages, "IMPORT_DEADLINE_S", 15)
        errors, facts = try_imports([*bodies, "doctor_not_there", name, "json"])
        assert errors.pop(name).startswith(said)
        assert errors == {
            "doctor_good": None,
            "doctor_raises": "RuntimeError: built for another torch",
            "doctor_leaves": "SystemExit:",
            "doctor_not_there": "ModuleNotFoundError: No module named 'doctor_not_there'",
        }
        assert facts == {}
    # Transformer Engine, which raises where there is no GPU, is not tried there.
    assert try_imports(["json", "transformer_engine.pytorch"]) == ({"json": None}, {})


UNUSABLE = "this machine should have a GPU, but torch cannot use one: too old. Update it"


@pytest.mark.parametrize(
    ("facts", "state", "says"),
    [
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
    facts = {"cuda": "13.0", "gpus": [["H100", 85]], "nccl": "2.30"}
    failed = CommandResult("", "gcc ...\nRuntimeError: Failed to find C compiler\n", "exit code 1", 1)
    monkeypatch.setattr(packages, "try_imports", lambda _modules: ({}, facts))
    for child, state in ((failed, "problem"), (CommandResult("", "", "", 0), "ok")):
        monkeypatch.setattr(packages, "run_command", lambda *_, child=child: child)
        rows = {row.name: row.state for row in package_rows()}
        assert (rows["torch.compile"], rows["torch's GPUs"]) == (state, "ok")
        assert "transformer-engine" in rows
    monkeypatch.setattr(packages, "try_imports", lambda _modules: ({}, {}))
    assert not {"torch.compile", "transformer-engine"} & {row.name for row in package_rows()}
    assert sglang_gpu_row(CommandResult("8\n", "", "", 0), required=True).found == "8 GPUs"
    row = sglang_gpu_row(failed, required=True)
    assert (row.state, row.found) == ("problem", "exit code 1: RuntimeError: Failed to find C compiler")
    assert sglang_gpu_row(failed, required=False).state == "optional"


ROWS = [
    DoctorRow("one", "torch", "ok", "2.13.0", "tested: 2.13.0", "is dropped"),
    DoctorRow("one", "wandb", "optional", "not installed", "for logging", "pip install wandb"),
    DoctorRow("two", "a\x1b]0;x\x07", "problem", "raises\n  b\udcff", "c\x1b[2J", "d\x1b[1m\ud800"),
]


def test_the_report() -> None:
    """No code of a terminal is printed, nor a lone surrogate, at which print would raise."""
    assert list(lines(ROWS)) == [
        "one",
        "  ok        torch: 2.13.0",
        "  optional  wandb: not installed",
        "            needed: for logging",
        "            fix: pip install wandb",
        "",
        "two",
        "  problem   a\\x1b]0;x\\x07: raises",
        "              b\\udcff",
        "            needed: c\\x1b[2J",
        "            fix: d\\x1b[1m\\ud800",
    ]
    said = "1 problem: a run could not start (1 optional: missing, low or untested)"
    assert summary_line(ROWS, "a run") == said
    assert summary_line(ROWS[:1], "a.py") == "no problem: a.py could start"
    told = json.loads(as_json(ROWS))
    assert [row["fix"] for row in told["rows"]][:2] == ["", "pip install wandb"]
    assert [told["ok"], json.loads(as_json(ROWS[:2]))["ok"]] == [False, True]


def test_a_section_that_raises_fails_only_itself() -> None:
    def broken() -> Any:
        yield ROWS[0]
        raise KeyError("MemTotal")

    first, last = guarded("one", broken)
    assert first is ROWS[0]
    assert last.found == "could not be looked at: KeyError: 'MemTotal'"


@pytest.mark.parametrize("words", ["--json a.py --steps 3", "a.py --steps 3 --json"])
def test_the_command_line(words: str) -> None:
    assert DoctorArguments.of(words.split()) == DoctorArguments(Path("a.py"), ("--steps", "3"), True)
    assert DoctorArguments.of(["--json"]) == DoctorArguments(None, (), True)


def test_trials_that_end_their_process_leave_what_was_found_before(monkeypatch: pytest.MonkeyPatch) -> None:
    told = json.dumps({"problems": ["steps=0: must be at least 1"], "facts": None, "trials": None}) + "\n"
    child = SimpleNamespace(output=told, code=-9, reason=lambda: "killed by signal 9")
    monkeypatch.setattr(recipe, "run_module", lambda *_: child)
    rows, facts = recipe.check_recipe(ROOT / "recipes/demo_cpu.py", [])
    assert [row.state for row in rows] == ["problem", "optional"]
    assert rows[1].found == "its process did not end them: killed by signal 9"
    assert facts is None
