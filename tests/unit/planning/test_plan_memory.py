"""``bapo plan``: parameters, memory and disk by hand on a small shape, and published sizes of models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bapo_megatron.algo.bapo import grpo
from bapo_megatron.config import AlgorithmConfig, CheckpointConfig, EvaluationConfig, ParallelConfig
from bapo_megatron.hf.config import linear_flops_per_token
from bapo_megatron.hf.parameter_map import mapping_table
from bapo_megatron.layers.mlp import Experts, Mlp
from bapo_megatron.planning import memory as plan_memory
from bapo_megatron.planning.engines import engine_plan
from bapo_megatron.planning.job import PlanOptions, in_flight
from bapo_megatron.planning.memory import (
    activation_bytes,
    host_bytes,
    offloaded_bytes,
    optimizer_bytes,
    stage_memory,
)
from bapo_megatron.planning.plan import make_plan, summary
from bapo_megatron.planning.sizes import (
    evaluation_bytes,
    largest_parameter,
    rollout_bytes,
    run_folder_bytes,
    stage_parameters,
    total_parameters,
)
from bapo_megatron.planning.speed import handover_estimate
from bapo_megatron.policy import output_head
from tests.support.altered import altered
from tests.support.planned_jobs import ON_HOST, ONE, SMALL, colocated, job, of_recipe
from tests.support.shapes import activation_bytes_per_token, resized


def test_a_search_holds_the_activations_of_all_packs() -> None:
    """Eight; without a search the setting holds nothing."""
    plain, held = job(), job(hold_forwards=True)
    without = replace(held.run, algorithm=AlgorithmConfig(bounds=grpo()))
    one, eight, none = (activation_bytes(each, 0, "te") for each in (plain, held, replace(held, run=without)))
    assert 7 * one < eight <= 8 * one
    assert none == one


def test_parameters_by_hand() -> None:
    """608 a layer; embedding and output 32 x 8 = 256 each; final norm 8."""
    assert stage_parameters(SMALL, ONE, 0).total == 4 * 608 + 2 * 256 + 8
    two = ParallelConfig(tensor=2, pipeline=2)
    # TP halves all but the norms: (608 - 16) / 2 + 16 = 312.
    assert stage_parameters(SMALL, two, 0).total == 2 * 312 + 128
    assert stage_parameters(SMALL, two, 1).total == 2 * 312 + 128 + 8
    tied = replace(SMALL, tied=True)
    assert stage_parameters(tied, ONE, 0).total == 4 * 608 + 256 + 8
    assert stage_parameters(tied, ParallelConfig(pipeline=2), 1).total == 2 * 608 + 256 + 8
    assert largest_parameter(SMALL) == 2 * 16 * 8  # gate and up, as large as the embedding


@pytest.mark.parametrize(
    ("parallel", "stage", "expected"),
    [
        ({}, 0, 1),
        ({"pipeline": 4}, 0, 4),
        ({"pipeline": 4}, 3, 1),
        ({"pipeline": 16}, 0, 8),  # no more than there are
        ({"pipeline": 2, "virtual": 2}, 0, 5),  # warm-up 2 x 1 + 1 x 2, and the one that runs
        ({"pipeline": 2, "virtual": 2}, 1, 3),
    ],
)
def test_micro_batches_in_flight(parallel: dict[str, int], stage: int, expected: int) -> None:
    assert in_flight(ParallelConfig(**parallel), stage, 8) == expected


def test_memory_by_hand() -> None:
    """2952 parameters: 2 B weights, 4 B gradients, 12 B optimizer over DP x CP."""
    memory = stage_memory(job(ParallelConfig(data=3)), 0)
    assert (memory.weights, memory.gradients, memory.optimizer) == (2 * 2952, 4 * 2952, 4 * 2952)
    whole = altered(job(), {"run.model.dtype": "float32"})
    assert optimizer_bytes(whole, 2952) == 8 * 2952  # the weights are their own masters
    # Logits of 16 tokens and their softmax: 32 x (4 + 4) B; hidden states and their gradient; the matrix's.
    assert memory.head == 16 * 32 * 8 + 2 * 16 * 8 * 2 + 32 * 8 * (4 + 2)
    assert host_bytes(job()) == 14 * 2952
    # Two ranks on a node share it; each may write the largest parameter (256) beyond its half.
    assert host_bytes(job(ParallelConfig(data=2))) == 14 * 2952 + 2 * 12 * 256


def test_an_optimizer_on_the_host_by_hand() -> None:
    """No state on the GPU. On the host 12 B for good; while a checkpoint is written or read 12 + 2 B more,
    and a state of 4 B; two pinned buffers of gradients and of weights, here of the whole rank."""
    one = job()
    host = altered(one, ON_HOST)
    memory, before = stage_memory(host, 0), stage_memory(one, 0)
    assert memory.optimizer == 0
    assert before.training - memory.training == before.saving - memory.saving == 12 * 2952
    assert host_bytes(host) == (12 + 14 + 4 + 2 * (4 + 2)) * 2952
    float32 = altered(host, {"run.model.dtype": "float32"})
    assert optimizer_bytes(float32, 2952) == 12 * 2952  # weights on the GPU are not the host's masters


def test_chunks_of_logits_by_hand() -> None:
    """4,096 tokens of 50,000 entries: 4 B each, and 4 B for the softmax of 2^27; the gradient, 2 B, is less.

    With 100,000 entries it is more.
    """
    assert plan_memory._SOFTMAX_LOGITS == output_head._SOFTMAX_LOGITS == 2**27
    for vocab, beside in ((50_000, 4 * 2**27), (100_000, 2 * 4096 * 100_000)):
        long = job(shape=replace(SMALL, vocab=vocab), pack_tokens=10_000)
        rest = 2 * 10_000 * 8 * 2 + vocab * 8 * (4 + 2)
        assert stage_memory(long, 0).head == 4 * 4096 * vocab + beside + rest


def test_a_recomputed_layer_is_not_beside_the_logits() -> None:
    """The logits come first: beside them are the layers' inputs and the final norm."""
    full = job(shape=replace(SMALL, vocab=1000), recompute="full")
    at, memory = full.place(), stage_memory(full, 0)
    kept, again = plan_memory.block_bytes(SMALL.blocks[0], at)
    logits = 16 * 1000 * 8 + 2 * 16 * 8 * 2 + 1000 * 8 * (4 + 2)
    assert again > at.norm > 0
    assert memory.activations == 16 * (SMALL.layers * kept + again)
    assert memory.activations + memory.head == 16 * (SMALL.layers * kept + at.norm) + logits


