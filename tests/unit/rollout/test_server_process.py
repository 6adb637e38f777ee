"""What a server process is given: its temporary folder, NCCL's settings, the library that is preloaded."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from bapo_megatron.commands import train
from bapo_megatron.commands.doctor.sglang import compilers_row, preload_row
from bapo_megatron.config import DataConfig, ModelConfig, RolloutConfig, RunConfig, SglangConfig
from bapo_megatron.policy import layout
from bapo_megatron.rollout.engines.sglang.backend import SglangBackend
from bapo_megatron.rollout.engines.sglang.requirements import library_path
from bapo_megatron.rollout.engines.sglang.server_process import private_folder, server_environment
from bapo_megatron.rollout.engines.sglang_cpu import stand_ins
from bapo_megatron.rollout.weight_sync.broadcast import SendingGroup
from bapo_megatron.runtime.child_process import CommandResult


@pytest.mark.parametrize("parent", ["missing", "too long for sockets"])
def test_an_unusable_parent_is_replaced_by_tmp(parent: str, tmp_path: Path) -> None:
    """TMPDIR of a job's node is often not there in its container."""
    long = tmp_path / ("x" * 60)
    long.mkdir()
    made = Path(private_folder("/nowhere" if parent == "missing" else str(long)))
    assert made.parent == Path("/tmp")
    assert made.stat().st_mode & 0o777 == 0o700
    assert len(f"/{'x' * 46}/{made.name}") + 45 <= 107
    made.rmdir()


MEMORY, MULTICAST = NAMES = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {name: value for name, value in os.environ.items() if name not in NAMES}
    monkeypatch.setattr(os, "environ", own)


def settings(cuda: bool = True, **sglang: Any) -> dict[str, str]:
    """What a training process has then."""
    rollout = RolloutConfig(engine="sglang", sglang=SglangConfig(**{"sync": "broadcast", **sglang}))
    SglangBackend().prepare_process(rollout, cuda)
    return {name: os.environ[name] for name in NAMES if name in os.environ}


@pytest.mark.parametrize(
    ("own", "cuda", "sglang", "expected"),
    [
        ({}, True, {}, {MEMORY: "0", MULTICAST: "0"}),
        ({}, True, {"flags": ("--enable-symm-mem",)}, {MEMORY: "1", MULTICAST: "1"}),
        ({}, True, {"flags": ("--enable-nccl-nvls",)}, {MEMORY: "0", MULTICAST: "1"}),
        ({MEMORY: "1"}, True, {}, {MEMORY: "1", MULTICAST: "0"}),  # a user's; servers leave it alone, too
        ({}, False, {}, {}),
        ({}, True, {"sync": "disk"}, {}),
    ],
)
@pytest.mark.usefixtures("environment")
def test_a_training_process_takes_the_settings_that_a_server_gives_itself(
    own: dict[str, str], cuda: bool, sglang: dict[str, Any], expected: dict[str, str]
) -> None:
    """``_set_envs_and_config`` in SGLang's engine.py, where both are in one group."""
    os.environ.update(own)
    assert settings(cuda, **sglang) == expected


@pytest.mark.usefixtures("environment")
def test_every_rank_has_them_before_its_first_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL reads them once, when the first group is made."""
    seen: list[str | None] = []

    class Stopped(Exception):
        """In place of the process group."""

    def groups(_: Any) -> None:
        seen.append(os.environ.get(MEMORY))
        raise Stopped

    monkeypatch.setattr(layout, "parallel_processes", groups)
    monkeypatch.setattr("bapo_megatron.runtime.device.should_have_gpu", lambda: True)
    rollout = RolloutConfig(engine="sglang", sglang=SglangConfig(sync="broadcast"))
    config = RunConfig("x", ModelConfig(Path("m")), DataConfig(Path("d")), rollout=rollout, run_dir=tmp_path)
    by_disk, replayed = replace(rollout, sglang=SglangConfig()), replace(rollout, replay=tmp_path)
    for one in (config, *(replace(config, rollout=other) for other in (by_disk, replayed))):
        os.environ.pop(MEMORY, None)
        with pytest.raises(Stopped):
            train.train_process(one)
    assert seen == ["0", None, None]


@pytest.mark.usefixtures("environment")
def test_a_dead_receiver_is_an_error_of_the_broadcast_and_no_watchdogs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a played GPU. A watchdog of the group would end the process, long after the sync by disk."""
    made_with: list[str | None] = []
    name = "TORCH_NCCL_BLOCKING_WAIT"

    def make(*_arguments: Any, **_named: Any) -> tuple[str, None]:
        made_with.append(os.environ.get(name))
        return "group", None

    def wait() -> None:
        raise RuntimeError("remote process exited")

    work = SimpleNamespace(is_completed=lambda: True, wait=wait)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(record_event=object))
    monkeypatch.setattr(c10d, "_new_process_group_helper", make)
    monkeypatch.setattr(dist, "broadcast", lambda *_arguments, **_named: work)
    group = SendingGroup("127.0.0.1", "weights", 1, torch.device("cpu"), 60.0)
    group._stream = SimpleNamespace(wait_event=lambda _: None)  # type: ignore[assignment]
    try:
        group.form().result()
        assert made_with == ["1"]
        assert name not in os.environ
        assert "remote process exited" in str(group.broadcast(torch.zeros(1)).exception())
    finally:
        c10d._world.pg_group_ranks.pop("group", None)  # type: ignore[call-overload]


