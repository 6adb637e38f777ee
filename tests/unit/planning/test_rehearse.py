"""``bapo rehearse``: its flags choose ranks, packs and layers; its results, on hand-made ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bapo_megatron.algo.bapo import grpo
from bapo_megatron.cli import run as bapo
from bapo_megatron.config import (
    AlgorithmConfig,
    BatchConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    SglangConfig,
)
from bapo_megatron.errors import ConfigError
from bapo_megatron.planning.job import Job, PlanOptions
from bapo_rehearsal.job import RehearseOptions, choose_layers, packs_of, ranks_of, rehearse, rehearse_job
from bapo_rehearsal.program import sequence_lengths
from bapo_rehearsal.rank import RankRehearsal
from bapo_rehearsal.records import Call, LargeTensor, Peak, RankRequest, RankResult, Wait
from bapo_rehearsal.results import collective_mismatches, needed, rehearsal_text
from bapo_rehearsal.te_sources import find_sources, te_version
from tests.support.planned_jobs import SMALL, job

ROOT = Path(__file__).parents[3]
FOUR = ParallelConfig(tensor=2, pipeline=4, data=2)


def test_one_rank_of_each_kind_or_those_that_are_asked_for() -> None:
    """Stages of four ranks: the first ranks of the first, the third and the last."""
    four = job(FOUR)
    assert ranks_of(four, RehearseOptions()) == [0, 8, 12]
    assert ranks_of(job(), RehearseOptions()) == [0]
    assert ranks_of(four, RehearseOptions(stage=1)) == [4]
    assert ranks_of(four, RehearseOptions(rank=5)) == [5]
    assert ranks_of(four, RehearseOptions(all_ranks=True)) == list(range(16))


def test_a_rank_names_its_phases_but_among_all_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[RankRequest] = []
    monkeypatch.setattr("bapo_rehearsal.job.rehearse", lambda all_, *_: asked.extend(all_))
    for options in (RehearseOptions(layers="torch"), RehearseOptions(layers="torch", all_ranks=True)):
        rehearse_job(job(), Path("anywhere"), options)
    one, *all_ranks = asked
    assert one.names_phases
    assert not any(request.names_phases for request in all_ranks)
    rank = RankRehearsal(one)
    rank.meter = SimpleNamespace(during=lambda _name: nullcontext())  # type: ignore[assignment]
    with rank._phase("update 1"):
        assert capsys.readouterr().err.endswith("rank 0: update 1 ...\n")


def test_a_rank_that_ends_without_a_result_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def rehearse_rank(request: RankRequest, layers: str) -> RankResult:
        if request.rank == 0:
            raise RuntimeError("no such module")
        if request.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return RankResult(request.rank, request.place, layers, request.packs)

    monkeypatch.setitem(sys.modules, "bapo_rehearsal.rank", SimpleNamespace(rehearse_rank=rehearse_rank))
    monkeypatch.setattr("bapo_rehearsal.job.prepare_layers", lambda _layers: None)
    monkeypatch.setattr("bapo_rehearsal.job.find_spec", lambda _name: None)  # so that it forks this process
    told: list[int] = []
    run = job(FOUR).run
    results = rehearse(
        [RankRequest(run, rank, 1) for rank in range(3)],
        workers=2,
        on_result=lambda one: told.append(one.rank),
    )
    assert [one.error for one in results] == [
        "its process failed; see above",
        "its process was killed by signal 9",
        None,
    ]
    assert sorted(told) == [0, 1, 2]


def test_packs_fill_the_pipeline() -> None:
    """Eight packs of 16 tokens in an update (see test_plan.py), four of a replica where there are two."""
    for one, packs in (
        (job(), 1),
        (job(ParallelConfig(pipeline=4)), 5),
        (job(FOUR), 4),  # no more than there are
        (job(ParallelConfig(pipeline=2, virtual=2)), 4),
        (job(hold_forwards=True), 8),
    ):
        assert packs_of(one, RehearseOptions()) == packs
    held = job(hold_forwards=True)
    without = replace(held.run, algorithm=AlgorithmConfig(bounds=grpo()))
    assert packs_of(replace(held, run=without), RehearseOptions()) == 1  # nothing is searched
    assert packs_of(job(), RehearseOptions(packs=3)) == 3


def test_packs_are_full() -> None:
    """Sequences have at most 16 + 14 tokens: one and a rest, which is long enough from 256 on."""
    run = job().run
    assert sequence_lengths(run, 1) == [16]
    assert sequence_lengths(replace(run, batch=BatchConfig(pack_tokens=64)), 1) == [30, 30]
    assert sequence_lengths(replace(run, batch=BatchConfig(pack_tokens=64)), 4) == [28, 28]
    rollout = replace(run.rollout, max_response_tokens=684)  # with a prompt of 16: 700
    long = replace(run, rollout=rollout, batch=BatchConfig(pack_tokens=1024))
    assert sequence_lengths(long, 1) == [700, 324]


def test_layers_of_transformer_engine_are_rehearsed_where_its_sources_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAPO_TE_SOURCES", str(tmp_path))
    layers, why = choose_layers(None, "bfloat16")
    assert (layers, "make te-sources" in why) == ("torch", True)
    for dtype, says in (("bfloat16", "make te-sources"), ("float32", "in float32 has torch's layers")):
        with pytest.raises(ConfigError, match=says):
            choose_layers("te", dtype)
    package = tmp_path / te_version() / "transformer_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    asked = ((None, "bfloat16"), (None, "float32"), ("torch", "bfloat16"))
    assert [choose_layers(*one)[0] for one in asked] == ["te", "torch", "torch"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--rank 64", "--rank 64: the layout has ranks 0 to 63"),
        ("--stage 4", "--stage 4: the layout has stages 0 to 0"),
        ("--parallel.tensor 3", "parallel.tensor=3 does not divide"),
        ("--stage 0 --all-ranks", "--stage and --all-ranks exclude each other"),
    ],
)
def test_bad_input_ends_before_anything_is_rehearsed(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bapo(["rehearse", "recipes/bp_math_32b_64k.py", *flags.split()]) == 2
    assert message in capsys.readouterr().err


def install(folder: Path, version: str) -> None:
    """A package transformer_engine whose import ends in an error, as without its libraries."""
    (folder / "transformer_engine").mkdir()
    (folder / "transformer_engine/__init__.py").write_text("raise RuntimeError('compiled for a GPU')")
    metadata = folder / f"transformer_engine-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: transformer_engine\nVersion: {version}\n"
    )


def test_sources_of_the_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "2.11.0+cu13")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("BAPO_TE_SOURCES", str(tmp_path / "none"))
    assert find_sources("2.11.0") == tmp_path
    with pytest.raises(ConfigError, match="and it is not installed: run `make te-sources`"):
        find_sources("2.10.0")


TORCH_LAYERS = """
import torch
from bapo_rehearsal.job import prepare_layers

