"""cluster/install.sh on a made-up pip, Python and nvcc: their calls, and what a second try does."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.executables import executable

ROOT = Path(__file__).parents[3]
CLUSTER = ROOT / "cluster"
PYTHON = """#!/bin/bash
# `python -m venv FOLDER`, `python -m pip ...`, and all else by the real one.
if [[ "$1 $2" = "-m venv" ]]; then mkdir -p "$3/bin" && cp -f "$TEST_FOLDER/bin/python" "$3/bin" && exit; fi
if [[ "$*" = "-m pip --version" ]]; then exit; fi
if [[ "$2" = *torch.version.cuda* ]]; then [[ ! -e $TEST_FOLDER/cpu_build ]] && exit || exit 1; fi
if [[ "$1 $2" != "-m pip" ]]; then exec REAL "$@"; fi
shift 2
echo "$*" >>"$TEST_FOLDER/calls"
env >"$TEST_FOLDER/$1.environment"
while [[ $# -gt 1 ]]; do
    case $1 in
    --dest) mkdir -p "$TEST_FOLDER/made-1" && tar -czf "$2/made-1.tar.gz" -C "$TEST_FOLDER" made-1 ;;
    --wheel-dir)
        if [[ -e $TEST_FOLDER/broken ]]; then echo "a compiler failed" >&2; touch "${!#}/object.o"; exit 1; fi
        name=$(basename "${!#}") name=${name#source-}
        version=${name##*-} name=${name%-*}
        mkdir -p "$2" && touch "$2/${name//-/_}-$version-cp311.whl" && cp "$TEST_FOLDER/wheel.environment" \
            "$TEST_FOLDER/$name.environment" ;;
    esac
    shift
done
"""
NVCC = """#!/bin/bash
case $1 in --version) echo "Cuda tools, release RELEASE, V1" ;; --dryrun) echo '#$ TOP=TOP' >&2 ;; esac
"""


@dataclass
class Machine:
    """Its folder of programs, and what was called."""

    folder: Path

    def install(self, kind: str, venv: str = "venv", **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "PYTHON": str(self.folder / "bin/python"),
            "TEST_FOLDER": str(self.folder),
            "CLUSTER_WHEELS": str(self.folder / "wheels"),
        }
        command = ["bash", str(CLUSTER / "install.sh"), kind, str(self.folder / venv)]
        return subprocess.run(command, env=environment | variables, capture_output=True, text=True)

    def calls(self) -> list[str]:
        """Calls of pip since the last question."""
        path = self.folder / "calls"
        found = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return found

    def environment(self, command: str) -> dict[str, str]:
        lines = (self.folder / f"{command}.environment").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def has(self, gigabytes: str, cores: object, limit: str) -> None:
        """This memory, as many cores, and ``limit``, which tells a control group's."""
        for name, text in (("awk", f"echo {gigabytes}"), ("nproc", f"echo {cores}"), ("cat", limit)):
            self.add(f"bin/{name}", f"#!/bin/sh\n{text}\n")

    def add(self, name: str, text: str) -> Path:
        return executable(self.folder / name, text)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """With CUDA 13, whose nvcc is a link in PATH, beside which there are no headers."""
    made = Machine(tmp_path)
    made.add("bin/python", PYTHON.replace("REAL", sys.executable))
    toolkit = tmp_path / "cuda"
    nvcc = made.add("cuda/bin/nvcc", NVCC.replace("RELEASE", "13.0").replace("=TOP", f"={toolkit}/bin/.."))
    (tmp_path / "bin/nvcc").symlink_to(nvcc)
    return made


def test_a_torch_without_cuda_is_refused_before_anything_is_compiled(machine: Machine) -> None:
    """Transformer Engine's setup fails on it with "Invalid version: None"."""
    machine.add("cpu_build", "#!")
    done = machine.install("trainer")
    assert done.returncode == 2
    assert "error: pip has installed a torch without CUDA: its index or find-links" in done.stderr
    assert "transformer-engine-torch" not in str(machine.calls())


