"""Rehearsals of hybrids: against real ranks on gloo, and what layers keep on a GPU, by the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bapo_megatron.config import ParallelConfig
from bapo_megatron.hf.config import attention_flops, linear_flops_per_token, read_model_shape
from bapo_megatron.layers.costs import Place
from bapo_megatron.layers.delta_net import DeltaNet
from bapo_megatron.planning.memory import block_bytes
from bapo_megatron.policy import offload
from bapo_rehearsal.job import rehearse
from bapo_rehearsal.records import RankRequest
from bapo_rehearsal.results import collective_mismatches
from tests.distributed.test_rehearsal import contents, unlike
from tests.support.rehearsals import TOKENS, colocated, hybrid_run, real_ranks

pytestmark = pytest.mark.distributed

CP = ParallelConfig(context=2)
LAYOUTS = {
    "cp2": (CP, 2, 1),
    "tp2-sp": (ParallelConfig(tensor=2, sequence=True), 2, 1),
    "pp2 layers1+2": (ParallelConfig(pipeline=2, pipeline_layers=(1, 2)), 3, 3),
}
"""Ranks, layers (every second one is attention), packs. A layer of Gated DeltaNet takes seconds of a core."""


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_peaks_and_collectives_are_those_of_real_ranks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "BLOCK", 2**12)  # a block of the usual size is larger than such a model
    parallel, layers, packs = LAYOUTS[name]
    config = colocated(hybrid_run(tmp_path, parallel, layers))
    results = rehearse([RankRequest(config, rank, packs, "cpu") for rank in range(parallel.model_size)])
    assert [result.error for result in results] == [None] * parallel.model_size
    for _attempt in range(3):  # as in test_rehearsal.py
        real = real_ranks(config, packs)
        if not (apart := unlike(results, real)):
            break
    assert not apart
    for result, (_, calls) in zip(results, real, strict=True):
        rehearsed = [contents(call) for call in result.calls if call.phase != "load"]
        assert rehearsed == [contents(call) for call in calls], result.rank


@pytest.mark.slow
def test_layers_keep_on_a_gpu_what_the_plan_says(tmp_path: Path) -> None:
    """Of each kind of layer, on Transformer Engine: a model of four more layers, and one of other kinds.

    The FLOPs are those of the plan, but for the rule: 64 (6 k + 4 v) on a GPU, where torch has 4 k + 3 v.
    """
    sizes = {(4, 4): (3, 1), (4, 2): (2, 2), (8, 2): (4, 4)}
    """Layers and interval; layers of Gated DeltaNet and of attention."""
    requests = []
    for layers, every in sizes:
        (folder := tmp_path / f"{layers} {every}").mkdir()
        requests.append(RankRequest(hybrid_run(folder, CP, layers, every), 0, 1))
    found = rehearse([*requests, replace(requests[0], rank=1)], "te")
    assert [rank.error for rank in found] == [None] * 4
    assert collective_mismatches([found[0], found[-1]]) == []
    other, few, more = (rank.gpu["update 2"].kinds["activations"] for rank in found[:3])
    shape = read_model_shape(tmp_path / "4 4")
    place = Place(shape.hidden, CP, 2, "te", "none")
    delta, gated = (block_bytes(block, place)[0] * TOKENS / 2 for block in shape.blocks)
    assert more - few == pytest.approx(2 * (delta + gated), rel=0.01)  # blocks of 512 B
    assert other - few == pytest.approx(delta - gated, rel=0.03)

    kind = shape.blocks[0].mixer
    assert isinstance(kind, DeltaNet)
    forward = linear_flops_per_token(shape) * TOKENS + attention_flops(shape, TOKENS)
    forward += 3 * 8 * 64 * (2 * kind.key_dim + kind.value_dim) * TOKENS
    assert found[0].flops["bounds search 2"] == pytest.approx(forward / 2, rel=0.01)
    for rank in found:  # the state of a document is the device's alone
        assert not [wait for wait in rank.update_waits() if "delta_net" in wait.line]
