"""NCCL's settings that one group of trainer and servers must share: a server's own, set before any group."""

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
from bapo_megatron.config import DataConfig, ModelConfig, RolloutConfig, RunConfig, SglangConfig
from bapo_megatron.policy import layout
from bapo_megatron.rollout.engines.sglang.backend import SglangBackend
from bapo_megatron.rollout.weight_sync.broadcast import SendingGroup

MEMORY, MULTICAST = NAMES = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {name: value for name, value in os.environ.items() if name not in NAMES}
    monkeypatch.setattr(os, "environ", own)


def settings(cuda: bool = True, **sglang: Any) -> dict[str, str]:
    """What a training process has then."""
    rollout = RolloutConfig(engine="sglang", sglang=SglangConfig(**{"sync": "broadcast", **sglang}))
    SglangBackend().prepare_process(rollout, cuda)
    return {name: os.environ[name] for name in NAMES if name in os.environ}


def test_a_training_process_takes_the_settings_that_a_server_gives_itself() -> None:
    """``_set_envs_and_config`` in SGLang's engine.py: 0, unless the environment says otherwise."""
    assert settings() == {MEMORY: "0", MULTICAST: "0"}


@pytest.mark.parametrize(
    ("flag", "set_by_it"),
    [
        ("--enable-symm-mem", {MEMORY: "1", MULTICAST: "1"}),
        ("--enable-nccl-nvls", {MEMORY: "0", MULTICAST: "1"}),
    ],
)
def test_flags_that_change_a_servers_settings_change_the_trainers(
    flag: str, set_by_it: dict[str, str]
) -> None:
    assert settings(flags=(flag,)) == set_by_it


def test_the_users_settings_stay() -> None:
    """Servers leave them alone, too."""
    os.environ[MEMORY] = "1"
    assert settings() == {MEMORY: "1", MULTICAST: "0"}


@pytest.mark.parametrize(("cuda", "sync"), [(False, "broadcast"), (True, "disk"), (True, "ipc")])
def test_without_a_common_group_nothing_is_set(cuda: bool, sync: str) -> None:
    assert settings(cuda, sync=sync, colocated=sync == "ipc") == {}


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
