"""``bapo plan`` of a hybrid: every quantity by hand on a small shape, and published sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bapo_megatron.config import ParallelConfig, RolloutConfig, SglangConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import ModelShape, attention_flops, linear_flops_per_token
from bapo_megatron.layers import Block
from bapo_megatron.layers.attention import Attention, GatedAttention
from bapo_megatron.layers.costs import Place
from bapo_megatron.layers.delta_net import DeltaNet
from bapo_megatron.layers.mlp import Mlp
from bapo_megatron.planning.engines import engine_plan
from bapo_megatron.planning.job import Job
from bapo_megatron.planning.memory import block_bytes, stage_memory
from bapo_megatron.planning.page import plan_dict, plan_text
from bapo_megatron.planning.plan import make_plan
from bapo_megatron.planning.sizes import stage_parameters, total_parameters
from bapo_megatron.planning.speed import speed
from bapo_megatron.planning.traffic import update_traffic
from bapo_megatron.policy.layout import stage_kinds
from tests.support.planned_jobs import SMALL, job

DELTA = DeltaNet(key_heads=2, value_heads=4, key_dim=2, value_dim=4, kernel=4)
GATED = GatedAttention(heads=4, kv_heads=2, head_dim=2, qk_norm=True, rotated=2)
MLP = Mlp(16)
HYBRID: ModelShape = replace(
    SMALL, blocks=(Block(DELTA, MLP), Block(GATED, MLP)), pattern=(0, 0, 0, 1) * 2, family="qwen3_5_text"
)
ONE = ParallelConfig()
HALVED = ParallelConfig(tensor=2, sequence=True)


def test_flops_by_hand() -> None:
    """Of a token and layer: projections 8 x (4 + 4 + 16 + 16 + 4 + 4) and 16 x 8, the convolution of 24
    channels by 4, and of each of 4 heads 64 (4 k + 3 v) + 6 k v for k 2, v 4."""
    delta = 2 * (8 * 48 + 16 * 8 + 24 * 4) + 4 * (64 * 20 + 48)
    attention = 2 * (8 * (8 + 8 + 4 + 4) + 8 * 8)
    mlp = 2 * 3 * 8 * 16
    assert DELTA.flops(8).linear == delta
    assert linear_flops_per_token(HYBRID) == 6 * delta + 2 * attention + 8 * mlp + 2 * 8 * SMALL.vocab
    assert attention_flops(HYBRID, 10) == 2 * 4 * 2 * 2 * 2 * 50  # of the two layers with attention


def test_activations_by_hand() -> None:
    """Transformer Engine in bfloat16: norm and input 20 + 16; the convolution's input 2 (24 + 8); the rule's
    queries, keys, values and inverses 2 (24 + 4 x 64), lengths 2 x 2 and four numbers of a head in float32;
    the gated norm 4 x 16 and 4 numbers in float32, and 16 in bfloat16."""
    delta = 36 + 64 + 560 + 4 * (4 + 16) + 4 * (64 + 4) + 32
    mlp = 36 + 2 * 3 * 16
    place = Place(8, ONE, 2, "te", "none")
    assert block_bytes(HYBRID.blocks[0], place)[0] == delta + mlp
    # Sigmoid in float32 and what it multiplies, more than attention without a gate.
    plain = block_bytes(Block(Attention(4, 2, 2, qk_norm=True), MLP), place)[0]
    assert block_bytes(HYBRID.blocks[1], place)[0] == plain + (4 + 2) * 8
    halved = block_bytes(HYBRID.blocks[0], replace(place, parallel=HALVED))[0]
    assert halved == (4 + 8 + 8) * 2 + (delta - 36) / 2 + 2 * 3 * 8
    selective = block_bytes(HYBRID.blocks[0], replace(place, recompute="selective"))
    assert selective == (delta + 16, 20 + 96)


def test_a_stage_without_attention_has_its_own_layers() -> None:
    """Three layers of Gated DeltaNet on the first stage; attention, three and attention on the second."""
    two = ParallelConfig(pipeline=2, pipeline_layers=(3, 5))
    first, second = stage_kinds(two, HYBRID)
    assert (first[DELTA], first[GATED], second[DELTA], second[GATED]) == (3, 0, 3, 2)
    # A layer: norm 8 of the mixer and MLP each, MLP 3 x 8 x 16; 8 x 48 + 16 x 8 + 24 x 4 + 3 x 4 of Gated
    # DeltaNet, 8 x 24 + 8 x 8 + 2 x 2 of attention.
    delta, gated = 400 + 620, 400 + 260
    assert stage_parameters(HYBRID, two, 0).body == 3 * delta
    assert stage_parameters(HYBRID, two, 1).body == 3 * delta + 2 * gated + 8
    place = Place(8, two, 2, "te", "none")
    kept = [block_bytes(block, place)[0] for block in HYBRID.blocks]
    memory = stage_memory(job(two, HYBRID), 0)
    assert memory.activations == 16 * (2 * 3 * kept[0] + 2 * 16)  # two packs in flight, and their outputs
    last = stage_memory(job(two, HYBRID), 1)
    assert last.activations == 16 * (3 * kept[0] + 2 * kept[1] + 20)
    # The slowest stage sets the pace: more layers there take longer.
    assert (
        speed(job(two, HYBRID)).update_seconds > speed(job(ParallelConfig(pipeline=2), HYBRID)).update_seconds
    )


def test_the_workspace_of_the_rule_comes_after_that_of_the_mlp() -> None:
    """Which has released what it saved by then. 3 k + 5 v of each value head, two states of 2 x 4 / 64, two
    of the keys, and the gradient of z."""
    rule = 2 * (4 * (3 * 2 + 5 * 4) + 2 * (4 * 8 / 64 + 4) + 16)
    saved, mlp = 36 + 96, 3 * 32 + 2 * 2 * 8
    assert DELTA.saved(Place(8, ONE, 2, "te", "none")).workspace == rule
    assert stage_memory(job(ONE, HYBRID), 0).workspace == 16 * max(mlp, rule - saved) == 16 * mlp
    narrow = replace(HYBRID, blocks=tuple(Block(block.mixer, Mlp(2)) for block in HYBRID.blocks))
    saved, mlp = 36 + 12, 12 + 32
    assert stage_memory(job(ONE, narrow), 0).workspace == 16 * (rule - saved) > 16 * mlp


def test_traffic_of_context_parallelism_by_hand() -> None:
    """An all-to-all of queries, keys, values, beta and alpha, 4 + 4 + 16 + 4 + 4 wide, and one of 16 back,
    with their gradients and once more in the search; keys and values of attention go round the ring."""
    one = job(ParallelConfig(context=2), HYBRID)
    [sent] = [part.sent for part in update_traffic(one) if part.name == "CP"]
    tokens = 16 / 2 * one.filled_packs
    delta = 2 * (32 + 16) / 2 * (2 + 1)
    ring = 2 * 2 * 2 * 2 * (3 + 1)
    assert sent == tokens * (6 * delta + 2 * ring)


STATE = 6 * (4 * 4 * 2 * 4 + 2 * 3 * 24)
"""Of a sequence: in six layers the state in float32, and three inputs of the convolution in bfloat16."""


def served(memory: float = 0.0, **sglang: object) -> Job:
    """The job with servers of one GPU, which have ``memory`` bytes beside the weights."""
    one = job(ONE, HYBRID)
    weights = 2 * total_parameters(HYBRID)
    rollout = RolloutConfig(
        **{**vars(one.run.rollout), "engine": "sglang", "sglang": SglangConfig(max_in_flight=64, **sglang)}
    )
    fraction = (weights + memory) / one.gpu.memory
    options = replace(one.options, engine_memory_fraction=fraction, engine_gpus=1)
    return replace(one, run=replace(one.run, rollout=rollout), options=options)


@pytest.mark.parametrize(
    ("sglang", "slots", "requests"),
    [
        ({}, 17, 3),  # 19 times the memory of 2 x a state: 0.9 of 1.9 are 18, less SGLang's own
        ({"on_update": "in_place"}, 17, 17),  # no states of prefixes are kept
        # argparse takes the last
        ({"flags": ("--max-mamba-cache-size=4", "--max-mamba-cache-size", "20")}, 20, 4),
        ({"flags": ("--max-mamba-cache-size=4", "--disable-radix-cache")}, 4, 4),
    ],
)
def test_states_limit_the_requests_of_an_engine(sglang: dict[str, Any], slots: int, requests: int) -> None:
    one = served(38 * STATE + 1, **sglang)
    found = engine_plan(one)
    assert found.states is not None
    assert (found.states.per_sequence, found.states.slots, found.states.requests) == (STATE, slots, requests)
    assert found.states.reserved == (slots + 1) * STATE
    assert found.cache == pytest.approx(38 * STATE + 1 - found.states.reserved, abs=0.01)
    assert found.cache_per_token == 2 * 2 * 2 * 2 * 2  # keys and values of the two layers with attention
    assert found.running == min(requests, 8)
    # A step reads the weights, and of each request keys, values and its states, which it also writes.
    step = 2 * total_parameters(HYBRID) + found.running * (9 * 32 + 2 * STATE)
    assert found.tokens_per_second == pytest.approx(found.running * 0.6 * 3350e9 / step)
    warning = f"for which it needs --max-mamba-cache-size={8 * found.states.per_request}"
    assert (warning in plan_text(make_plan(one), [], [])) == (requests < 8)


def test_an_engine_without_room_for_the_states_of_a_request_does_not_fit() -> None:
    one = served(38 * STATE + 1, flags=("--max-mamba-cache-size=4",))
    assert "4 slots for states are fewer than the 5 of one request" in make_plan(one).verdict.others[0]
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.flags: --max-mamba-cache-size ''"):
        make_plan(served(flags=("--max-mamba-cache-size",)))


def test_the_embedded_engine_has_a_state_for_each_request() -> None:
    found = plan_dict(make_plan(job(ONE, HYBRID)))["engines"]["states"]
    assert (found["slots"], found["requests"], found["per_sequence"]) == (256, 256, STATE)
    assert plan_dict(make_plan(job()))["engines"]["states"] is None
