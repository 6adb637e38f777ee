"""``bapo plan``: FLOPs, memory and time by hand on a small shape, and published sizes of models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_megatron.algo.bapo import balanced, grpo, paper, published_code
from bapo_megatron.algo.corrections import CorrectionsConfig
from bapo_megatron.cli import run as bapo
from bapo_megatron.commands.recipe_flags import parse_flags
from bapo_megatron.config import (
    AlgorithmConfig,
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    DistillationConfig,
    EnvironmentConfig,
    EvaluationConfig,
    ModelConfig,
    ParallelConfig,
    PolarityConfig,
    ReferenceKlConfig,
    RolloutConfig,
    RunConfig,
    SglangConfig,
)
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.config.transports import TRANSPORTS
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import (
    ModelShape,
    attention_flops,
    attention_weight,
    linear_flops_per_token,
    read_model_shape,
)
from bapo_megatron.hf.parameter_map import mapping_table
from bapo_megatron.layers.mlp import Experts, Mlp
from bapo_megatron.planning import memory as plan_memory
from bapo_megatron.planning.advice import changed_flags, fastest_layouts, shorter_packs, smallest_changes
from bapo_megatron.planning.engines import cache_bytes_per_token, engine_plan
from bapo_megatron.planning.job import Job, PlanOptions, find_shape, in_flight, slots
from bapo_megatron.planning.memory import (
    activation_bytes,
    host_bytes,
    offloaded_bytes,
    optimizer_bytes,
    reference_bytes,
    stage_memory,
)
from bapo_megatron.planning.page import plan_dict, plan_text
from bapo_megatron.planning.plan import JobPlan, duration, make_plan, nodes_text, summary
from bapo_megatron.planning.sizes import (
    evaluation_bytes,
    largest_parameter,
    rollout_bytes,
    run_folder_bytes,
    stage_parameters,
    total_parameters,
)
from bapo_megatron.planning.speed import handover_estimate, host_update, reference_seconds, speed
from bapo_megatron.planning.teacher import teacher_plan
from bapo_megatron.planning.traffic import Sync, forward_passes, known_passes, update_traffic
from bapo_megatron.policy import output_head
from tests.support.altered import altered
from tests.support.shapes import activation_bytes_per_token, resized, uniform

RECIPES = Path(__file__).parents[3] / "recipes"
RECIPE = RECIPES / "bp_math_32b_64k.py"
DEMO = RECIPES / "demo_cpu.py"
SHAPES = RECIPES / "shapes"
ON_HOST = {"run.optimizer.device": "cpu"}

# One layer: 8 x (8 + 4 + 4) qkv + 16 bias + 8 x 8 projection + 3 x 8 x 16 MLP + 2 x 8 norms = 608.
SMALL = uniform(
    family="qwen2",
    layers=4,
    hidden=8,
    heads=4,
    kv_heads=2,
    head_dim=2,
    ffn=16,
    vocab=32,
    max_positions=64,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    tied=False,
    qkv_bias=True,
    qk_norm=False,
)
ONE = ParallelConfig()
BIG = read_model_shape(SHAPES / "DeepSeek-R1-Distill-Qwen-32B")


def job(parallel: ParallelConfig = ONE, shape: ModelShape = SMALL, **batch: object) -> Job:
    """Eight responses of 14 tokens, each with a prompt of 2: 128 tokens, 8 packs of 16."""
    run = RunConfig(
        "small",
        ModelConfig(Path("model")),
        DataConfig(Path("data"), max_prompt_tokens=16),
        parallel=parallel,
        rollout=RolloutConfig(
            prompts_per_step=2, group_size=4, max_response_tokens=14, sglang=SglangConfig(tensor=4)
        ),
        batch=BatchConfig(**{"pack_tokens": 16, **batch}),
    )
    return Job(run, shape, PlanOptions(mean_response_tokens=14))


def planned(*flags: str, **options: object) -> Job:
    """The 32B recipe with changes to its layout, ``name=value``, and to the options."""
    run = load_recipe(RECIPE, RunConfig)
    changes = {name: int(value) for name, value in (flag.split("=") for flag in flags)}
    run = replace(run, parallel=replace(run.parallel, **changes))
    return Job(run, BIG, PlanOptions(**options))


def of_recipe(name: str, changes: Mapping[str, object] = MappingProxyType({})) -> Job:
    """A recipe with changes to its fields."""
    path = RECIPES / f"{name}.py"
    run = altered(load_recipe(path, RunConfig), changes)
    return Job(run, find_shape(path, run.model.hf_path), PlanOptions())


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
    ("name", "billions"),
    [  # the Hugging Face model cards
        ("DeepSeek-R1-Distill-Qwen-32B", 32.76),
        ("DeepSeek-R1-Distill-Qwen-7B", 7.62),
        ("Qwen3-4B-Instruct-2507", 4.02),
        ("Qwen3-8B", 8.19),
        ("Qwen3-32B", 32.76),
        ("Llama-3.2-3B", 3.21),
    ],
)
def test_shipped_shapes_have_the_published_sizes(name: str, billions: float) -> None:
    assert round(total_parameters(read_model_shape(SHAPES / name)) / 1e9, 2) == billions


def test_flops_by_hand() -> None:
    """Matrices of a layer: 8 x 16 + 8 x 8 + 3 x 8 x 16 = 576; of the head: 256."""
    assert linear_flops_per_token(SMALL) == 2 * (4 * 576 + 256)
    # 4 layers x 4 heads x 2 wide x 2 products x 2 FLOPs x 10 x 10 / 2 causal pairs
    assert attention_flops(SMALL, 10) == 4 * 4 * 2 * 2 * 2 * 50
    assert attention_weight(SMALL) == pytest.approx(64 / 5120)


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


def test_pipeline_idles_less_when_interleaved() -> None:
    assert slots(ONE, 8) == 8
    assert slots(ParallelConfig(pipeline=4), 8) == 11
    assert slots(ParallelConfig(pipeline=4, virtual=3), 8) == 9


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


def test_the_time_of_a_step_on_the_host_by_hand() -> None:
    """40 B an element at half of 614 GB/s, shared by a node's ranks; 4 and 2 B at half of 64 GB/s."""
    shared = job(ParallelConfig(data=2))
    assert host_update(shared) is None
    host = altered(shared, ON_HOST)
    found = host_update(host)
    assert found is not None
    assert found.elements == 2952 / 2
    assert found.step_seconds == pytest.approx(40 * 2952 / 307e9)
    assert (found.fetch_seconds, found.send_seconds) == pytest.approx((2 * 2952 / 32e9, 2952 / 32e9))
    assert found.seconds == found.step_seconds
    plan, without = make_plan(host), make_plan(shared)
    assert plan.train_seconds - without.train_seconds == pytest.approx(host.updates * found.seconds)
    assert "to step 0.00 B elements a GPU on the host" in plan_text(plan, [], [])


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