def test_peaks_by_hand() -> None:
    """Saving: a state of the largest parameter (256), sent and received; syncing: that parameter twice."""
    memory = stage_memory(job(ParallelConfig(data=3)), 0)
    steady = (2 + 4 + 4) * 2952 + 3e9
    assert memory.saving == pytest.approx(steady + 2 * 4 * 256, abs=1e-3)
    assert stage_memory(job(), 0).saving == pytest.approx((2 + 4 + 12) * 2952 + 3e9, abs=1e-3)
    assert memory.syncing == steady + 2 * 256 * 2
    assert memory.workspace == 16 * 2 * (3 * 16 + 2 * 8)
    parts = memory.activations + max(memory.workspace, memory.head)  # one after the other
    assert memory.training == pytest.approx(steady + 1.05 * parts + memory.buffers, abs=1e-3)
    assert memory.buffers == 3 * 16 * 68  # the columns of three packs
    message = 2 * 16 * 8 * 2  # sent and received
    assert stage_memory(job(ParallelConfig(pipeline=2)), 0).buffers == message + 8 * 16 * 68


def test_activations_by_hand() -> None:
    """Transformer Engine, bytes for each token: h 8, q 8, kv 4, f 16, d 2, 4 heads."""
    attention = (16 + 4) + 16 + 16  # norm, its output, the projection's input; RoPE is fused
    core = 2 * (8 + 2 * 4)
    mlp = (16 + 4) + 16 + 3 * 2 * 16  # norm, its output; gate, up and their product: SwiGLU is fused
    none = activation_bytes_per_token(SMALL, ONE, 2, "none", "te")
    assert none.layer == attention + core + 16 + mlp
    assert activation_bytes_per_token(SMALL, ONE, 2, "selective", "te").layer == attention + core + 16 + 16
    full = activation_bytes_per_token(SMALL, ONE, 2, "full", "te")
    assert (full.layer, full.transient) == (16, none.layer - 16)
    # Sequence parallelism cuts the norms as well; a norm's number a row stays.
    halved = activation_bytes_per_token(SMALL, ParallelConfig(tensor=2, sequence=True), 2, "none", "te")
    assert halved.layer == (none.layer - 8) / 2 + 8
    # Norms of queries and keys keep copies of their inputs, which lie scattered in the fused output.
    normed = activation_bytes_per_token(resized(SMALL, qk_norm=True), ONE, 2, "none", "te")
    assert normed.layer - none.layer == 2 * (8 + 4) + 4 * (4 + 2)