def test_every_step_of_an_installation_in_its_order(machine: Machine) -> None:
    """pip is pinned and first, NCCL last; torch is there to compile against; no flash-attn on Hopper."""
    done = machine.install("trainer", CLUSTER_ARCH="9.0")
    assert done.returncode == 0, done.stderr
    calls = machine.calls()
    assert calls[0] == "install pip==26.3"
    assert re.fullmatch(r"install -c \S+ -r cluster/build\.txt torch==[\d.]+", calls[1])
    assert calls[2].startswith("install --no-deps megatron-core==")
    assert re.search(r" transformer-engine-torch==[\d.]+$", calls[3])
    assert [call.split()[0] for call in calls[3:5]] == ["download", "wheel"]
    assert re.fullmatch(r"install --find-links \S+ -c \S+ -r cluster/trainer\.txt -e \.\[cluster\]", calls[5])
    assert re.fullmatch(r"install --no-deps reasoning-gym==\S+ champ-dataset==\S+", calls[6])
    assert calls[7:] == ["install --no-deps -r cluster/nccl.txt"]
    # Transformer Engine finds its headers in torch's wheels, and asks no download server.
    found = machine.environment("wheel")
    packages = found["CPATH"].partition("/nvidia/")[0]
    assert packages.endswith("site-packages")
    headers = (f"{packages}/nvidia/{name}/include" for name in ("cu13", "cudnn", "nccl"))
    assert found["CPATH"] == ":".join(headers)
    assert found["CUDA_HOME"] == str(machine.folder / "cuda")
    assert found["NVTE_PYTORCH_FORCE_BUILD"] == found["FLASH_ATTENTION_FORCE_BUILD"] == "TRUE"
    done = machine.install("sglang", "sglang")
    assert machine.calls() == [
        "install pip==26.3",
        "install -r cluster/sglang.txt",
        "install --no-deps -r cluster/nccl.txt",
    ]
    steps = [line for line in done.stdout.splitlines() if line.startswith("cluster/install.sh: ")]
    assert all(re.match(r"cluster/install\.sh: \d+ s, environment of \d+ MB: ", line) for line in steps)
    assert len(steps) == 3


OF_PYTHON = """import platform
platform.python_version = lambda: "VERSION"
platform.python_version_tuple = lambda: tuple("VERSION".split("."))
"""


@pytest.mark.parametrize(
    ("python", "megatron", "engine"), [("3.11.7", "0.16.1", "2.11.0"), ("3.12.1", "0.19.2", "2.20.2")]
)
def test_an_environment_gets_the_stack_of_its_python(
    machine: Machine, python: str, megatron: str, engine: str
) -> None:
    """All else that it gets is the same."""
    machine.add("place/sitecustomize.py", OF_PYTHON.replace("VERSION", python))
    done = machine.install("trainer", PYTHONPATH=str(machine.folder / "place"))
    assert done.returncode == 0, done.stderr
    calls = machine.calls()
    assert f"install --no-deps megatron-core=={megatron}" in calls
    assert calls[3].endswith(f" transformer-engine-torch=={engine}")
    [wheel] = (machine.folder / "wheels").glob("*/*.whl")
    assert wheel.name.startswith(f"transformer_engine_torch-{engine}-")


def test_flash_attention_is_compiled_for_one_architecture(machine: Machine) -> None:
    assert machine.install("trainer", CLUSTER_ARCH="8.9").returncode == 0
    found = machine.environment("wheel")
    assert (found["FLASH_ATTN_CUDA_ARCHS"], found["FLASH_ATTENTION_FORCE_BUILD"]) == ("80", "TRUE")
    *_, wheel, install, nccl = machine.calls()
    assert wheel.endswith("/source-flash-attn-2.8.3")
    assert re.fullmatch(r"install --no-deps --find-links \S+-sm80 -r cluster/flash_attn\.txt", install)
    assert nccl.endswith("cluster/nccl.txt")


def test_a_second_try_goes_on_and_another_environment_finds_the_wheel(machine: Machine) -> None:
    (machine.folder / "broken").touch()
    failed = machine.install("trainer")
    assert (failed.returncode, "a compiler failed" in failed.stderr) == (1, True)
    assert sum(call.startswith("download") for call in machine.calls()) == 1
    (machine.folder / "broken").unlink()
    [compiled] = (machine.folder / "wheels").glob("*/source-*/object.o")
    assert machine.install("trainer").returncode == 0
    kinds = [call.split()[0] for call in machine.calls()]
    assert (kinds.count("download"), kinds.count("wheel")) == (0, 1)  # in the folder that has the object
    assert not compiled.exists()
    for venv in ("venv", "of_another_checkout"):
        (machine.folder / "bin/nvcc").unlink(missing_ok=True)  # no compiler is needed any more
        assert machine.install("trainer", venv).returncode == 0
        assert {call.split()[0] for call in machine.calls()} == {"install"}


@pytest.mark.parametrize(
    ("gigabytes", "limit", "given", "transformer_engine", "flash_attention"),
    [
        ("7", "max", "", "3", "1"),
        ("99", "max", "", "5", "5"),
        ("7", "max", "4", "4", "4"),
        ("99", str(4 << 30), "", "2", "1"),  # of this machine's control group
    ],
)
def test_compilers_run_by_memory_unless_their_number_is_given(
    machine: Machine, gigabytes: str, limit: str, given: str, transformer_engine: str, flash_attention: str
) -> None:
    machine.has(gigabytes, 5, f"echo {limit}")
    for kind, expected in (("trainer", transformer_engine), ("flash_attn_wheel", flash_attention)):
        assert machine.install(kind, MAX_JOBS=given).returncode == 0
        assert machine.environment("wheel")["MAX_JOBS"] == expected