def test_norms_of_queries_and_keys_keep_copies() -> None:
    """Norms of queries and keys keep copies of their inputs, which lie scattered in the fused output."""
    normed = resized(SMALL, qk_norm=True)
    two = ParallelConfig(tensor=2)  # one group on a rank
    for parallel, extra in ((ONE, 2 * (8 + 4) + 4 * (4 + 2)), (two, 2 * (4 + 2) + 4 * (2 + 1))):
        with_norms, plain = (
            activation_bytes_per_token(s, parallel, 2, "none", "te") for s in (normed, SMALL)
        )
        assert with_norms.layer - plain.layer == extra


def test_traffic_by_hand() -> None:
    """16 tokens x 8 wide x 2 B = 256 B a message, 8 packs. With CP half of a pack on each rank: 8 tokens
    x 2 x 4 wide x 2 B, once round a ring of two, 4 layers, 8 packs."""
    for name, parallel, sent in (
        ("TP", ParallelConfig(tensor=2, sequence=True), 256 / 2 * 8 * (4 * (4 + 6 + 4) + 2)),
        ("PP", ParallelConfig(pipeline=2), 256 * 8 * 3),
        ("DP", ParallelConfig(data=2), 6 * 2952 / 2),
        ("CP", ParallelConfig(context=2), 8 * 8 * 2 * 4 * 8 * (3 + 1)),
    ):
        assert {part.name: part.sent for part in update_traffic(job(parallel))}[name] == sent


@pytest.mark.parametrize(
    ("flags", "links"),
    [
        ((), ("NVLink", "network", "network")),
        # Groups of 6 ranks: the second one has two GPUs of the first node and four of the next.
        (("tensor=2", "context=3", "data=4"), ("NVLink", "network", "network")),
        (("tensor=2", "context=3"), ("NVLink", "NVLink", "NVLink")),
        (("tensor=4", "context=2"), ("NVLink", "NVLink", "NVLink")),
    ],
)
def test_traffic_takes_the_network_once_a_group_leaves_the_node(
    flags: tuple[str, ...], links: tuple[str, ...]
) -> None:
    found = {part.name: part.link for part in update_traffic(planned(*flags))}
    assert found == dict(zip(("TP", "CP", "DP"), links, strict=True))


def test_speed_adds_up() -> None:
    """No pipeline: time is executed FLOPs over the stated rates, and full recompute adds the layers once."""
    attention = attention_flops(SMALL, 16) / 16  # every response has 14 tokens, a prompt 2
    body, head = 2 * 4 * 576, 512
    # "selective" recomputes the MLP, 2 x 4 x 3 x 8 x 16.
    for mode, again, scores in (("none", 0, 0), ("selective", 3072, 0), ("full", body, 1)):
        found = speed(job(recompute=mode))
        # The search's pass comes on top. Flash attention makes seven products, of which a forward pass has
        # two, so 3.5 forward passes, not 3.
        matrices = 4 * body + again + 4 * head
        scored = (4.5 + scores) * attention
        assert found.executed_per_token == pytest.approx(matrices + scored)
        seconds = 128 * (matrices / 0.3 + scored / 0.5) / 989e12
        assert found.update_seconds == pytest.approx(seconds)
        assert found.idle == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("algorithm", "passes"),
    [
        (AlgorithmConfig(balanced()), 1),
        (AlgorithmConfig(grpo()), 0),
        (AlgorithmConfig(balanced(), old_log_probs="trainer"), 2),
        (AlgorithmConfig(grpo(), old_log_probs="trainer", reuse_epochs=4, updates_per_epoch=3), 0.25),
        (AlgorithmConfig(grpo(), corrections=CorrectionsConfig(off_policy_delta=0.1)), 1),
        (AlgorithmConfig(balanced(), corrections=CorrectionsConfig(off_policy_delta=0.1)), 2),
        (AlgorithmConfig(loss="sapo"), 0),
        (AlgorithmConfig(loss="gspo"), 1),
        (AlgorithmConfig(loss="not_on_this_machine:Loss"), 1),
        (AlgorithmConfig(replace(paper(), bounds_tokens=None)), 0),
    ],
)
def test_forward_only_passes_of_an_update(algorithm: AlgorithmConfig, passes: float) -> None:
    """pi_old takes a pass over the step's tokens, which four epochs train on: a quarter for each."""
    assert forward_passes(altered(job(), {"run.algorithm": algorithm})) == passes