def test_stages_of_unlike_layers_by_hand() -> None:
    """Two of four layers, the last ones, have an MLP of twice the width: stage 1 has both."""
    [block] = SMALL.blocks
    wide = replace(block, mlp=Mlp(32))
    mixed = replace(SMALL, blocks=(block, wide), pattern=(0, 0, 1, 1))
    one = ParallelConfig(pipeline=2)
    first, second = (stage_parameters(mixed, one, stage) for stage in range(2))
    assert (first.body, second.body) == (2 * 608, 2 * (608 + 3 * 8 * 16) + 8)
    assert linear_flops_per_token(mixed) == linear_flops_per_token(SMALL) + 2 * 2 * 3 * 8 * 16
    narrow, both = job(one), job(one, mixed)
    assert activation_bytes(both, 0, "te") == activation_bytes(narrow, 0, "te")
    more = 16 * 2 * 3 * 16 * 2  # tokens, bytes, gate, up and product, in two layers
    assert activation_bytes(both, 1, "te") == activation_bytes(narrow, 1, "te") + more
    table = mapping_table(replace(mixed, blocks=(block, replace(block, mlp=Experts(2, 1, 4, False)))))
    assert table["decoder.layers.{layer}.mlp.linear_fc1.weight"].layers == (0, 1)
    assert table["decoder.layers.{layer}.mlp.experts.1.linear_fc1.weight"].layers == (2, 3)
    assert table["decoder.layers.{layer}.pre_mlp_layernorm.weight"].layers == (0, 1, 2, 3)
    with pytest.raises(ValueError, match="linear_fc1.weight has two shapes in layers of two kinds"):
        mapping_table(mixed)


def test_memory_of_colocated_trainer_and_engine_by_hand() -> None:
    """A server has half of 80 GB while it samples, and 1 GB all the time; the policy 3 GB, or all it has."""
    alone = stage_memory(job(ParallelConfig(pipeline=2)), 0)
    first, second = (stage_memory(colocated(), stage) for stage in (0, 1))
    assert (alone.kept, alone.serving, alone.sampling) == (0, 0, 0)
    assert (first.kept, first.serving, first.resting) == (1e9, 40e9, 3e9)
    assert first.sampling == 44e9
    assert first.policy_peak == alone.peak
    assert first.peak == first.sampling
    assert stage_memory(colocated(memory_fraction=1e-9), 0).peak == alone.peak + 1e9
    assert (second.kept, second.sampling) == (0, 0)  # its GPU has no server
    both = [stage_memory(colocated(servers=servers), 1) for servers in (1, 2)]
    assert [one.kept for one in both] == [0, 1e9]
    assert stage_memory(colocated(first_gpu=1), 0).kept == 0
    stays = stage_memory(colocated(offload=False), 0)
    assert stays.resting == 3e9 + (2 + 4 + 12) * first.parameters.total
    given = replace(colocated(), options=PlanOptions(engine_memory_fraction=0.25))
    assert stage_memory(given, 0).serving == engine_plan(given).cache + engine_plan(given).weights == 20e9


def test_a_hand_over_by_hand() -> None:
    """During a weight sync by IPC: weights of trainer and engine, two buckets and one gathered tensor."""
    largest = 32 * 8  # the embedding
    by_disk, by_ipc = (stage_memory(colocated(servers=2, sync=sync), 0) for sync in ("disk", "ipc"))
    assert (by_disk.handing, by_disk.reading, by_disk.handover) == (0, 0, 0)
    assert by_ipc.handing == 3e9 + 2 * by_ipc.parameters.total + 2 * 2 * largest + 2 * 512 * 2**20
    assert by_ipc.reading == 2 * 2952
    assert by_ipc.handover == by_ipc.handing + 1e9 + by_ipc.reading
    assert by_ipc.peak == by_disk.peak == by_ipc.sampling
    assert stage_memory(colocated(sync="ipc", memory_fraction=1e-9), 0).peak == by_ipc.handover
    small = stage_memory(colocated(servers=2, sync="ipc", bucket_mb=1), 0)
    assert small.handing == by_ipc.handing - 2 * 511 * 2**20
    stays = stage_memory(colocated(offload=False, sync="ipc"), 0)
    assert stays.handing == by_ipc.handing + (4 + 12) * stays.parameters.total
    assert stage_memory(colocated(tensor=2, sync="ipc"), 0).reading == 2952
    assert stage_memory(colocated(sync="ipc"), 1).handover == 0  # its GPU has no server


