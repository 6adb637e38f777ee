"""The rehearsal against real ranks on gloo: their peaks of memory, phase by phase, and their collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bapo_megatron.config import DistillationConfig, ParallelConfig, ReferenceKlConfig, RunConfig
from bapo_megatron.hf.config import attention_flops, linear_flops_per_token, read_model_shape
from bapo_megatron.policy import offload
from bapo_megatron.types import PackLayout
from bapo_rehearsal.job import rehearse
from bapo_rehearsal.program import full_packs
from bapo_rehearsal.records import Call, RankRequest, RankResult
from bapo_rehearsal.results import collective_mismatches
from tests.support.layouts import layout
from tests.support.planted import Mistake, rehearse_with
from tests.support.rehearsals import (
    TOKENS,
    RealRank,
    colocated,
    expert_run,
    hybrid_run,
    real_ranks,
    small_run,
)
from tests.support.tiers import slow_but

pytestmark = pytest.mark.distributed

CASES = [
    *((small_run, "tp2-sp", 1, 1), (small_run, "pp2-vpp2", 4, 4), (expert_run, "dp2-ep2", 1, 1)),
    *((expert_run, "dp2-pp2-ep2", 2, 2), (hybrid_run, "cp2", 2, 1), (hybrid_run, "pp2 layers1+2", 3, 2)),
]
"""Layouts, layers and packs of models of each kind. Every second layer of a hybrid is attention; one of Gated
DeltaNet takes seconds of a core."""


COPY = 30_720
"""Bytes of a pack's columns: a GPU has a copy while it is updated on, a CPU takes them as they are."""


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of the usual size is larger than such a model."""
    monkeypatch.setattr(offload, "BLOCK", 2**12)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("make", "text", "layers", "packs"),
    slow_but(CASES, CASES[0], CASES[2]),
)
def test_peaks_and_collectives_are_those_of_real_ranks(
    make: Callable[..., RunConfig], text: str, layers: int, packs: int, tmp_path: Path
) -> None:
    """Real ranks replay routes that are even: their experts get what the rehearsal says they do."""
    config = colocated(make(tmp_path, layout(text).parallel, layers=layers))
    results, real = rehearsed_and_real(config, packs)
    for result, (peaks, _) in zip(results, real, strict=True):
        assert set(result.gpu) == {*peaks, "load"}
        assert {"offload", "sample", "reload"} < set(peaks)


def rehearsed_and_real(
    config: RunConfig, packs: int, left_out: str = ""
) -> tuple[list[RankResult], list[RealRank]]:
    """All ranks as rehearsed, and as they are, whose peaks and collectives must be the same.

    A thread of gloo may hold a gathered tensor a moment longer than the call that made it. The peak of that
    phase is then larger: the least of some measurements counts. ``left_out``: a phase that is not compared.
    """
    ranks = range(config.parallel.model_size * (config.parallel.data or 1))
    results = rehearse([RankRequest(config, rank, packs, "cpu") for rank in ranks])
    assert [result.error for result in results] == [None] * len(ranks)
    least: list[dict[str, int]] = [{} for _ in ranks]
    for _attempt in range(6):
        real = real_ranks(config, packs)
        for (peaks, _), before in zip(real, least, strict=True):
            peaks.pop(left_out, None)
            before |= {phase: min(size, before.get(phase, size)) for phase, size in peaks.items()}
            peaks |= before
        if not (apart := unlike(results, real)):
            break
    assert not apart
    for result, (_, calls) in zip(results, real, strict=True):
        rehearsed = [contents(call) for call in result.calls if call.phase != "load"]
        assert rehearsed == [contents(call) for call in calls], result.rank
    return results, real


@pytest.mark.usefixtures("small_blocks")
def test_a_frozen_reference_and_a_teacher_are_rehearsed(tmp_path: Path) -> None:
    """The reference's swap and pass as on real ranks; beside a GPU one copy of the weights is on the host.
    The teacher's column is in the packs."""
    config = small_run(tmp_path, ParallelConfig(tensor=2, sequence=True), layers=1)
    algorithm = replace(
        config.algorithm, reference_kl=ReferenceKlConfig(0.1), distillation=DistillationConfig(1.0)
    )
    config = replace(config, algorithm=algorithm)
    # The stand-in for a folder makes its tensors in memory.
    _, real = rehearsed_and_real(config, 1, left_out="load reference")
    assert all("reference log-probs" in peaks for peaks, _ in real)
    [beside] = rehearse([RankRequest(config, 0, 1)])
    assert beside.error is None
    [pack] = full_packs(config, PackLayout(), read_model_shape(tmp_path), 1)
    assert pack.teacher_log_prob_T[pack.mask_T > 0].lt(0).all()
    copy, weights = beside.host["update 2"].kinds["reference"], beside.gpu["update 2"].kinds["weights"]
    assert weights <= copy < 1.05 * weights + 2**12


def unlike(results: list[RankResult], real: list[RealRank]) -> list[tuple[int, str, int, int]]:
    """Rank, phase, rehearsed and real bytes where the two are more than half a percent apart."""
    found = []
    for result, (peaks, _) in zip(results, real, strict=True):
        for phase, size in peaks.items():
            rehearsed, updates = result.gpu[phase].size, phase.startswith("update")
            if not 0.995 * size <= rehearsed <= 1.005 * size + COPY * updates:
                found.append((result.rank, phase, rehearsed, size))
    return found