@pytest.mark.parametrize(
    ("algorithm", "staleness", "passes"),
    [
        (AlgorithmConfig(balanced()), 0, 1),
        (AlgorithmConfig(balanced()), 1, 0),
        (AlgorithmConfig(balanced(), known_ratio=False), 0, 0),
        (AlgorithmConfig(balanced(), old_log_probs="trainer"), 1, 1),
        (AlgorithmConfig(balanced(), polarity=PolarityConfig(enabled=True)), 0, 0),
        (AlgorithmConfig(grpo()), 0, 0),
        (AlgorithmConfig(grpo(), corrections=CorrectionsConfig(off_policy_delta=0.1)), 0, 1),
        (AlgorithmConfig(balanced(), corrections=CorrectionsConfig(off_policy_delta=0.1)), 0, 2),
        (AlgorithmConfig(loss="gspo"), 0, 0),  # between engine and trainer there is a ratio, too
        (AlgorithmConfig(loss="gspo", old_log_probs="trainer"), 0, 1),
        (AlgorithmConfig(loss="not_on_this_machine:Loss"), 0, 0),
    ],
)
def test_the_first_update_of_a_step_knows_its_ratios(
    algorithm: AlgorithmConfig, staleness: int, passes: int
) -> None:
    """A step of one update takes no forward-only pass where the ratios are known; one of four takes three."""
    one = altered(job(), {"run.algorithm": algorithm, "run.rollout.max_staleness": staleness})
    for updates in (1, 4):
        plan = make_plan(altered(one, {"run.algorithm.reuse_epochs": updates}))
        assert known_passes(plan.job) == passes
        once = plan.speed.forward_seconds / forward_passes(plan.job) if passes else 0
        assert plan.train_seconds == pytest.approx(updates * plan.speed.update_seconds - passes * once)
        assert ("the first" in plan_text(plan, [], [])) == bool(passes)


def test_replicas_without_a_full_pack_idle() -> None:
    """8 packs: on 16 replicas as long as on 8, at half the tokens a GPU, and nothing the better for it."""
    eight, sixteen = (make_plan(job(ParallelConfig(data=data))) for data in (8, 16))
    assert sixteen.speed.update_seconds == pytest.approx(eight.speed.update_seconds)
    assert sixteen.speed.tokens_per_second == pytest.approx(eight.speed.tokens_per_second / 2)
    assert sixteen.speed.idle == pytest.approx(0.5)
    assert sixteen.cost > 1.9 * eight.cost
    text = plan_text(sixteen, [], [])
    assert "WARNING: its 128 tokens fill 50% of one pack of each of 16 replicas" in text
    assert "of each of" not in plan_text(eight, [], [])
    assert "GB of the 1,800 that it may use, 90% of its 2,000; the checkpoint has" in text


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(data=3),
        ParallelConfig(data=16),
        ParallelConfig(pipeline=2, data=3),
        ParallelConfig(pipeline=2, virtual=2, data=3),
    ],
)
def test_the_rate_is_that_of_the_tokens_there_are(parallel: ParallelConfig) -> None:
    one = job(parallel)
    found = speed(one)
    assert found.tokens_per_second * found.update_seconds * one.gpus == pytest.approx(one.tokens_per_update)


@pytest.mark.parametrize(("mean", "spread"), [(16384, 1.5), (8000, 1.5), (50000, 1.5), (16384, 0.3)])
def test_attention_is_that_of_the_assumed_lengths(mean: int, spread: float) -> None:
    """The token-weighted mean of the lengths by 20,000 quantiles, with prompts of the mean length."""
    found = planned(mean_response_tokens=mean, length_spread=spread)
    responses = [found.lengths.quantile((i + 0.5) / 20_000) for i in range(20_000)]
    lengths = [found.mean_prompt + response for response in responses]
    expected = sum(n * n for n in lengths) / sum(lengths)
    assert found.typical_length == pytest.approx(expected, rel=0.005)
    assert speed(found).flops_per_token == pytest.approx(
        3 * (linear_flops_per_token(BIG) + attention_flops(BIG, expected) / expected), rel=0.005
    )


def test_pipeline_speed() -> None:
    """Two stages, 8 packs: 9 slots of the last stage, which has the output layer."""
    found = speed(job(ParallelConfig(pipeline=2)))
    attention = attention_flops(SMALL, 16) / 16 / 2
    body = 2 * 4 * 576 / 2
    slot = 16 * ((body * 4 + 4 * 512) / 0.3 + attention * 4.5 / 0.5) / 989e12
    assert found.update_seconds == pytest.approx(9 * slot)


def test_cache_by_hand() -> None:
    assert cache_bytes_per_token(SMALL) == 2 * 4 * 2 * 2 * 2
    assert cache_bytes_per_token(BIG) == 256 * 1024
    found = engine_plan(planned(engine_gpus=64))
    # 0.85 x 80 GB less a quarter of the weights, on four GPUs, over 17.7 GB a sequence.
    assert found.longest_sequences == int((0.85 * 80e9 * 4 - 65.5e9) / (67584 * 256 * 1024)) == 11
    assert engine_plan(planned(engine_gpus=2)).count == 0
    assert not engine_plan(altered(planned(), {"run.rollout.sglang.tensor": 1})).fits


