"""Collective mismatches between ranks, and memory needed by phase, on hand-made results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bapo_megatron.config import (
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    SglangConfig,
)
from bapo_megatron.planning.job import Job, PlanOptions
from bapo_megatron.planning.rehearsal.records import Call, LargeTensor, Peak, RankRequest, RankResult, Wait
from bapo_megatron.planning.rehearsal.results import collective_mismatches, needed, rehearsal_text
from tests.unit.planning.test_plan import SMALL

GB = 10**9


def call(op: str, size: int = 8, peer: int | None = None, line: str = "a.py:1", **other: object) -> Call:
    plain = Call(op, "TP", (0, 1), size, "float32", "cuda", peer, line, "update 2")
    return replace(plain, **other)  # type: ignore[arg-type]


def result(rank: int, *calls: Call, **other: object) -> RankResult:
    place = {"tensor": rank, "context": 0, "data": 0, "stage": 0}
    return replace(RankResult(rank, place, "torch", 1, calls=list(calls)), **other)  # type: ignore[arg-type]


def test_equal_collective_sequences_agree() -> None:
    ranks = [result(rank, call("all_reduce"), call("all_gather", 16)) for rank in (0, 1)]
    assert collective_mismatches(ranks) == []


def test_the_first_differing_call_is_named_with_both_lines() -> None:
    one = result(0, call("all_reduce"), call("all_gather", 16, line="b.py:2"))
    other = result(1, call("all_reduce"), call("all_gather", 32, line="c.py:3"))
    [line] = collective_mismatches([one, other])
    assert line.startswith("deadlock: in group TP ranks 0 and 1 differ at call 2: all_gather of 16 bytes")
    assert "b.py:2" in line
    assert "c.py:3" in line


def test_a_rank_missing_from_a_collective_is_named() -> None:
    [line] = collective_mismatches([result(0, call("all_reduce", line="b.py:2")), result(1)])
    assert "differ at call 1: all_reduce of 8 bytes of float32 at b.py:2" in line
    assert "no call any more" in line


def test_each_process_group_is_compared_by_itself() -> None:
    """Two groups in another order are not one sequence: each group's own order counts."""
    pair, all_four = call("all_reduce"), call("all_reduce", ranks=(0, 1, 2, 3))
    ranks = [result(0, pair, all_four), result(1, all_four, pair), result(2, all_four), result(3, all_four)]
    assert collective_mismatches(ranks) == []


def test_messages_are_matched_with_their_receives() -> None:
    sender = result(0, call("send", 8, peer=1), call("send", 4, peer=1))
    assert collective_mismatches([sender, result(1, call("recv", 8, peer=0), call("recv", 4, peer=0))]) == []
    [line] = collective_mismatches([sender, result(1, call("recv", 8, peer=0), call("recv", 8, peer=0))])
    assert line.startswith("deadlock: message 2 from rank 0 to rank 1")


def test_parallel_coordinates_of_a_rank() -> None:
    """TP first, then CP, DP, PP: rank 13 of 2 x 2 x 2 x 2 is 1 + 0 x 2 + 1 x 4 + 1 x 8."""
    parallel = ParallelConfig(tensor=2, context=2, data=2, pipeline=2)
    request = RankRequest(run(parallel), 13, 1)
    assert request.world_size == 16
    assert request.place == {"tensor": 1, "context": 0, "data": 1, "stage": 1}


def run(parallel: ParallelConfig) -> RunConfig:
    return RunConfig("small", ModelConfig(Path("model")), DataConfig(Path("data")), parallel=parallel)


def job(colocated: bool) -> Job:
    sglang = SglangConfig(colocated=colocated, kept_gb=2.0, memory_fraction=0.5)
    config = replace(run(ParallelConfig()), rollout=RolloutConfig(engine="sglang", sglang=sglang))
    return Job(config, SMALL, PlanOptions(gpu="h100-80gb"))


def test_gpu_memory_that_a_phase_needs() -> None:
    """An update: 3 GB for CUDA and NCCL, 5 % of what is no state. A save: 3 GB."""
    peak = Peak(
        50 * GB, {"weights": 8 * GB, "gradients": 16 * GB, "optimizer": 6 * GB, "activations": 20 * GB}
    )
    passes = ("update 2", "bounds search 2", "old log-probs", "reference log-probs")
    found = result(0, gpu={**dict.fromkeys(passes, peak), "save": peak, "sample": Peak(GB, {})})
    assert [needed(found, phase, job(False)) for phase in passes] == pytest.approx([54e9] * 4)
    assert needed(found, "save", job(False)) == pytest.approx(53e9)
    # Servers on the same GPU keep 2 GB of it, and in their turn have half of 80 GB besides.
    assert needed(found, "update 2", job(True)) == pytest.approx(56e9)
    assert needed(found, "sample", job(True)) == pytest.approx(1e9 + 3e9 + 2e9 + 40e9)


def test_the_page_of_a_rehearsal() -> None:
    """Tables of what was measured; a section without rows has its title alone."""
    peak = Peak(50 * GB, {"weights": 8 * GB, "activations": 20 * GB})
    large = LargeTensor(GB, 2, (4, 8), "float32", "activations", "", "a.py:1")
    whole = result(
        0,
        call("all_reduce", 1000),
        gpu={"update 2": peak, "save": replace(peak, size=12 * GB)},
        host=dict.fromkeys(("update 2", "save"), Peak(GB, {})),
        largest=[large, replace(large, size=12 * GB, count=1, module="head", line="b.py:20")],
        flops={"update 2": 3 * 10**12, "bounds search 2": 10**12},
        waits={Wait("update 2", "item", "a.py:3"): 12, Wait("update 2", "nonzero", "c.py:100"): 1},
    )
    blocks = rehearsal_text([whole], job(False)).split("\n\n")
    assert [(line[:56], line[-15:]) for line in blocks[2].splitlines()] == [
        ("peak memory of the GPU, GB  total  + reserve  weights  g", "  passing  host"),
        ("  update 2                  50.00      55.10     8.00   ", "     0.00  1.00"),
        ("  save                      12.00      15.00     8.00   ", "     0.00  1.00"),
    ]
    assert blocks[3].splitlines()[1:] == [
        "   1.00 GB  2 x [4, 8] float32  activations  -     a.py:1",
        "  12.00 GB  [4, 8] float32      activations  head  b.py:20",
    ]
    assert [line.split("TFLOP")[0] for line in blocks[4].splitlines()[1:]] == [
        "  update 2         3.0 ",
        "  bounds search 2  1.0 ",
    ]
    assert blocks[5].splitlines()[1:] == ["  update 2  TP of 2  all_reduce  1  0.000 GB"]
    assert blocks[6].splitlines()[1:] == ["  12  item     a.py:3", "   1  nonzero  c.py:100"]
    bare = rehearsal_text([replace(whole, largest=[], flops={}, calls=[], waits={})], job(False))
    assert [len(block.splitlines()) for block in bare.split("\n\n")[3:7]] == [1, 1, 1, 1]
