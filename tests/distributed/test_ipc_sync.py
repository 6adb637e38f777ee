"""Weights through the trainer's memory: which rank an engine reads, what it reads, and who goes without."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.config import ParallelConfig, SglangConfig
from bapo_megatron.hf.weight_stream import checked_weights
from bapo_megatron.rollout.engines.sent_weights import SentDigests
from bapo_megatron.rollout.weight_sync import ipc
from bapo_megatron.rollout.weight_sync.disk import SenderParts
from bapo_megatron.rollout.weight_sync.ipc import IpcSync
from tests.support.plain_digester import PlainDigester, plain_digests
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed

LAYOUT = ParallelConfig(data=4)
"""Four processes, two replicas of two ranks each, says the policy."""
GPUS = {"one": [0], "two": [2, 3], "three": [1], "far": [9]}
"""There is no rank 9: on a CPU rank 0 stands for it."""


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [90, 300, 30, 500, 7, 64, 64, 64]
    return {f"w{n}": torch.randn(size, generator=generator).bfloat16() for n, size in enumerate(sizes)}


class Gathered:
    """A policy whose weights take a collective of its replica for each tensor, as gathering does."""

    version = 4

    def __init__(self, lacks: str = "") -> None:
        self._lacks = lacks
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        self.data_rank = dist.get_rank() // 2
        self._group = groups[self.data_rank]
        self.ran_to_its_end = 0

    def hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors().items():
            dist.all_reduce(torch.zeros(1), group=self._group)
            if name != self._lacks:
                yield name, tensor
        self.ran_to_its_end += 1


class Engines:
    """Engines that read what they are given; each call may fail for some."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.read: dict[str, list[dict[str, Tensor]]] = {}
        """By the engine, for each of its processes."""
        self.readers: dict[str, list[int]] = {}
        """By the engine, the process ids whose memory its processes read."""
        self.sent: list[SentDigests | None] = []
        self.fails: dict[str, str] = {}
        """The call at which an engine fails."""
        self.going: list[str] = []

    def _going(self, call: str, names: Sequence[str]) -> list[str]:
        self.calls.append(f"{call} {' '.join(names)}")
        return [name for name in names if self.fails.get(name) != call]

    def expect_handles(self, version: int, step: int) -> None:
        self.calls.append(f"expect {version} of {step}")

    def update(self, call: str, *arguments: Any) -> list[str]:
        if call == "begin":
            if self.fails.get("all") == "begin":
                raise ValueError("no such call")
            version, self.going = arguments
            self.going = self._going(f"begin {version}", self.going)
        elif call == "receive":
            self.going = self.receive(*arguments)
        else:
            self.sent += arguments
            self.going = self._going("confirm", self.going)
        return self.going

    def receive(self, handles: Mapping[str, Sequence[bytes]]) -> list[str]:
        for name, processes in handles.items():
            read = self.read.setdefault(name, [{} for _ in processes])
            for index, pickled in enumerate(processes):
                self.readers.setdefault(name, [0] * len(processes))[index] = owner(pickled)
                read[index] |= {tensor: value.clone() for tensor, value in pickle.loads(pickled)}
        return self._going("receive", list(handles))


def owner(pickled: bytes) -> int:
    """The process whose memory is named: torch's names of shared memory say it."""
    name = next(part for part in pickled.split(b"/") if part.startswith(b"torch_"))
    return int(name.split(b"_")[1])


class Disk:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def push(self, policy: Any, step: int) -> None:
        self.calls.append(f"write {policy.version} of {step}")

    def discard(self) -> None:
        self.calls.append("discard")

    def checked(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return checked_weights(weights, {name: tuple(one.shape) for name, one in tensors().items()}, {})


Scene = tuple[IpcSync, Gathered, Engines, Disk, list[dict[str, Any]]]


def scene(bucket_bytes: int = 700) -> Scene:
    engines, disk, events = Engines(), Disk(), list[dict[str, Any]]()
    is_main = dist.get_rank() == 0
    parts = SenderParts(
        engine=SglangConfig(bucket_mb=bucket_bytes / 2**20),
        disk=disk,  # type: ignore[arg-type]
        client=engines if is_main else None,  # type: ignore[arg-type]
        gpus=GPUS if is_main else {},
        device=torch.device("cpu"),
        on_event=events.append,
        make_digester=PlainDigester,
    )
    return IpcSync(parts), Gathered(), engines, disk, events


def handed_over() -> dict[str, Any]:
    """What each rank sees of hand-overs in which nothing goes wrong, and in which something does."""
    from os import getpid

    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, getpid())
    found: dict[str, Any] = {"pids": pids}
    for case, (fails, broken) in CASES.items():
        sync, policy, engines, disk, events = scene()
        engines.fails = fails
        sync.push(policy, 7)  # type: ignore[arg-type]
        with pytest.MonkeyPatch.context() as patch:
            if broken == dist.get_rank():
                patch.setattr(ipc, "handles_of", _no_handles)
            taken = sync.hand_over(policy, [*GPUS])  # type: ignore[arg-type]
        found[case] = {
            "taken": taken,
            "calls": engines.calls,
            "read": engines.read,
            "readers": engines.readers,
            "sent": engines.sent,
            "disk": disk.calls,
            "events": events,
            "ends": policy.ran_to_its_end,
        }
    return found