def test_decoding_by_hand() -> None:
    """One engine of 4 GPUs, 8 responses: a step reads all weights and 8 caches of 2 + 14 / 2 tokens.

    The model has two KV heads: each is held by two GPUs.
    """
    found = engine_plan(altered(job(), {"options.engine_gpus": 4}))
    step = (2952 * 2 / 4 + 8 * 9 * 64 / 2) / (0.6 * 3350e9)
    assert found.running == 8
    assert found.tokens_per_second == pytest.approx(8 / step)
    assert found.step_seconds == pytest.approx(14 * step)
    assert found.longest_seconds == pytest.approx(14 * (2952 * 2 / 4 + 7 * 64 / 2) / (0.6 * 3350e9))
    # All have the longest length, so nothing is left for a tail: the prompts' 2 tokens come on top.
    assert found.prefill_seconds == pytest.approx(8 * 2 * (2 * 4 * 576 + 512) / 4 / (0.3 * 989e12))
    assert found.rollout_seconds == pytest.approx(found.step_seconds + found.prefill_seconds)
    assert found.cut_share == 1


def test_dropped_groups_are_sampled_again() -> None:
    """Half of the groups dropped: twice as many responses, of which as many train as before."""
    with_half = altered(job(), {"options.dropped_groups": 0.5, "options.engine_gpus": 4})
    found, without = make_plan(with_half), make_plan(altered(with_half, {"options.dropped_groups": 0.0}))
    assert found.job.sampled_responses == 16
    assert found.engines.running == 16
    assert found.engines.prefill_seconds == pytest.approx(2 * without.engines.prefill_seconds)
    twice = found.engines.step_seconds * found.engines.tokens_per_second
    assert twice == pytest.approx(2 * without.engines.step_seconds * without.engines.tokens_per_second)
    assert found.train_seconds == without.train_seconds
    assert "for 16 responses of 14 tokens, 8 of them of dropped groups" in plan_text(found, [], [])
    assert "dropped" not in plan_text(without, [], [])
    most = altered(with_half, {"options.dropped_groups": 0.99})
    assert most.sampled_responses == 3 * 8  # rollout.max_oversampling


def test_the_tail_of_a_rollout_by_hand() -> None:
    """Two engines, eight responses of 7 tokens in the mean: each has four, one of them of 14."""
    options = PlanOptions(mean_response_tokens=7, engine_gpus=8, length_spread=1e-6)
    even = engine_plan(replace(job(), options=options))
    bandwidth = 0.6 * 3350e9
    weights, token = 2952 * 2 / 4 / bandwidth, 64 / 2 / bandwidth
    seconds = 7 * weights + 4 * 7 * (2 + 3.5) * token
    assert even.rollout_seconds - even.prefill_seconds == pytest.approx(seconds)
    assert even.cut_share == pytest.approx(0)
    spread = engine_plan(replace(job(), options=replace(options, length_spread=3.0)))
    assert spread.rollout_seconds > 1.8 * even.rollout_seconds  # 14 steps, not 7
    uneven = engine_plan(replace(job(), options=replace(options, engine_imbalance=2.0)))
    seconds = 7 * weights + 8 * 7 * (2 + 3.5) * token
    assert uneven.rollout_seconds - uneven.prefill_seconds == pytest.approx(seconds)
    queued = engine_plan(altered(job(), {"options": options, "run.rollout.max_batch": 2}))
    assert queued.running == 2
    seconds = 14 * weights + 4 * 7 * (2 + 3.5) * token  # two after two
    assert queued.rollout_seconds - queued.prefill_seconds == pytest.approx(seconds)


def test_a_step_that_continues_responses_waits_for_no_tail() -> None:
    """With staleness of 1 unfinished responses continue in the next step; they overlap unless that is off."""
    one = replace(job(), options=PlanOptions(mean_response_tokens=7, length_spread=3.0))
    waits = make_plan(one)
    assert waits.sampling_seconds == waits.engines.rollout_seconds > waits.engines.step_seconds
    beside = make_plan(altered(one, {"run.rollout.max_staleness": 1}))
    sync = beside.sync.expected_seconds
    assert beside.sampling_seconds == beside.engines.step_seconds
    assert beside.step_seconds - sync == pytest.approx(max(beside.sampling_seconds, beside.train_seconds))
    assert " s beside it, sync " in list(summary(beside))[2]
    behind = make_plan(altered(beside.job, {"run.rollout.overlap": False}))
    assert behind.step_seconds - sync == pytest.approx(behind.sampling_seconds + behind.train_seconds)


def test_weight_syncs_by_hand() -> None:
    """5,904 bytes: 50 GB/s on the wire; 4.61 GB/s by NCCL; 2 GB/s to the disk, and again from it."""

    def sync(**changes: object) -> Sync:
        sglang = SglangConfig(**{"urls": ("http://n1:30000",), **changes})  # type: ignore[arg-type]
        return make_plan(altered(job(), {"run.rollout.engine": "sglang", "run.rollout.sglang": sglang})).sync

    assert sync(sync="broadcast").seconds == sync().seconds == pytest.approx(5904 / 50e9)
    assert sync(sync="broadcast").expected_seconds == pytest.approx(5904 * 14.2 / 65.5e9)
    assert sync().expected_seconds == pytest.approx(2 * 5904 / 2e9)
    pigeon = patch.dict(TRANSPORTS, pigeon=TRANSPORTS["disk"])
    with pigeon, pytest.raises(ConfigError, match="sync=pigeon: no rate"):
        sync(sync="pigeon")
    assert make_plan(colocated()).sync.expected_seconds == pytest.approx(5904 / 2e9)  # reading is a turn's
    nodes = make_plan(planned())  # eight nodes write, each node of servers reads all
    assert nodes.sync.expected_seconds == pytest.approx(nodes.sync.sent * (1 / 8 + 1) / 2e9)


