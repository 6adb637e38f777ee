"""The library that SGLang preloads into schedulers: it must find a CUDA runtime that lies in a wheel alone.

Real libraries are compiled: one that needs a ``libcudart.so`` as torch_memory_saver's does, and a runtime in
the folder where NVIDIA's wheel puts it. The interpreter has an environment of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from bapo_megatron.commands.doctor.sglang import compilers_row, preload_row
from bapo_megatron.rollout.engines.sglang.requirements import library_path, tried_preload
from bapo_megatron.rollout.engines.sglang.server_process import server_environment

RUNTIME = "libcudart.so.99"
"""No machine has it elsewhere."""
SAVER = """
import os
from contextlib import contextmanager
from pathlib import Path

@contextmanager
def configure_subprocess():
    os.environ["LD_PRELOAD"] = str(Path(__file__).with_name("preload.so"))
    yield
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter whose environment has the two libraries."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    folder = packages / "nvidia/cu13/lib"
    folder.mkdir(parents=True)
    (packages / "torch_memory_saver.py").write_text(SAVER)
    made = (
        ("int runtime(void) { return 0; }", folder / RUNTIME, [f"-Wl,-soname,{RUNTIME}"]),
        (
            "int runtime(void); int saver(void) { return runtime(); }",
            packages / "preload.so",
            [str(folder / RUNTIME)],
        ),
    )
    for text, library, flags in made:
        source = tmp_path / "source.c"
        source.write_text(text)
        command = [compiler, "-shared", "-fPIC", "-o", str(library), str(source), *flags]
        subprocess.run(command, check=True)
    return environment / "bin/python"


def test_library_path_finds_the_cuda_runtime_of_the_servers_environment(
    python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/of/the/site")
    alone = tried_preload(python, server_environment(cuda=True), 60)
    assert alone.code == 127
    row = preload_row(alone, python, required=True)
    assert (row.state, row.name) == ("problem", "memory saver")
    assert f"{RUNTIME}: cannot open shared object file" in row.found
    assert "pip install nvidia-cuda-runtime" in row.fix
    environment = server_environment(cuda=True, colocated=True, python=python)
    folder, site = environment["LD_LIBRARY_PATH"].split(os.pathsep)
    assert Path(folder).parts[-3:] == ("nvidia", "cu13", "lib")
    assert site == "/of/the/site"
    found = tried_preload(python, environment, 60)
    assert not found.ended, found
    assert preload_row(found, python, required=True).state == "ok"


def test_a_gpu_server_finds_the_programs_of_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang and FlashInfer start `ninja` by its name, and no one activates their environment: not Slurm, not
    a container. The trainer's, which may be active, has another."""
    for folder in ("servers", "trainers"):
        for name in ("python", "ninja"):
            program = tmp_path / folder / name
            program.parent.mkdir(exist_ok=True)
            program.write_text("#!/bin/sh\n")
            program.chmod(0o755)
    python = tmp_path / "servers/python"
    for path in (str(tmp_path / "trainers"), "/usr/bin", None):
        if path is None:
            monkeypatch.delenv("PATH")
        else:
            monkeypatch.setenv("PATH", path)
        environment = server_environment(cuda=True, python=python)
        assert shutil.which("ninja", path=environment["PATH"]) == str(tmp_path / "servers/ninja")
        assert environment["PATH"].split(os.pathsep)[1:] == (path or os.defpath).split(os.pathsep)
    present = os.pathsep.join(["/of/a/module", str(python.parent)])
    monkeypatch.setenv("PATH", present)
    assert server_environment(cuda=True, python=python)["PATH"] == present, "its compilers stay first"
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("BAPO_SGLANG_PYTHON", str(python))
    assert server_environment(cuda=True)["PATH"].startswith(f"{python.parent}{os.pathsep}")


def test_doctor_looks_for_the_compilers_where_servers_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bapo_megatron.commands.doctor.sglang._CUDA", tmp_path / "usr")
    programs = {
        name: tmp_path / name for name in ("path/ninja", "path/nvcc", "home/bin/nvcc", "usr/bin/nvcc")
    }
    for program in programs.values():
        program.parent.mkdir(parents=True, exist_ok=True)

    def found(**variables: Path) -> tuple[str, str]:
        environment = {"PATH": str(tmp_path / "path")} | {
            name: str(value) for name, value in variables.items()
        }
        row = compilers_row(environment, required=True)
        return row.state, row.found

    assert found() == ("problem", "no ninja and no nvcc")
    for name in ("path/ninja", "usr/bin/nvcc"):
        programs[name].write_text("#!/bin/sh\n")
        programs[name].chmod(0o755)
    assert found() == ("ok", str(programs["usr/bin/nvcc"]))
    programs["path/nvcc"].write_text("#!/bin/sh\n")
    programs["path/nvcc"].chmod(0o755)
    assert found() == ("ok", str(programs["path/nvcc"]))
    assert found(CUDA_HOME=tmp_path / "home") == ("problem", "no nvcc")  # it has precedence
    assert compilers_row({"PATH": "", "CUDA_PATH": "/none"}, required=False).state == "optional"


def test_library_path_works_with_an_interpreter_before_3_11(python: Path, tmp_path: Path) -> None:
    """Such an interpreter has no ``-P``."""
    older = tmp_path / "python3.10"
    older.write_text(f'#!/bin/sh\nif [ "$1" = -P ]; then exit 2; fi\nexec {python} "$@"\n')
    older.chmod(0o755)
    found = library_path(older, None)
    assert found is not None
    assert Path(found).parts[-3:] == ("nvidia", "cu13", "lib")


def test_library_path_is_unchanged_without_a_cuda_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert library_path(Path(sys.executable), None) is None
    assert library_path(Path(sys.executable), "/of/the/site") == "/of/the/site"
    assert library_path(Path("/nowhere/python"), None) is None