def _no_handles(_named: object) -> bytes:
    raise RuntimeError("CUDA error: invalid device context")


CASES: dict[str, tuple[dict[str, str], int | None]] = {
    "well": ({}, None),
    "begin": ({"two": "begin 4"}, None),
    "receive": ({"one": "receive", "far": "receive"}, None),
    "confirm": ({"three": "confirm"}, None),
    "none begins": (dict.fromkeys(GPUS, "begin 4"), None),
    "none receives": (dict.fromkeys(GPUS, "receive"), None),
    "the sampler fails": ({"all": "begin"}, None),
    "rank 3 fails": ({}, 3),
    "rank 0 fails": ({}, 0),
}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_layout(handed_over, LAYOUT)


def test_every_engine_reads_all_weights_from_the_ranks_on_its_gpus(ranks: list[dict[str, Any]]) -> None:
    well, pids = ranks[0]["well"], ranks[0]["pids"]
    assert [rank["well"]["taken"] for rank in ranks] == [[*GPUS]] * 4
    owners = {name: [pids[gpu] if gpu < 4 else pids[0] for gpu in gpus] for name, gpus in GPUS.items()}
    assert well["readers"] == owners
    expected = tensors()
    for name, gpus in GPUS.items():
        assert len(well["read"][name]) == len(gpus)
        for read in well["read"][name]:
            assert [*read] == [*expected]
            assert all(torch.equal(read[one], tensor) for one, tensor in expected.items())
    names = " ".join(GPUS)
    buckets = len([call for call in well["calls"] if call.startswith("receive")])
    assert buckets > 3
    assert well["calls"] == [
        "expect 4 of 7",
        f"begin 4 {names}",
        *[f"receive {names}"] * buckets,
        f"confirm {names}",
    ]
    assert well["sent"] == [plain_digests(expected.items())]
    assert all(rank["well"]["sent"] == [] for rank in ranks[1:])
    assert well["disk"] == ["discard"], "what is on the disk is of an older version"


@pytest.mark.parametrize("case", CASES)
def test_failed_engines_are_left_out_on_every_rank(case: str, ranks: list[dict[str, Any]]) -> None:
    fails, broken = CASES[case]
    left = [] if "all" in fails or broken is not None else [name for name in GPUS if name not in fails]
    assert [rank[case]["taken"] for rank in ranks] == [left] * 4
    calls = ranks[0][case]["calls"]
    for name, at in fails.items():
        later = [call for call in calls if name in call.split()]
        assert not later or later[-1].startswith(at)
    gathers = 0 if case in ("none begins", "the sampler fails") else 1  # to its end on every rank, or on none
    assert [rank[case]["ends"] for rank in ranks] == [gathers] * 4


@pytest.mark.parametrize("case", ["the sampler fails", "rank 3 fails", "rank 0 fails"])
def test_an_error_of_one_rank_is_raised_on_all(case: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        [event] = rank[case]["events"]
        assert event["kind"] == "handover_failed"
        assert event["version"] == 4
    told = " ".join(rank[case]["events"][0]["reason"] for rank in ranks)
    assert ("no such call" if case == "the sampler fails" else "CUDA error") in told


def lent_until() -> list[bool]:
    """Whether what an engine was given last still has its bytes when it is given the next, also a tensor that
    is larger than a bucket: one of its processes may answer for the others."""
    sync, policy, engines, *_ = scene()
    last: list[tuple[Tensor, Tensor]] = []
    intact = []

    def receive(given: Mapping[str, Sequence[bytes]]) -> list[str]:
        intact.extend(torch.equal(seen, copied) for seen, copied in last)
        read = [value for processes in given.values() for one in processes for _, value in pickle.loads(one)]
        last[:] = [(value, value.clone()) for value in read]
        return list(given)

    engines.receive = receive  # type: ignore[method-assign]
    sync.hand_over(policy, [*GPUS])  # type: ignore[arg-type]
    return intact


def test_a_bucket_stays_until_the_next_one_was_read() -> None:
    main, *others = run_layout(lent_until, LAYOUT)
    assert len(main) > 10
    assert all(main)
    assert others == [[], [], []]


def tampered() -> tuple[list[str], list[str]]:
    sync, _, _, _, events = scene()
    taken = sync.hand_over(Gathered(lacks="w3"), [*GPUS])  # type: ignore[arg-type]
    return taken, [event["reason"] for event in events]


def test_weights_of_another_model_reach_no_engine() -> None:
    for taken, reasons in run_layout(tampered, LAYOUT):
        assert taken == []
        assert "1 weights are missing: w3" in reasons[0]