sizes = st.sampled_from([1, 2, 4, 8])


@given(sizes, sizes, sizes, sizes, st.sampled_from(["none", "selective", "full"]))
def test_more_ranks_never_need_more_memory(
    tensor: int, pipeline: int, context: int, data: int, mode: str
) -> None:
    """Doubling TP, CP or DP never makes a part of any stage larger; doubling PP none of the model's parts."""
    base = planned(f"tensor={tensor}", f"pipeline={pipeline}", f"context={context}", f"data={data}")
    base = altered(base, {"run.batch.recompute": mode})
    before = stage_memory(base, 0)
    for axis in ("tensor", "context", "data", "pipeline"):
        after = stage_memory(altered(base, {f"run.parallel.{axis}": 2 * getattr(base.parallel, axis)}), 0)
        for part in ("weights", "gradients", "optimizer"):
            assert getattr(after, part) <= getattr(before, part)
        if axis != "pipeline" and not (axis == "context" and context == 1):  # a ring has buffers
            assert after.activations <= before.activations


@given(sizes, sizes, st.sampled_from([1, 2, 4]))
def test_recomputation_orders_memory_and_time(tensor: int, context: int, pipeline: int) -> None:
    base = planned(f"tensor={tensor}", f"pipeline={pipeline}", f"context={context}", "data=1")
    jobs = [altered(base, {"run.batch.recompute": mode}) for mode in ("none", "selective", "full")]
    used = [stage_memory(one, 0).activations for one in jobs]
    rates = [speed(one).tokens_per_second for one in jobs]
    assert used == sorted(used, reverse=True)
    assert rates == sorted(rates, reverse=True)


def test_advice_fits_and_is_small() -> None:
    """Without context parallelism the activations do not fit; recomputing them is enough, on these GPUs."""
    plan = make_plan(planned("context=1", "data=8"))
    assert plan.verdict.memory
    [change] = smallest_changes(plan)
    assert change.flags == ["--batch.recompute selective"]
    assert change.gpus == 64
    plan = make_plan(planned("tensor=4", "context=4"))
    bigger, same = smallest_changes(plan)
    assert bigger.flags == ["--parallel.context 32"]
    assert (bigger.gpus, same.gpus) == (128, 16)
    assert len(same.flags) > 1


def test_the_optimizer_on_the_host_is_advised() -> None:
    """One node, all recomputed: 88 GB of 72, with the optimizer's state on the host 38."""
    over = make_plan(altered(planned("context=1"), {"run.batch.recompute": "full"}))
    assert over.verdict.memory
    [change] = smallest_changes(over)
    assert (change.flags, change.gpus) == (["--optimizer.device cpu"], 8)


def test_stages_of_listed_layers_are_advised_without_the_list() -> None:
    """448 layers at TP 8, with all else that saves: more stages are left, which the list does not fit."""
    deep = replace(planned("tensor=8", "context=1", "data=1", "pipeline=2"), shape=resized(BIG, layers=448))
    saving = {"run.batch.recompute": "full", "run.parallel.pipeline_layers": (220, 228)}
    deep = altered(deep, {**ON_HOST, **saving})
    [change] = smallest_changes(make_plan(deep))
    assert change.flags == ["--parallel.pipeline 8", "--parallel.pipeline-layers"]
    words = " ".join(change.flags).split()
    assert parse_flags("plan", RECIPE, deep.run, ["recipe", *words]).parallel.pipeline_layers == ()


def test_comparison_keeps_experts_within_a_node() -> None:
    """Qwen3-30B-A3B on two nodes: EP 16 sends half of its copies over the network, the recipe's EP 8 none."""
    plan = make_plan(of_recipe("qwen3_30b_a3b", {"parallel.expert": 16}))
    [best] = fastest_layouts(plan, 1)
    assert best.job.parallel.expert == of_recipe("qwen3_30b_a3b").parallel.expert == 8
    assert all(part.link == "NVLink" for part in best.traffic if part.name == "EP")
    assert best.cost < 0.7 * plan.cost


def for_short_responses(**algorithm: object) -> JobPlan:
    """A recipe for responses of 64k on 16 GPUs, with those of 16k: its packs have room for 67,584 tokens."""
    changes = {f"algorithm.{name}": value for name, value in algorithm.items()}
    return make_plan(of_recipe("bp_math_7b_64k", {"rollout.max_response_tokens": 16384, **changes}))


def test_packs_of_the_longest_sequence_are_proposed() -> None:
    plan = for_short_responses()
    same, fewest = shorter_packs(plan)
    assert changed_flags(plan, same) == ["--batch.pack-tokens 18432"]
    assert changed_flags(plan, fewest) == ["--parallel.context 1", "--batch.pack-tokens 18432"]
    assert (plan.job.gpus, same.job.gpus, fewest.job.gpus) == (16, 16, 4)
    assert same.peak < 0.7 * plan.peak
    assert fewest.verdict.fits
    page = plan_text(plan, [], [])
    assert "Packs have room for 67,584 tokens, and the longest sequence has 18,432" in page
    assert f"--batch.pack-tokens 18432: {same.peak / 1e9:.1f} GB on 16 GPUs" in page
    assert plan_dict(plan)["shorter_packs"][1]["gpus"] == 4