def test_each_package_of_one_installation_has_its_own_number_of_compilers(machine: Machine) -> None:
    machine.has("18", "${OMP_NUM_THREADS:-64}", "echo max")
    assert machine.install("trainer", CLUSTER_ARCH="8.0", OMP_NUM_THREADS="1").returncode == 0
    jobs = [machine.environment(name)["MAX_JOBS"] for name in ("transformer-engine-torch", "flash-attn")]
    assert jobs == ["9", "2"]


def test_a_wheel_and_a_source_of_another_version_are_left_alone(machine: Machine) -> None:
    assert machine.install("trainer").returncode == 0
    [wheel] = (machine.folder / "wheels").glob("*/*.whl")
    wheel.rename(wheel.with_name("transformer_engine_torch-2.9.0-cp311.whl"))
    (wheel.parent / "source-transformer-engine-torch-2.9.0").mkdir()
    machine.calls()
    assert machine.install("trainer").returncode == 0
    kinds = [call.split()[0] for call in machine.calls()]
    assert (kinds.count("download"), kinds.count("wheel")) == (1, 1)


def test_a_limit_of_the_first_version_of_control_groups_counts(machine: Machine) -> None:
    """Of a job's group or one above it, as Slurm makes them on RHEL 8."""
    groups = f"""case "$1" in
/sys/fs/cgroup/memory/slurm/job_1/memory.limit_in_bytes) echo {4 << 30} ;;
*/memory.limit_in_bytes) echo 9223372036854771712 ;;
*) exit 1 ;;
esac"""
    machine.has("99", 5, groups)
    own = "*:memory:*) echo /slurm/job_1/step_0"
    machine.add("bin/sed", f'#!/bin/sh\ncase "$*" in {own} ;; *:::*) ;; *) exec /usr/bin/sed "$@" ;; esac\n')
    assert machine.install("trainer").returncode == 0
    assert machine.environment("wheel")["MAX_JOBS"] == "2"


def without_nvcc(machine: Machine) -> dict[str, str]:
    for name in ("bash", "dirname", "realpath", "grep", "cut", "du", "mkdir", "cp", "sed", "cat"):
        (machine.folder / "bin" / name).symlink_to(f"/usr/bin/{name}")
    (machine.folder / "bin/nvcc").unlink()
    return {"PATH": str(machine.folder / "bin"), "CUDA_HOME": str(machine.folder / "nothing")}


def of_cuda_12(machine: Machine) -> dict[str, str]:
    machine.add("cuda/bin/nvcc", NVCC.replace("RELEASE", "12.9").replace("=TOP", f"={machine.folder}/cuda"))
    return {}


@pytest.mark.parametrize("change", [without_nvcc, of_cuda_12])
def test_without_a_compiler_of_cuda_13_one_line_says_what_to_do(
    machine: Machine, change: Callable[[Machine], dict[str, str]]
) -> None:
    done = machine.install("trainer", **change(machine))
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.fullmatch(
        r"error: CUDA_HOME=\S+ has no nvcc of CUDA 13, .*: load its module, or set CUDA_HOME", line
    )


def test_make_hands_on_its_variables() -> None:
    """The commands that would run, by make itself: nothing is installed."""
    variables = ("PYTHON=python3.11", "CLUSTER_ARCH=8.0", "CLUSTER_VENV=/opt/venv", "CLUSTER_WHEELS=/wheels")
    command = ["make", "-n", "-B", "cluster", *variables]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    call = 'PYTHON="python3.11" CLUSTER_ARCH="8.0" CLUSTER_WHEELS="/wheels" bash cluster/install.sh'
    assert f"{call} trainer /opt/venv\n" in shown
    assert f"{call} sglang .venv-cluster-sglang\n" in shown


FIRST_ENDS = r"""#!/bin/bash
# The lock is taken when another installation has made its wheel.
folder=$(dirname "$(readlink /proc/self/fd/9)")
for version in $(sed -n 's/^transformer-engine-torch==\([0-9.]*\).*/\1/p' FILE); do
    touch "$folder/transformer_engine_torch-$version-cp311.whl"
done
exec /usr/bin/flock "$@"
"""


def test_a_second_installation_waits_for_the_wheel_of_the_first(machine: Machine) -> None:
    machine.add("bin/flock", FIRST_ENDS.replace("FILE", str(CLUSTER / "trainer.txt")))
    done = machine.install("trainer")
    assert done.returncode == 0, done.stderr
    assert {call.split()[0] for call in machine.calls()} == {"install"}