def contents(call: Call) -> tuple[object, ...]:
    return call.phase, call.op, call.ranks, call.size, call.dtype, call.peer, call.line


POLICY = "bapo_megatron/policy"
PASSES, CORE, WEIGHTS = (f"{POLICY}/{name}.py" for name in ("passes", "attention", "weight_map"))
HEAD = f"{POLICY}/output_head.py"
ONE, TP = ParallelConfig(), ParallelConfig(tensor=2, sequence=True)
PP = ParallelConfig(pipeline=2)
TO_DEVICE, ATTENTION = ".to(device, non_blocking=True)", "return cast(Tensor, varlen_attn("
OTHER_GROUP = "owner), parallel_state.get_tensor_model_parallel_group())"

FAILS = {
    "bounds on the host": (ONE, CORE, f"x{TO_DEVICE} for x in (rows", "x for x in (rows", ATTENTION),
    "values of the device as numpy": (ONE, PASSES, "total.cpu()", "torch.from_numpy(total.numpy())"),
    "broadcast in the wrong group": (PP, WEIGHTS, "owner), pipeline)", OTHER_GROUP),
}
"""A layout, and the arguments of a mistake."""


ROUNDED_LOGITS = Mistake(
    HEAD,
    "torch.mm(hidden_CH, weight_VH.t(), out_dtype=torch.float32, out=out)",
    "out.copy_(torch.mm(hidden_CH, weight_VH.t()))",
)
"""Only on a GPU, so that no answer of a CPU shows it."""


def test_logits_that_a_gpu_alone_would_round_are_refused(tmp_path: Path) -> None:
    found = rehearse_with(ROUNDED_LOGITS, small_run(tmp_path, ONE, layers=1), rank=0, packs=1)
    assert found.error is not None
    assert "the output layer's matmul gives logits of torch.bfloat16, not float32" in found.error
    assert f" {ROUNDED_LOGITS.line}" in found.error


@pytest.mark.parametrize("name", slow_but(FAILS, "bounds on the host"))
def test_a_mistake_fails_at_its_line(name: str, tmp_path: Path) -> None:
    parallel, mistake = FAILS[name][0], Mistake(*FAILS[name][1:])
    config = small_run(tmp_path, parallel, layers=parallel.pipeline)
    found = rehearse_with(mistake, config, rank=0, packs=parallel.pipeline + 1)
    assert found.error is not None
    assert f" {mistake.line}" in found.error, found.error


ALL_REDUCE = "dist.all_reduce(total)"


def test_a_deadlock_is_named_at_its_first_differing_call(tmp_path: Path) -> None:
    """One rank leaves out an all-reduce."""
    mistake = Mistake(PASSES, ALL_REDUCE, f"self._counts_tokens and {ALL_REDUCE}")
    config = small_run(tmp_path, TP, layers=1)
    ranks = [rehearse_with(mistake, config, rank, packs=2) for rank in range(2)]
    assert [rank.error for rank in ranks] == [None, None]
    first = collective_mismatches(ranks)[0]
    assert "ranks 0 and 1 differ at call" in first
    assert mistake.line in first


@pytest.mark.slow
def test_layers_of_transformer_engine(tmp_path: Path) -> None:
    """Its own classes under TP, SP and CP: its ring, its FLOPs, and the weights of torch's layers."""
    parallel = ParallelConfig(tensor=2, context=2, sequence=True)
    config = small_run(tmp_path, parallel)
    ranks = rehearse([RankRequest(config, rank, 1) for rank in range(4)], "te", workers=2)
    assert [rank.error for rank in ranks] == [None] * 4
    assert collective_mismatches(ranks) == []
    ring = [call.op for call in ranks[0].calls if (call.group, call.phase) == ("CP", "bounds search 2")]
    assert ring.count("send") == ring.count("recv") == 2  # keys and values of each layer, once around
    shape = read_model_shape(tmp_path)
    forward = linear_flops_per_token(shape) * TOKENS + attention_flops(shape, TOKENS)
    assert ranks[0].flops["bounds search 2"] == pytest.approx(forward / 4, rel=0.01)
    [torch_layers] = rehearse([RankRequest(config, 0, 1)])
    for kind in ("weights", "gradients"):
        found = ranks[0].gpu["update 2"].kinds[kind]
        assert found == pytest.approx(torch_layers.gpu["update 2"].kinds[kind], rel=0.01)


def test_tokens_that_no_loss_reads_have_no_logits(tmp_path: Path) -> None:
    """Which they are is known on the host: the shapes follow, and nothing waits or is guessed."""
    config = small_run(tmp_path, ONE, layers=1)
    config = replace(config, algorithm=replace(config.algorithm, old_log_probs="trainer"))
    longer = replace(config, data=replace(config.data, max_prompt_tokens=8 * 64))
    short, long = rehearse([RankRequest(one, 0, 1) for one in (config, longer)], workers=1)
    assert (short.error, long.error) == (None, None)
    for phase in ("old log-probs", "bounds search 2", "update 2"):
        assert long.flops[phase] < short.flops[phase], phase
    assert long.update_waits() == short.update_waits()
    assert long.guesses == short.guesses