def test_packs_that_are_needed_or_decide_the_search_stay() -> None:
    assert not shorter_packs(make_plan(planned()))
    in_packs = for_short_responses(bounds=published_code())
    assert in_packs.job.run.algorithm.bounds.sums_over == "micro_batch"
    assert not shorter_packs(in_packs)
    assert {one.job.run.batch.pack_tokens for one in fastest_layouts(in_packs, 40)} == {67584}


def test_the_comparison_varies_the_packs() -> None:
    plan = for_short_responses()
    found = fastest_layouts(plan, 40)
    assert {one.job.run.batch.pack_tokens for one in found} == {18432, 67584}
    assert found[0].cost < plan.cost
    assert "18,432" in plan_text(plan, [], found[:1])


def test_comparison_is_sorted_and_fits() -> None:
    plans = fastest_layouts(make_plan(planned()), 5)
    assert len(plans) == 5
    assert [p.cost for p in plans] == sorted(p.cost for p in plans)
    assert not any(p.verdict.memory for p in plans)
    assert {p.job.gpus for p in plans} == {64}
    # Only layouts that communicate less are ahead of the recipe's, and they leave less room in an update.
    ahead = list(takewhile(lambda plan: plan.job.parallel != planned().parallel, plans))
    assert len(ahead) < 5
    ours = make_plan(planned())
    assert all(plan.speed.link_seconds < ours.speed.link_seconds for plan in ahead)
    [memory] = ours.stages
    assert all(max(stage.training for stage in plan.stages) > memory.training for plan in ahead)


