"""Time-sharing on one rank, with engines, a policy and a driver that note what they are told."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from bapo_megatron.config import (
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    SglangConfig,
)
from bapo_megatron.errors import RunStopped
from bapo_megatron.rollout.engines.backend import EngineServers
from bapo_megatron.rollout.weight_sync.disk import SenderParts
from bapo_megatron.rollout.weight_sync.ipc import IpcSync
from bapo_megatron.trainer import gpu_handover
from bapo_megatron.trainer.gpu_handover import GpuHandover

pytestmark = pytest.mark.usefixtures("one_process_group")

GB = 10**9
ROOM = 80 * GB
WEIGHTS = 10 * GB
KEPT = 6 * GB
"""What the configuration lets a server keep."""

CONFIG = RunConfig(
    "shared",
    ModelConfig(Path("m")),
    DataConfig(Path("d")),
    parallel=ParallelConfig(offload=True),
    rollout=RolloutConfig(
        engine="sglang",
        sglang=SglangConfig(servers=2, colocated=True, kept_gb=KEPT / GB, release_minutes=0.05),
    ),
)


class Scene(EngineServers):
    """All parts at once: policy, sampler, servers and driver, and what was called, in order."""

    urls = ("one", "two")

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.alive = {"one": False, "two": False}
        self.memory = {"policy": 50 * GB, "one": 0, "two": 0}
        self.refuses_release: set[str] = set()
        self.refuses_wake: set[str] = set()
        self.fails: dict[str, str] = {}
        """The call of a hand-over at which an engine fails."""
        self.keeps: dict[str, int] = {}
        """What a server that says that it has released its memory still has."""
        self.looks_until_free = 0
        """So often the driver is asked in vain."""
        self.handing: list[str] = []
        """The engines that continue in the current update by handles."""
        self.stopped_at: str | None = None
        """The call with which the sampler's process ends for good."""
        self.events: list[dict[str, Any]] = []

    def offload(self, keep_weights: bool = False) -> int:
        self.calls.append("set aside" if keep_weights else "offload")
        before, self.memory["policy"] = self.memory["policy"], WEIGHTS if keep_weights else 0
        return before - self.memory["policy"]

    def reload(self) -> None:
        self.calls.append("reload")
        if not self.memory["policy"] and self.free() < 50 * GB:
            self.calls.pop()
            raise torch.OutOfMemoryError("no memory for the policy")
        self.memory["policy"] = 50 * GB

    def release(self) -> list[str]:
        self._sampler("release")
        released = [name for name in self.running() if name not in self.refuses_release]
        for name in released:
            self.memory[name] = self.keeps.get(name, KEPT // 2)
        return released

    def wake(self, names: Sequence[str]) -> list[str]:
        self._sampler(f"wake {' '.join(names)}")
        assert not self.memory["policy"], "an engine wakes where the policy is"
        for name in names:
            self.memory[name] = 30 * GB
        return [name for name in names if name not in self.refuses_wake]

    def admit(self) -> None:
        self._sampler("admit")

    def _sampler(self, call: str) -> None:
        self.calls.append(call)
        if call.split()[0] == self.stopped_at:
            raise RunStopped("the sampler's process ended 6 times in a row")

    def expect_handles(self, version: int, step: int) -> None:
        self._sampler(f"expect {version} of {step}")

    def update(self, call: str, *arguments: Any) -> list[str]:
        if call == "begin":
            self.handing = list(arguments[1])
        self._sampler(call if call == "receive" else f"{call} {' '.join(self.handing)}")
        away = call == "resume"
        held = 0 if away else WEIGHTS
        assert self.memory["policy"] == held, "an engine has the policy's place, or not its weights to read"
        if call != "receive":
            self.memory |= dict.fromkeys(self.handing, 30 * GB if away else 15 * GB)
        self.handing = self._going(call, self.handing)
        return self.handing

    def _going(self, call: str, names: Sequence[str]) -> list[str]:
        return [name for name in names if self.fails.get(name) != call]

    version = 4

    def hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.ones(3)

    def push(self, policy: Any, step: int) -> None:
        assert policy.memory["policy"] >= WEIGHTS, "the weights that are to be written are gone"
        self.calls.append(f"write {policy.version} of {step}")

    def discard(self) -> None:
        """Of older versions."""

    def checked(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        return weights

    def hold(self) -> None:
        self.calls.append("hold")

    def running(self) -> list[str]:
        return [name for name, alive in self.alive.items() if alive]

    def end(self, spared: Collection[str] = ()) -> None:
        ended = [name for name in self.running() if name not in spared]
        self.calls += [f"end {name}" for name in ended]
        for name in ended:
            self.alive[name], self.memory[name] = False, 0

    def start(self) -> None:
        assert not self.memory["policy"], "a server starts where the policy is"
        begun = [name for name, alive in self.alive.items() if not alive]
        self.calls += [f"start {name}" for name in begun]
        for name in begun:
            self.alive[name], self.memory[name] = True, 30 * GB

    def free(self) -> int:
        taken = sum(self.memory.values())
        if self.looks_until_free:
            self.looks_until_free -= 1
            taken += 40 * GB
        return ROOM - taken

    def since(self, place: int) -> list[str]:
        return self.calls[place:]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    made = Scene()
    clock = [0.0]
    monkeypatch.setattr(gpu_handover, "free_gpu_bytes", made.free)
    monkeypatch.setattr(gpu_handover, "monotonic", lambda: clock[0])
    monkeypatch.setattr(gpu_handover, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    return made


@pytest.fixture
def shared(scene: Scene) -> GpuHandover:
    parts: Any = scene
    return GpuHandover(CONFIG, parts, parts, parts, scene.events.append)


def test_each_side_waits_until_the_other_has_released_memory(scene: Scene, shared: GpuHandover) -> None:
    shared.to_policy()  # the policy has the GPUs at first
    assert scene.calls == []
    shared.to_engines()
    shared.to_engines()
    assert scene.calls == ["offload", "start one", "start two", "admit"]
    shared.to_policy()
    shared.to_policy()
    assert scene.since(4) == ["hold", "release", "reload"]
    shared.to_engines()
    assert scene.since(7) == ["offload", "wake one two", "admit"]
    assert set(shared.metrics()) == {"time/wake_s", "time/release_s"}
    assert scene.events == []


@pytest.fixture
def handing(scene: Scene) -> GpuHandover:
    """Shared GPUs, where weights go by handles."""
    parts: Any = scene
    sync = IpcSync(
        SenderParts(
            engine=SglangConfig(bucket_mb=1),
            disk=parts,
            client=parts,
            gpus={"one": [0], "two": [1]},
            device=torch.device("cpu"),
            on_event=scene.events.append,
            make_digester=None,
        )
    )
    sync.push(parts, 6)
    return GpuHandover(CONFIG, parts, parts, parts, scene.events.append, sync)


WAKE = ["set aside", "begin one two", "receive", "confirm one two", "offload", "resume one two", "admit"]


def test_engines_read_the_weights_before_these_are_offloaded(scene: Scene, handing: GpuHandover) -> None:
    """At first nobody can: the servers have yet to start. Later nothing is written."""
    handing.to_engines()
    assert scene.calls == ["expect 4 of 6", "write 4 of 6", "offload", "start one", "start two", "admit"]
    for _ in range(3):
        handing.to_policy()
        place = len(scene.calls)
        scene.memory["buffers"] = scene.memory.get("buffers", 0) + 2 * GB  # the trainer's
        handing.to_engines()
        assert scene.since(place) == WAKE
    handing.to_policy()
    assert scene.calls[-3:] == ["hold", "release", "reload"]
    assert scene.events == []


def test_the_baseline_is_exact_although_engines_hold_weights(scene: Scene, handing: GpuHandover) -> None:
    """The room is measured before they take any: what it lacks later is told."""
    for _ in range(3):
        handing.to_engines()
        handing.to_policy()
    scene.keeps = {"two": KEPT + 1}
    handing.to_engines()
    handing.to_policy()
    [event] = scene.events
    assert event["kind"] == "memory_kept"
    assert "of 74.0 GB are free" in event["reason"]


AGAIN = {"one": False, "two": True}
"""Which servers live, after the first has died asleep."""


@pytest.mark.parametrize(
    ("way", "faults", "calls"),
    [
        ("shared", {"refuses_wake": {"two"}}, "offload, wake one two, end two, start two, admit"),
        # To resume memory that a new process never released would end it.
        ("shared", {"alive": AGAIN}, "offload, wake two, start one, admit"),
        (
            "handing",
            {"alive": AGAIN},
            "set aside, begin two, receive, confirm two, write 4 of 6, offload, resume two, start one, admit",
        ),
        # The policy has left by then: the engine waits for the next weights.
        ("handing", {"fails": {"one": "resume"}}, ", ".join([*WAKE[:-1], "end one", "start one", "admit"])),
    ],
)
def test_an_engine_that_is_lost_asleep_or_does_not_wake_is_started_again(
    scene: Scene, way: str, faults: dict[str, Any], calls: str, request: pytest.FixtureRequest
) -> None:
    assert woken(scene, request.getfixturevalue(way), faults) == calls.split(", ")
    assert scene.running() == ["one", "two"]


def woken(scene: Scene, handover: GpuHandover, faults: dict[str, Any]) -> list[str]:
    """What is called where engines that ran before get the GPUs again, with these faults."""
    handover.to_engines()
    handover.to_policy()
    vars(scene).update(deepcopy(faults))
    place = len(scene.calls)
    handover.to_engines()
    return scene.since(place)


@pytest.mark.parametrize(
    ("way", "call"), [("shared", "wake"), *(("handing", call.split()[0]) for call in (*WAKE[1:4], WAKE[5]))]
)
def test_policies_outlive_samplers(scene: Scene, way: str, call: str, request: pytest.FixtureRequest) -> None:
    handover = request.getfixturevalue(way)
    if call in ("wake", "resume"):
        with pytest.raises(RunStopped, match="6 times in a row"):
            woken(scene, handover, {"stopped_at": call})
    else:  # the disk is tried
        woken(scene, handover, {"stopped_at": call})
        assert scene.events[0]["kind"] == "handover_failed"
    scene.stopped_at = None
    handover.to_policy()
    assert handover.policy_has_gpus
    assert scene.calls[-1] == "reload"


def test_a_policy_that_fits_beside_the_engines_is_not_offloaded(scene: Scene) -> None:
    parts: Any = scene
    scene.memory["policy"] = 0  # the scene asserts that nobody is there
    config = dataclasses.replace(CONFIG, parallel=ParallelConfig())
    shared = GpuHandover(config, parts, parts, parts, scene.events.append)
    shared.to_engines()
    shared.to_policy()
    assert scene.calls == ["start one", "start two", "admit", "hold", "release"]


WAKEN = "offload, wake one two, admit"


@pytest.mark.parametrize(
    ("faults", "taken", "given", "kinds"),
    [
        ({"looks_until_free": 5}, "hold, release, reload", WAKEN, []),  # it waits for the driver
        ({"keeps": {"one": KEPT // 2, "two": KEPT // 2}}, "hold, release, reload", WAKEN, []),
        (  # more than kept_gb, though they say that they have released it
            {"keeps": {"two": KEPT + 1}},
            "hold, release, end one, end two, reload",
            "offload, start one, start two, admit",
            ["memory_kept"],
        ),
        (
            {"refuses_release": {"one"}},
            "hold, release, end one, reload",
            "offload, wake two, start one, admit",
            [],
        ),
    ],
)
def test_engines_that_keep_their_memory_are_killed(
    scene: Scene, shared: GpuHandover, faults: dict[str, Any], taken: str, given: str, kinds: list[str]
) -> None:
    shared.to_engines()
    vars(scene).update(faults)
    place = len(scene.calls)
    shared.to_policy()
    shared.to_engines()
    assert scene.since(place) == [*taken.split(", "), *given.split(", ")]
    assert scene.looks_until_free == 0
    assert [event["kind"] for event in scene.events] == kinds
    assert all("of 74.0 GB are free" in event["reason"] for event in scene.events)


def test_memory_that_training_added_is_not_blamed_on_engines(scene: Scene, shared: GpuHandover) -> None:
    """Buffers of NCCL and workspaces come with the first update, and stay when the policy leaves."""
    shared.to_engines()
    for taken in (3, 6, 9, 19):  # the last is of another program, while engines were away
        shared.to_policy()
        scene.memory["buffers"] = taken * GB
        shared.to_engines()
    shared.to_policy()
    assert scene.events == []
    shared.to_engines()
    scene.memory["another program"] = 10 * GB
    with pytest.raises(RunStopped, match="51.0 of 55.0 GB are free"):
        shared.to_policy()


@pytest.mark.parametrize(
    ("taken", "fits", "message"),
    [(70, False, "the policy does not fit on"), (20, True, r"60\.0 of 74\.0 GB")],
)
def test_memory_never_freed(scene: Scene, shared: GpuHandover, taken: int, fits: bool, message: str) -> None:
    """For a last checkpoint."""
    shared.to_engines()
    scene.memory["another program"] = taken * GB
    with pytest.raises(RunStopped, match=message):
        shared.to_policy()
    assert shared.policy_has_gpus == ("reload" in scene.calls) == fits
    scene.memory["another program"] = 0
    shared.to_policy()
    assert scene.calls[-1] == "reload"


def test_a_run_without_a_sampler_can_still_save(scene: Scene, shared: GpuHandover) -> None:
    shared.to_engines()
    scene.stopped_at = "release"
    place = len(scene.calls)
    with pytest.raises(RunStopped, match="6 times in a row"):
        shared.to_policy()
    assert shared.policy_has_gpus
    shared.to_policy()  # as the checkpoint asks
    assert scene.since(place) == ["hold", "release", "end one", "end two", "reload"]


@pytest.mark.parametrize(
    ("part", "error", "message", "calls"),
    [
        ("offload", "CUDA error: out of memory", "no host memory for the offloaded policy", []),
        ("start", "the server at one ended: no such flag", "no such flag", ["offload"]),
    ],
)
def test_a_hand_over_that_cannot_be_made_stops_the_run(
    scene: Scene,
    shared: GpuHandover,
    part: str,
    error: str,
    message: str,
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> int:
        raise RuntimeError(error)

    monkeypatch.setattr(scene, part, refuse)
    with pytest.raises(RunStopped, match=message):
        shared.to_engines()
    assert scene.calls == calls
    shared.to_policy()
    assert shared.policy_has_gpus