def test_the_copies_of_an_offloaded_policy_by_hand() -> None:
    """Weights and optimizer of the largest stage, in blocks of 2^28 bytes, on each of two ranks; with the
    optimizer on the host weights alone. Nothing where the policy stays, or where no server takes turns."""
    both = colocated()
    largest = max(stage_parameters(SMALL, both.parallel, stage).total for stage in (0, 1))
    assert offloaded_bytes(both) == (2 + 12) * largest
    assert host_bytes(both) - host_bytes(colocated(offload=False)) == 2 * 2**28
    assert offloaded_bytes(colocated(offload=False)) == 0
    assert offloaded_bytes(job(ParallelConfig(offload=True))) == 0
    host = altered(both, ON_HOST)
    assert offloaded_bytes(host) == 2 * largest
    found = handover_estimate(both)
    assert found is not None
    assert found.moving_seconds == pytest.approx(2 * 14 * largest / 32e9)  # half of PCIe's rate, both ways
    assert found.reading_seconds == pytest.approx(2 * 2952 / 2e9)
    assert handover_estimate(job()) is None
    plan = make_plan(both)
    parts = (plan.sampling_seconds, plan.train_seconds, plan.sync.expected_seconds, found.seconds)
    assert plan.step_seconds == pytest.approx(sum(parts))


def test_the_disk_of_a_run_by_hand() -> None:
    """One parameter in float32 takes 12 bytes of a checkpoint and 4 of an export."""
    count = total_parameters(SMALL)
    local = altered(job().run, {"steps": 40, "model.dtype": "float32", "rollout.engine": "local"})
    for checkpoint, expected in [
        (CheckpointConfig(every=10, keep_last=2), 3 * 12 + 4),
        (CheckpointConfig(every=10, keep_last=0), 5 * 12 + 4),  # all four
        (CheckpointConfig(every=10, keep_last=1, keep_every=20), 4 * 12 + 4),
        (CheckpointConfig(every=10, keep_last=1, export_every=20), 2 * 12 + 3 * 4),
    ]:
        assert run_folder_bytes(replace(local, checkpoint=checkpoint), SMALL) == count * expected


def test_the_disk_of_held_out_responses_by_hand(tmp_path: Path) -> None:
    """Two suites of 3 and 1 problems, 8 responses of 10 tokens, 5 bytes a token; of steps 0, 20 and 40."""
    for name, rows in (("a", 3), ("b", 1)):
        (tmp_path / f"{name}.jsonl").write_text("{}\n" * rows + "\n")
    run = replace(job().run, steps=40)
    assert evaluation_bytes(run, 10) == 0
    asked = EvaluationConfig(every=20, suites=tuple(str(tmp_path / f"{n}.jsonl") for n in "ab"), samples=8)
    run = replace(run, evaluation=asked)
    assert evaluation_bytes(run, 10) == 3 * 4 * 8 * 10 * 5
    for field, value, expected in (
        ("evaluation.max_response_tokens", 4, 3 * 4 * 8 * 4 * 5),
        ("rollout.keep_steps", 25, 2 * 4 * 8 * 10 * 5),
        ("evaluation.suites", ("absent",), 0),
    ):
        assert evaluation_bytes(altered(run, {field: value}), 10) == expected
    assert replace(job(), run=run).rollouts > rollout_bytes(run, job().shape, job().mean_response)


def test_the_disk_of_rollouts_by_hand() -> None:
    """12 bytes a token; of Qwen3-30B-A3B's 48 layers 8 of 128 experts in a byte each."""
    run = replace(job().run, steps=40)
    assert rollout_bytes(run, SMALL, 10) == 40 * 8 * 10 * 12
    few = {"rollout.keep_steps": 5}
    for changes, steps in (
        ({"rollout.keep_steps": 25}, 25),
        (few, 20),  # since the older of two checkpoints
        ({"rollout.keep_steps": None}, 40),
        ({**few, "checkpoint.keep_every": 10}, 40),
        ({**few, "checkpoint.keep_best": 1}, 40),
    ):
        assert rollout_bytes(altered(run, changes), SMALL, 10) == steps * 8 * 10 * 12
    plan = make_plan(of_recipe("qwen3_30b_a3b"))
    assert plan.job.rollouts == 500 * 1024 * 4096 * (12 + 48 * 8)
    assert ", 830 GB for the rollouts of 500 steps; logs come on top" in "\n".join(summary(plan))
    without = of_recipe("qwen3_30b_a3b", {"rollout.route_replay": "off"})
    assert rollout_bytes(without.run, without.shape, 4096) == 500 * 1024 * 4096 * 12
