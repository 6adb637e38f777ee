"""Rehearsals of hybrids: what layers keep on a GPU, by the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bapo_megatron.config import ParallelConfig
from bapo_megatron.hf.config import attention_flops, linear_flops_per_token, read_model_shape
from bapo_megatron.layers.costs import Place
from bapo_megatron.layers.delta_net import DeltaNet
from bapo_megatron.planning.memory import block_bytes
from bapo_rehearsal.job import rehearse
from bapo_rehearsal.records import RankRequest
from bapo_rehearsal.results import collective_mismatches
from tests.support.rehearsals import TOKENS, hybrid_run

pytestmark = pytest.mark.distributed

CP = ParallelConfig(context=2)


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
