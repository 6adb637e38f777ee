"""The device of a machine: no process computes on a CPU where a GPU should be, unless it is asked to."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bapo_megatron.errors import ConfigError
from bapo_megatron.policy.device import has_cuda, select_device
from bapo_megatron.runtime import device
from bapo_megatron.runtime.device import gpu_problem, gpu_signs, prepare_device, uses_gpu

OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12040)."


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any sign of a GPU: its device files and its environment are made up."""
    for name in [*device._SLURM_GPUS, "CUDA_VISIBLE_DEVICES", device.DEVICE_VARIABLE]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device, "_DEVICE_FILES", (tmp_path / "dev", device._DEVICE_FILES[1]))
    monkeypatch.setattr(device, "_DRIVER_FILES", (tmp_path / "gpus", "*"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for folder in ("dev", "gpus"):
        (tmp_path / folder).mkdir()
    return tmp_path


def fail_with(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def init() -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "init", init)


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "asked"),
    [
        *((f"SLURM_{n}", "8", True) for n in ("GPUS", "GPUS_PER_NODE", "GPUS_ON_NODE", "JOB_GPUS")),
        *(("SLURM_GPUS", "h100:8", True), ("SLURM_JOB_GPUS", "0,1", True)),
        *(("SLURM_GPUS_ON_NODE", value, False) for value in ("0", "", "h100:0")),
    ],
)
def test_a_job_says_whether_it_asked_for_gpus(
    name: str, value: str, asked: bool, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where something has hidden what the job asked for."""
    monkeypatch.setenv(name, value)
    if hidden:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert list(gpu_signs()) == [f"{name}={value}"] * asked


def test_signs_of_the_machine(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bare_machine / "dev/nvidiactl").touch()  # no GPU
    assert (list(gpu_signs()), uses_gpu(), gpu_problem()) == ([], False, None)
    (bare_machine / "dev/nvidia3").touch()
    (bare_machine / "gpus/0000:18:00.0").mkdir()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert list(gpu_signs()) == [
        "CUDA_VISIBLE_DEVICES=3",
        f"{bare_machine}/dev/nvidia3 exists",
        f"{bare_machine}/gpus/0000:18:00.0 exists",
    ]
    for hidden in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert list(gpu_signs()) == []


def test_cuda_that_cannot_be_used_is_refused_with_its_reason(
    bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bare_machine / "dev/nvidia0").touch()
    fail_with(monkeypatch, RuntimeError(f"{OLD_DRIVER}\n"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match="this machine should have a GPU") as refused:
        uses_gpu()
    text = str(refused.value)
    assert text.startswith(f"this machine should have a GPU ({bare_machine}/dev/nvidia0 exists), but torch ")
    assert OLD_DRIVER in text
    assert "Its CUDA is 13.0: install a CUDA build" in text
    assert text.endswith("BAPO_DEVICE=cpu asks for the CPU")
    for choose in (has_cuda, select_device):  # every place that chooses a device asks the same function
        with pytest.raises(ConfigError, match="this machine should have a GPU"):
            choose()


def test_a_gpu_that_works_is_used_unless_the_cpu_is_asked_for(
    bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bare_machine / "dev/nvidia0").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert uses_gpu()
    assert gpu_problem() is None
    monkeypatch.setenv("BAPO_DEVICE", "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert not uses_gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not uses_gpu()
    assert gpu_problem() is None
    prepare_device()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""  # libraries must not find one either
    monkeypatch.setenv("BAPO_DEVICE", "tpu")
    with pytest.raises(ConfigError, match="BAPO_DEVICE='tpu': `cpu` asks for the CPU"):
        uses_gpu()


def test_expandable_segments_are_on_unless_the_user_sets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    prepare_device()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")
    prepare_device()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:512"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    prepare_device()
    assert "PYTORCH_ALLOC_CONF" not in os.environ


def test_kernels_are_compiled_on_the_own_machine(
    bare_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def nowhere() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    def prepared() -> list[str | None]:
        prepare_device()
        return [os.environ.pop(name, None) for name in names]

    names = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    for name in (*names, "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # restored at the end
        del os.environ[name]
    assert prepared() == [None, None], "a machine without a GPU"
    (bare_machine / "dev/nvidia0").touch()
    [folder] = {Path(str(path)).parent for path in prepared()}
    assert folder.parent == tmp_path
    assert socket.gethostname() in folder.name  # TMPDIR may be on a file system of all nodes
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert prepared() == [None, None], "others may write there, and ranks would load it"
    folder.chmod(0o700)
    with monkeypatch.context() as noexec:
        noexec.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
        assert prepared() == [None, None], "what was compiled there cannot be loaded"
    elsewhere = folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(elsewhere)
    assert prepared() == [None, None]
    folder.unlink()
    os.environ["TRITON_CACHE_DIR"] = "/scratch"
    assert prepared() == ["/scratch", str(folder / "inductor")]
    submitted = str(tmp_path / "bapo-kernels-0-login/triton")  # sbatch hands the environment on to nodes
    os.environ["TRITON_CACHE_DIR"] = submitted
    assert prepared() == [str(folder / name) for name in ("triton", "inductor")]
    os.environ["TRITON_CACHE_DIR"] = submitted
    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    assert prepared() == [None, None]