def test_a_shape_is_found_or_asked_for(tmp_path: Path) -> None:
    assert find_shape(RECIPE, Path("anywhere/DeepSeek-R1-Distill-Qwen-32B")) == BIG
    assert find_shape(tmp_path / "my_run.py", Path("models/DeepSeek-R1-Distill-Qwen-32B")) == BIG
    with pytest.raises(ConfigError, match="needs no weights"):
        find_shape(RECIPE, tmp_path / "unknown")


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert bapo(["plan", str(RECIPE), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert found["stages"][0]["parameters"] == stage_parameters(BIG, planned().parallel, 0).total
    assert bapo(["plan", str(RECIPE), "--parallel.tensor", "4", "--parallel.context", "4"]) == 1
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text
    assert "Smallest change: --parallel.context 32  (takes 128 GPUs)" in text


def test_nodes_time_and_disk_of_the_whole_run() -> None:
    """500 steps, a checkpoint every 10 of them, two kept: three checkpoints of 14 bytes a parameter while one
    is written, the final export, and two versions of the weights for SGLang."""
    plan = make_plan(planned())
    assert (plan.trainer_nodes, plan.server_nodes) == (8, 8)
    assert plan.run_seconds == 500 * plan.step_seconds
    assert plan.checkpoint_seconds == 10 * plan.step_seconds
    parameters = total_parameters(BIG)
    assert plan.disk == parameters * (3 * 14 + 3 * 2)
    lines = plan_text(plan, [], []).splitlines()[3:8]
    assert lines == list(summary(plan))
    peak = max(stage.peak for stage in plan.stages) / 1e9
    assert lines[0].startswith(f"FITS: at most {peak:.1f} GB of a GPU's 80 (h100-80gb), ")
    assert lines[1].startswith("Nodes: 8 nodes train + 8 nodes sample = 16 nodes; servers need nodes")
    assert lines[2].endswith(f"; 500 steps take {plan.run_seconds / 86400:.1f} days (estimates)")
    assert lines[3] == f"First checkpoint: step 10, after {plan.checkpoint_seconds / 3600:.1f} h"
    assert lines[4].startswith(f"Disk: {plan.disk / 1e9:,.0f} GB")
    short = make_plan(altered(planned(), {"run.steps": 4}))
    assert short.checkpoint_seconds == short.run_seconds == 4 * short.step_seconds
    assert nodes_text(1, 0) == "1 node trains"
    assert [duration(s) for s in (90, 7199, 7200, 172800)] == ["90 s", "120 minutes", "2.0 h", "2.0 days"]


def test_node_count_in_the_summary() -> None:
    """A split of one node, servers that run already, and the nodes of a cluster file."""
    urls = {"rollout.sglang.urls": ("http://n1:30000",)}
    shared, split = "r1_distill_qwen_7b_8k", "partial_rollout_7b"
    for recipe, changes, counted, nodes in (
        (split, {}, (), "1, of whose GPUs 4 train and 4 sample"),
        (split, urls, (), "1 node trains"),
        (split, {}, ("3 nodes train",), "3 nodes train"),
        (shared, {}, (), "1, where 8 GPUs train and 8 sample, in turns"),
        (shared, {"parallel.data": 4}, (), "2, where 16 GPUs train and 8 of the first sample, in turns"),
    ):
        assert list(summary(make_plan(of_recipe(recipe, changes)), *counted))[1] == f"Nodes: {nodes}"


def colocated(offload: bool = True, **changes: object) -> Job:
    """Eight responses on two pipeline stages of one rank; the first has a server, which keeps 1 GB."""
    one = job(ParallelConfig(pipeline=2, offload=offload))
    sglang = SglangConfig(**{"colocated": True, "memory_fraction": 0.5, "kept_gb": 1.0, **changes})  # type: ignore[arg-type]
    return altered(one, {"run.rollout.engine": "sglang", "run.rollout.sglang": sglang})


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


def test_the_seconds_of_a_hand_over_by_hand() -> None:
    """Gathered over NVLink at 450 GB/s; two copies, each read and written, at half of 3.35 TB/s."""
    found = handover_estimate(colocated(sync="ipc"))
    assert found is not None
    assert found.by_handles
    assert found.reading_seconds == pytest.approx(2 * 2952 * (1 / 450e9 + 4 / (0.5 * 3.35e12)))
    assert found.expected_reading_seconds == pytest.approx(2 * 2952 * 2.5 / 53e9)  # as miles measured
    assert found.seconds == found.moving_seconds + found.expected_reading_seconds
    sync = make_plan(colocated(sync="ipc")).sync
    assert sync.seconds == sync.expected_seconds == 0


def test_a_handover_that_does_not_fit_is_reported() -> None:
    big = colocated(sync="ipc", bucket_mb=80e3, memory_fraction=0.1)
    told = make_plan(big).verdict.memory
    assert len(told) == 1
    assert "while servers read the weights, 1.0 of them a server's" in told[0]


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


def test_a_frozen_reference_by_hand() -> None:
    """2952 parameters in bfloat16, in one block of 2^28 bytes; they cross half of PCIe's rate four times. A
    forward pass a step, which the passes over a batch share."""

    def with_reference(coefficient: float, epochs: int = 1) -> Job:
        kl = ReferenceKlConfig(coefficient)
        algorithm = AlgorithmConfig(grpo(), reference_kl=kl, reuse_epochs=epochs, updates_per_epoch=3)
        return altered(job(), {"run.algorithm": algorithm})

    off, on = with_reference(0.0), with_reference(0.1)
    assert (reference_bytes(off), reference_bytes(on)) == (0, 2**28)
    assert host_bytes(on) - host_bytes(off) == 2**28
    assert reference_seconds(off) == 0
    assert reference_seconds(on) == pytest.approx(4 * 2 * 2952 / 32e9)
    assert [forward_passes(one) for one in (off, on, with_reference(0.1, epochs=4))] == [0, 1, 0.25]
    plan = make_plan(on)
    rest = 3 * plan.speed.update_seconds - plan.speed.known_seconds
    assert plan.train_seconds == pytest.approx(rest + reference_seconds(on))
    assert "in which the frozen reference and the policy swap places" in plan_text(plan, [], [])
    assert "reference" not in plan_text(make_plan(off), [], [])


@pytest.mark.parametrize(
    ("staleness", "overlap", "says"),
    [
        (0, True, "then serial, on top of the step: the last group, at most 120 tokens,"),
        (1, False, "hidden behind sampling at"),
        (1, True, "hidden behind the step at"),
    ],
)
def test_a_teacher_by_hand(staleness: int, overlap: bool, says: str) -> None:
    """Eight responses of 14 tokens, each with a prompt of 2; groups of 4, at most 16 + 14 tokens each."""
    rollout = {"max_staleness": staleness, "overlap": overlap, "drop_uniform_groups": False}

    def with_teacher(coefficient: float, **changes: Any) -> JobPlan:
        changed = {f"run.rollout.{name}": value for name, value in {**rollout, **changes}.items()}
        algorithm = AlgorithmConfig(distillation=DistillationConfig(coefficient))
        return make_plan(altered(job(), {"run.steps": 40, "run.algorithm": algorithm, **changed}))

    off, on, replayed = with_teacher(0.0), with_teacher(1.0), with_teacher(1.0, replay=Path("run"))
    found = teacher_plan(on)
    assert found is not None
    seconds = on.step_seconds if staleness and overlap else on.sampling_seconds
    assert found.tokens_per_second == pytest.approx(128 / seconds)
    assert (found.responses, found.tokens, found.serial_tokens) == (8, 128, 0 if staleness else 120)
    assert (found.gpu_bytes, found.file_bytes) == (8 * 16 * 4, 8 * 14 * 4)
    assert on.rollouts - off.rollouts == 40 * found.file_bytes
    assert (on.step_seconds, on.stages) == (off.step_seconds, off.stages)
    text = plan_text(on, [], [])
    assert (
        "Teacher: reads 128 tokens a step, a prefill of each of 8 responses with its prompt, on GPUs" in text
    )
    assert says in text
    assert plan_dict(on)["teacher"] == found.values()
    for without in (off, replayed):
        assert plan_dict(without)["teacher"] is None
        assert "Teacher" not in plan_text(without, [], [])


def test_a_server_has_the_memory_of_the_recipe() -> None:
    half, given = colocated(), replace(colocated(), options=PlanOptions(engine_memory_fraction=0.25))
    assert engine_plan(half).cache == 40e9 - engine_plan(half).weights
    assert engine_plan(given).cache == 20e9 - engine_plan(given).weights
    assert stage_memory(given, 0).serving == 20e9


@pytest.mark.parametrize(
    ("changes", "told", "advice"),
    [
        ({"parallel.offload": False}, "while engines sample", ["--parallel.offload"]),
        (
            {"rollout.sglang.memory_fraction": 0.85},
            "stage 0 needs 77.0 GB while engines sample, 3.0 of them the policy's; a GPU may use 72.0",
            ["--rollout.sglang.memory-fraction 0.75"],
        ),
        (
            {"parallel.offload": False, "rollout.sglang.memory_fraction": 0.85},
            "while engines sample",
            ["--parallel.offload", "--rollout.sglang.memory-fraction 0.75"],
        ),
        (
            {
                "parallel.tensor": 2,
                "parallel.data": 4,
                "rollout.sglang.kept_gb": 12.0,
                "rollout.sglang.memory_fraction": 0.6,
            },
            "GB in an update, 12.0 of them a server's; a GPU may use 72.0",
            ["--optimizer.device cpu"],
        ),
    ],
)
def test_a_misfit_names_its_phase_and_the_smallest_change(
    changes: dict[str, object], told: str, advice: list[str]
) -> None:
    over = make_plan(of_recipe("r1_distill_qwen_7b_8k", changes))
    assert any(told in line for line in over.verdict.memory)
    found = smallest_changes(over)
    assert found[-1].flags == advice
    assert "DOES NOT FIT" in plan_text(over, found, [])


def test_the_text_of_a_plan_shows_both_turns() -> None:
    def text(changes: dict[str, object]) -> str:
        return plan_text(make_plan(of_recipe("r1_distill_qwen_7b_8k", changes)), [], [])

    turns = text({})
    assert "FITS: at most 46.1 GB (training) and 69.0 GB (sampling) of a GPU's 80 (h100-80gb)" in turns
    assert "  0      train        40.1      6.0   46.1  33.9  fits" in turns
    assert "  0      hand over    10.1     21.2   31.3  48.7  fits" in turns
    assert "  0      sample        3.0     66.0   69.0  11.0  fits" in turns
    assert "read 15.2 GB of weights from the policy's memory: copies 0.1 s, expected 0.7 s" in turns
    assert "Cores of a node: 18 or more, for 8 ranks, 8 server processes" in turns
    tool = text({"environment": EnvironmentConfig("tool.py:Tool", workers=3)})
    assert "Cores of a node: 21 or more" in tool
    assert ", 3 workers of environments and 2 scorers" in tool
    disk = text({"rollout.sglang.sync": "disk"})
    assert "servers read 15.2 GB of weights from the disk: 7.6 s at 2 GB/s" in disk
    assert "hand over" not in disk
    stays = {"parallel.offload": False, "rollout.sglang.memory_fraction": 0.5}
    assert "the policy stays (parallel.offload is off)" in text(stays)


def test_engines_that_cannot_sample_have_no_step_time() -> None:
    lines = list(summary(make_plan(altered(planned(), {"run.rollout.sglang.tensor": 1}))))
    assert lines[0].startswith("DOES NOT FIT")
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("scope", "tokens", "responses", "says"),
    [
        ("update", None, 8.0, "balanced (gradient, absolute, uniform, high_first, update, target 0.4)"),
        ("micro_batch", None, 1.0, "100% of the searches see one sign alone"),  # 16 / 16
        ("micro_batch", 28, 2.0, "50% of the searches see one sign"),
        ("micro_batch", 7, 1.0, "micro_batch of about 7 tokens"),
    ],
)
def test_a_search_over_few_responses_is_noted(
    scope: Any, tokens: int | None, responses: float, says: str
) -> None:
    """Eight responses of 14 tokens; a pack holds one and its prompt."""
    bounds = replace(balanced(), scope=scope, bounds_tokens=tokens)
    plan = altered(job(), {"run.algorithm": AlgorithmConfig(bounds)})
    assert plan.responses_per_search == responses
    text = plan_text(make_plan(plan), [], [])
    assert says in text
    assert ("WARNING" in text) == (responses < 4)


def test_no_search_is_named_with_fixed_bounds() -> None:
    plan = altered(job(), {"run.algorithm": AlgorithmConfig(grpo())})
    assert plan.responses_per_search is None
    assert "Clipping bounds" not in plan_text(make_plan(plan), [], [])


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
    assert plan.rollouts == 500 * 1024 * 4096 * (12 + 48 * 8)
    assert ", 830 GB for the rollouts of 500 steps; logs come on top" in "\n".join(summary(plan))
    without = of_recipe("qwen3_30b_a3b", {"rollout.route_replay": "off"})
    assert rollout_bytes(without.run, without.shape, 4096) == 500 * 1024 * 4096 * 12


def test_the_documentation_shows_this_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Paste the output of `bapo plan recipes/bp_math_32b_64k.py` into docs/planning.md when it changes."""
    bapo(["plan", str(RECIPE)])
    assert capsys.readouterr().out in (RECIPES.parent / "docs/planning.md").read_text()


@pytest.mark.parametrize(
    ("recipe", "flags", "message"),
    [
        (RECIPE, "--mfu 1.5", "mfu=1.5 must be above 0 and at most 1"),
        (RECIPE, "--parallel.tensor 3", "parallel.tensor=3 does not divide"),
        (RECIPE, "--parallel.tensor 0", "error: parallel.tensor=0 must be at least 1\n"),
        (RECIPE, "--parallel.context 0", "error: parallel.context=0 must be at least 1\n"),
        (RECIPE, "--parallel.expert 0", "error: parallel.expert=0 must be at least 1\n"),
        (RECIPE, "--dropped-groups 1", "dropped_groups=1.0 must be at least 0 and below 1"),
        (
            RECIPE,
            "--dropped-groups 0.3 --rollout.no-drop-uniform-groups",
            "drop_uniform_groups=False drops none",
        ),
        (RECIPE, "--engine-gpus 0", "engine_gpus=0 must be at least 1"),
        (RECIPE, "--compare -1", "compare=-1 must be at least 0"),
        (RECIPE, "--length-spread 0", "length_spread=0.0 must be above 0"),
        (RECIPE, "--engine-imbalance 0.5", "engine_imbalance=0.5 must be at least 1"),
        (DEMO, "--rollout.engine sgalng", "rollout.engine='sgalng' is unknown: give local, sglang"),
        (DEMO, "--algorithm.loss ppo", "algorithm.loss='ppo' is unknown: give aspo, "),
    ],
)
def test_bad_input_is_named(
    recipe: Path, flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bapo(["plan", str(recipe), *flags.split()]) == 2
    assert message in capsys.readouterr().err