prepare_layers("torch")
from bapo_megatron.policy import device

device.has_cuda = lambda: True
print(device.uses_transformer_engine(torch.bfloat16))
"""


@pytest.mark.integration
def test_torch_layers_are_used_although_transformer_engine_is_installed(tmp_path: Path) -> None:
    install(tmp_path, te_version())
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-c", TORCH_LAYERS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "False\n", done.stderr


GB = 10**9


def call(op: str, size: int = 8, peer: int | None = None, line: str = "a.py:1", **other: object) -> Call:
    plain = Call(op, "TP", (0, 1), size, "float32", "cuda", peer, line, "update 2")
    return replace(plain, **other)  # type: ignore[arg-type]


def result(rank: int, *calls: Call, **other: object) -> RankResult:
    place = {"tensor": rank, "context": 0, "data": 0, "stage": 0}
    return replace(RankResult(rank, place, "torch", 1, calls=list(calls)), **other)  # type: ignore[arg-type]


PAIR, FOUR_RANKS = call("all_reduce"), call("all_reduce", ranks=(0, 1, 2, 3))
MESSAGES = [call("send", 8, peer=1), call("send", 4, peer=1)]


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ([[PAIR, call("all_gather", 16)]] * 2, []),
        (
            [[PAIR, call("all_gather", 16, line="b.py:2")], [PAIR, call("all_gather", 32, line="c.py:3")]],
            [
                "deadlock: in group TP ranks 0 and 1 differ at call 2: all_gather of 16 bytes",
                "b.py:2",
                "c.py:3",
            ],
        ),
        (
            [[call("all_reduce", line="b.py:2")], []],
            ["differ at call 1: all_reduce of 8 bytes of float32 at b.py:2", "no call any more"],
        ),
        # Two groups in another order are not one sequence: each group's own order counts.
        ([[PAIR, FOUR_RANKS], [FOUR_RANKS, PAIR], [FOUR_RANKS], [FOUR_RANKS]], []),
        ([MESSAGES, [call("recv", 8, peer=0), call("recv", 4, peer=0)]], []),
        ([MESSAGES, [call("recv", 8, peer=0)] * 2], ["deadlock: message 2 from rank 0 to rank 1"]),
    ],
)
def test_the_first_collective_or_message_that_differs_is_named(
    calls: list[list[Call]], told: list[str]
) -> None:
    lines = collective_mismatches([result(rank, *own) for rank, own in enumerate(calls)])
    assert len(lines) == bool(told)
    assert all(part in line for line in lines for part in told)


def run(parallel: ParallelConfig) -> RunConfig:
    return RunConfig("small", ModelConfig(Path("model")), DataConfig(Path("data")), parallel=parallel)


def small_job(colocated: bool) -> Job:
    sglang = SglangConfig(colocated=colocated, kept_gb=2.0, memory_fraction=0.5)
    config = replace(run(ParallelConfig()), rollout=RolloutConfig(engine="sglang", sglang=sglang))
    return Job(config, SMALL, PlanOptions(gpu="h100-80gb"))


def test_gpu_memory_that_a_phase_needs() -> None:
    """An update: 3 GB for CUDA and NCCL, 5 % of what is not a state. A save: 3 GB."""
    peak = Peak(
        50 * GB, {"weights": 8 * GB, "gradients": 16 * GB, "optimizer": 6 * GB, "activations": 20 * GB}
    )
    passes = ("update 2", "bounds search 2", "old log-probs", "reference log-probs")
    found = result(0, gpu={**dict.fromkeys(passes, peak), "save": peak, "sample": Peak(GB, {})})
    assert [needed(found, phase, small_job(False)) for phase in passes] == pytest.approx([54e9] * 4)
    assert needed(found, "save", small_job(False)) == pytest.approx(53e9)
    # Servers on the same GPU keep 2 GB of it, and in their turn have half of 80 GB besides.
    assert needed(found, "update 2", small_job(True)) == pytest.approx(56e9)
    assert needed(found, "sample", small_job(True)) == pytest.approx(1e9 + 3e9 + 2e9 + 40e9)


def test_the_page_of_a_rehearsal() -> None:
    """Tables of what was measured; a section without rows has its title alone."""
    whole = result(
        0,
        call("all_reduce", 1000),
        gpu={"update 2": Peak(50 * GB, {"weights": 8 * GB, "activations": 20 * GB})},
        host={"update 2": Peak(GB, {})},
        largest=[LargeTensor(GB, 2, (4, 8), "float32", "activations", "", "a.py:1")],
        flops={"update 2": 3 * 10**12},
        waits={Wait("update 2", "item", "a.py:3"): 12},
    )
    blocks = rehearsal_text([whole], small_job(False)).split("\n\n")
    title, row = blocks[2].splitlines()
    assert (title[:46], title[-4:]) == ("peak memory of the GPU, GB  total  + reserve  ", "host")
    assert " ".join(row.split()) == "update 2 50.00 55.10 8.00 0.00 0.00 20.00 0.00 0.00 1.00"
    assert [block.splitlines()[1].strip().split("TFLOP")[0] for block in blocks[3:7]] == [
        "1.00 GB  2 x [4, 8] float32  activations  -  a.py:1",
        "update 2  3.0 ",
        "update 2  TP of 2  all_reduce  1  0.000 GB",
        "12  item  a.py:3",
    ]
    bare = rehearsal_text([replace(whole, largest=[], flops={}, calls=[], waits={})], small_job(False))
    assert [len(block.splitlines()) for block in bare.split("\n\n")[3:7]] == [1, 1, 1, 1]