def test_library_path_finds_the_cuda_runtime_of_the_servers_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the memory saver, which SGLang preloads, does not load, as the doctor says."""
    folder, python = tmp_path / "nvidia/cu13/lib", tmp_path / "python"
    folder.mkdir(parents=True)
    (folder / "libcudart.so.13").touch()
    python.write_text(f"#!/bin/sh\necho {tmp_path}/nvidia\n")
    python.chmod(0o755)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/of/the/site")
    environment = server_environment(cuda=True, colocated=True, python=python)
    assert environment["LD_LIBRARY_PATH"] == f"{folder}:/of/the/site"
    assert library_path(Path("/nowhere/python"), None) is None
    lacks = "libcudart.so.13: cannot open shared object file"
    row = preload_row(CommandResult("", lacks, "exit code 127", 127), python, required=True)
    assert (row.state, lacks in row.found) == ("problem", True)
    assert "pip install nvidia-cuda-runtime" in row.fix


def test_a_gpu_server_finds_the_programs_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang and FlashInfer start `ninja` by its name, and no one activates their environment: not Slurm, not
    a container. The trainer's, which may be active, has another."""
    paths = {
        "/trainers:/usr/bin": "/servers:/trainers:/usr/bin",
        "/of/a/module:/servers": "/of/a/module:/servers",  # its compilers stay first
    }
    for before, after in paths.items():
        monkeypatch.setenv("PATH", before)
        assert server_environment(cuda=True, python=Path("/servers/python"))["PATH"] == after


TOOLKIT = ("bin/nvcc", "include/cuda_runtime.h")


def test_doctor_looks_for_the_compilers_where_servers_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no variable names the toolkit, it is the folder above an nvcc of PATH, though that be a link."""
    monkeypatch.setattr("bapo_megatron.commands.doctor.sglang._CUDA", tmp_path / "usr")

    def make(*names: str) -> None:
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("#!/bin/sh\n")
            path.chmod(0o755)

    def found(**variables: Path) -> tuple[str, str]:
        environment = {"PATH": f"{tmp_path / 'links/bin'}:{tmp_path / 'tools'}"}
        environment |= {name: str(value) for name, value in variables.items()}
        row = compilers_row(environment, required=True)
        assert row.state == "ok" or "set CUDA_HOME to the folder that has bin/nvcc" in row.fix
        return row.state, row.found.replace(str(tmp_path), "")

    lacking = "; ".join(f"no {file} in /usr" for file in TOOLKIT)
    assert found() == ("problem", f"no ninja; {lacking}")
    make("tools/ninja", *(f"usr/{file}" for file in TOOLKIT))
    assert found() == ("ok", "/usr/bin/nvcc")
    make("links/bin/nvcc")
    assert found() == ("problem", "; ".join(f"no {file} in /links" for file in TOOLKIT[1:]))
    assert found(CUDA_HOME=tmp_path / "usr") == ("ok", "/usr/bin/nvcc")  # it has precedence
    assert found(CUDA_PATH=tmp_path / "none")[0] == "problem"
    assert compilers_row({"PATH": "", "CUDA_PATH": "/none"}, required=False).state == "optional"


@pytest.mark.parametrize("loads", [True, False])
def test_torchvisions_operators_are_stood_in_for_where_its_own_do_not_load(
    loads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may register them once: beside torchvision's own the stand-ins end SGLang's import."""
    (tmp_path / "torchvision").mkdir()
    for name in ("__init__.py", "_C_stable.so"):
        (tmp_path / "torchvision" / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    opened: list[Path] = []

    def load(path: Path) -> None:
        opened.append(path)
        if not loads:
            raise OSError("libtorch_cuda.so: cannot open shared object file")

    defined: list[str] = []
    made = SimpleNamespace(define=defined.append)
    monkeypatch.setattr(stand_ins.torch.ops, "load_library", load)
    monkeypatch.setattr(stand_ins.torch.library, "Library", lambda *_: made)
    monkeypatch.setattr(stand_ins, "_library", None)
    monkeypatch.setattr(stand_ins, "_triton", lambda: None)
    stand_ins.install()
    stand_ins.install()
    assert opened == [tmp_path / "torchvision/_C_stable.so"]
    assert [text.partition("(")[0] for text in defined] == ([] if loads else ["nms", "qnms"])
