"""``bapo plan`` of a mixture of experts: every quantity by hand on a small shape, and published sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.config import ParallelConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import attention_flops, linear_flops_per_token
from bapo_megatron.layers.mlp import Experts
from bapo_megatron.planning import sizes as experts
from bapo_megatron.planning.engines import engine_plan
from bapo_megatron.planning.job import Job
from bapo_megatron.planning.memory import host_bytes, server_weights, stage_memory
from bapo_megatron.planning.page import plan_text
from bapo_megatron.planning.plan import make_plan
from bapo_megatron.planning.sizes import (
    active_parameters,
    largest_parameter,
    measured_imbalance,
    read_parameters,
    stage_parameters,
    total_parameters,
)
from bapo_megatron.planning.speed import speed
from bapo_megatron.planning.traffic import sync_traffic, update_traffic
from bapo_rehearsal.records import RankResult
from bapo_rehearsal.results import model_flops
from tests.support.altered import altered
from tests.support.planned_jobs import SMALL, job
from tests.support.shapes import activation_bytes_per_token, resized

# A layer: 8 x (8 + 4 + 4) qkv + 8 x 8 projection + 2 x 8 norms + 4 x 8 router = 240, and 4 experts of
# 3 x 8 x 6 = 144. The model: 4 x (240 + 576) + 2 x 256 embedding and output + 8 = 3784.
MOE = resized(SMALL, family="qwen3_moe", qkv_bias=False, experts=Experts(4, 2, 6, True))
EP = ParallelConfig(data=2, expert=2)
ETP = ParallelConfig(tensor=2, sequence=True, expert_tensor=2)
BOTH = ParallelConfig(tensor=2, data=2, sequence=True, expert=2, expert_tensor=2)


def moe(parallel: ParallelConfig, imbalance: float = 1.5, **batch: object) -> Job:
    """The job of test_plan.py, eight packs of 16 tokens, with experts."""
    return altered(job(parallel, MOE, **batch), {"options.expert_imbalance": imbalance})


def test_parameters_by_hand() -> None:
    assert total_parameters(MOE) == 3784
    assert active_parameters(MOE) == 3784 - 4 * 2 * 144
    assert active_parameters(SMALL) == total_parameters(SMALL)
    half = stage_parameters(MOE, EP, 0)
    assert (half.dense, half.experts, half.total) == (4 * 240 + 520, 4 * 2 * 144, 2632)
    # TP halves 192 of a layer's 240 and the embedding; EP x ETP quarter the experts, whatever TP is.
    quarter = stage_parameters(MOE, BOTH, 0)
    assert (quarter.dense, quarter.experts) == (4 * (96 + 48) + 256 + 8, 4 * 144)
    uneven = ParallelConfig(pipeline=2, pipeline_layers=(1, 3))
    assert [stage_parameters(MOE, uneven, stage).experts for stage in (0, 1)] == [576, 3 * 576]
    assert largest_parameter(MOE) == 256  # the embedding: an expert has gate and up of 2 x 6 x 8


def test_states_of_experts_are_shared_by_the_ranks_that_have_them() -> None:
    """12 B of each parameter: dense ones over DP x CP, experts over TP x CP x DP / (EP x ETP)."""
    memory = stage_memory(moe(EP), 0)
    assert (memory.weights, memory.gradients) == (2 * 2632, 4 * 2632)
    assert memory.optimizer == 12 * (1480 / 2 + 1152 / 1)
    four = moe(replace(EP, data=4))
    assert stage_memory(four, 0).optimizer == 12 * (1480 / 4 + 1152 / 2)
    assert stage_memory(moe(BOTH), 0).optimizer == 12 * (840 / 2 + 576 / 1)
    # TP without ETP: each TP rank has all of EP's experts, for its own part of the tokens.
    whole = ParallelConfig(tensor=2, sequence=True)
    assert stage_memory(moe(whole), 0).optimizer == 12 * (840 + 2304 / 2)
    # While it saves: (12 + 2) B of a rank's share, and three states of the largest parameter, on two ranks.
    assert host_bytes(moe(EP)) == 2 * (14 * (740 + 1152) + 3 * 4 * 256)


def test_activations_by_hand() -> None:
    """Transformer Engine: attention and core as of a dense layer (52 + 48 bytes), then the experts."""
    # Norm and its output; numbers and weights of two experts; a map of 2 x 4 + 1; two copies, each with its
    # hidden state, gate, up and product, weight and place.
    norm, chosen, rows = (16 + 4) + 16, 2 * (8 + 4) + 4 * 9, 2 * (2 * (8 + 3 * 6) + 4 + 4)
    one = activation_bytes_per_token(MOE, ParallelConfig(), 2, "none", "te")
    assert one.layer == 52 + 48 + norm + chosen + rows
    # One expert of each rank: nothing is sorted. The busiest rank gets one and a half times as many.
    spread = ParallelConfig(data=4, expert=4)
    found = activation_bytes_per_token(MOE, spread, 2, "none", "te", 1.5)
    assert found.layer == 52 + 48 + norm + chosen + 3 * (2 * (8 + 3 * 6) + 4)
    selective = activation_bytes_per_token(MOE, ParallelConfig(), 2, "selective", "te")
    assert (selective.layer, selective.transient) == (52 + 48 + norm, chosen + rows)
    full = activation_bytes_per_token(MOE, ParallelConfig(), 2, "full", "te")
    assert (full.layer, full.transient) == (16, one.layer - 16)
    # ETP 2 with TP 2 + SP: half of the tokens are routed, as many copies come, each of half the width.
    cut = activation_bytes_per_token(MOE, ETP, 2, "none", "te")
    rest = activation_bytes_per_token(SMALL, ETP, 2, "none", "te").layer - (8 + 4 + 8 + 3 * 2 * 8)
    assert cut.layer == rest + 8 + 4 + 8 + chosen / 2 + 2 * (2 * (8 + 3 * 3) + 4 + 4)


def test_work_and_routes_by_hand() -> None:
    """Gradients of 3 copies of a token (26 wide), and its hidden states."""
    memory = stage_memory(moe(EP), 0)
    assert memory.workspace == 2 * (16 * 3 * 26 + 2 * 16 * 8)
    replays = altered(moe(EP), {"run.rollout.route_replay": "replay"})
    # A byte for each of two experts in four layers, of 16 tokens.
    assert stage_memory(replays, 0).buffers - memory.buffers == 16 * 4 * 2


def test_traffic_by_hand() -> None:
    """16 tokens, 8 wide, 2 B. A copy goes to its expert and back, forward, backward and in the search."""
    kinds = {t.name: t for t in update_traffic(moe(EP))}
    assert kinds["EP"].sent == 4 * (4 + 2) * (4 * 16) * 2 * 1.5 * 8 * 2 / 2
    assert kinds["EP"].link == "NVLink"
    assert kinds["DP"].sent == 6 * 1480 / 2  # no other rank has the same experts
    again = {t.name: t for t in update_traffic(moe(EP, recompute="selective"))}
    assert again["EP"].sent == kinds["EP"].sent * (4 + 2 + 2) / (4 + 2)
    kinds = {t.name: t for t in update_traffic(moe(ParallelConfig(tensor=2, sequence=True)))}
    assert kinds["TP"].sent == 256 / 2 * 8 * (4 * (2 + 3 + 2) + 2)
    assert set(kinds) == {"TP", "DP"}  # experts of the two TP ranks are copies
    assert kinds["DP"].sent == 6 * 2304 / 2
    kinds = {t.name: t for t in update_traffic(moe(ETP))}
    assert kinds["ETP"].sent == 4 * (4 + 2) * (8 * 16) * 2 * 8 * (2 + 4) / 2 / 2
    assert "EP" not in kinds
    [across] = [t for t in update_traffic(moe(ParallelConfig(data=16, expert=16))) if t.name == "EP"]
    assert across.link == "network"  # for 8 of the 15 other ranks: 7 are on the same node
    assert across.seconds == pytest.approx(across.sent * 8 / 15 / 50e9)
    split = ParallelConfig(tensor=2, sequence=True, data=16, expert=16, expert_tensor=2)
    [across] = [t for t in update_traffic(moe(split)) if t.name == "EP"]
    assert across.seconds == pytest.approx(across.sent * 12 / 15 / 50e9)  # four ranks of EP on a node
    [across] = [t for t in update_traffic(moe(ParallelConfig(data=12, expert=6))) if t.name == "EP"]
    assert across.seconds == pytest.approx(across.sent * 4 / 5 / 50e9)  # the first two of the second six
    assert sync_traffic(moe(EP)).sent == 2 * 3784


def test_flops_and_time_by_hand() -> None:
    """Of a layer 192 attention and 2 x 144 + 32 of experts and router; the busiest rank takes longer. All
    copies may go to one of two ranks, not more; one rank has them all anyway."""
    assert [moe(ParallelConfig(expert=size), 3.0).expert_imbalance for size in (1, 2, 4)] == [1, 2, 3]
    assert linear_flops_per_token(MOE) == 2 * (4 * (192 + 320) + 256)
    attention = attention_flops(MOE, 16) / 16
    for mode, again, scores in (("none", 0, 0), ("selective", 4 * 2 * 320, 0), ("full", 4 * 2 * 512, 1)):
        found = speed(moe(EP, recompute=mode))
        matrices = 4 * 2 * 4 * 512 + again + 4 * 512
        assert found.executed_per_token == pytest.approx(matrices + (4.5 + scores) * attention)
        experts = 2 * 4 * 320 * (4 + (mode != "none"))
        seconds = 64 * ((matrices + 0.5 * experts) / 0.3 + (4.5 + scores) * attention / 0.5) / 989e12
        assert found.update_seconds == pytest.approx(seconds)
        assert found.idle == pytest.approx(64 * 0.5 * experts / 0.3 / 989e12 / seconds)
    result = RankResult(0, {"stage": 0}, "te", packs=3)
    assert model_flops(result, moe(EP)) == 6 * active_parameters(MOE) * 3 * 16


def test_an_engine_reads_the_experts_that_its_sequences_take() -> None:
    """Two of four experts a token: of two tokens the second misses a quarter of them."""
    assert read_parameters(MOE, 2) == 3784 - 2304 / 4
    found = engine_plan(moe(EP))  # on an H100, 60 % of 3.35 TB/s, an engine of four GPUs
    assert found.weights == 2 * 3784 / 4
    assert server_weights(moe(EP)) == 2 * 3784 / 4
    bandwidth = 0.6 * 3350e9
    token = found.cache_per_token / 2 / bandwidth  # two KV heads on four GPUs: each head is held twice
    assert found.longest_seconds == pytest.approx(
        14 * (2 * active_parameters(MOE) / 4 / bandwidth + 7 * token)
    )


@pytest.mark.parametrize("band", [1 << 16, 3])
def test_the_imbalance_of_routes_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, band: int) -> None:
    """Four tokens to two of four experts. Of two ranks the busiest gets 6 of 8 copies in the first layer, 4
    in the second, 8 in the third and fourth; a token without a route does not count.

    ``band``: tokens that are read at a time.
    """
    monkeypatch.setattr(experts, "_BAND", band)
    first = [[0, 1], [0, 1], [0, 2], [1, 3]]
    second = [[0, 2], [1, 3], [0, 3], [1, 2]]
    third = [[0, 1]] * 4
    routes = np.array([first, second, third, third], np.uint8).transpose(1, 0, 2)
    unknown = np.full((1, 4, 2), 255, np.uint8)
    np.save(tmp_path / "routes.npy", np.concatenate([routes, unknown]))
    assert measured_imbalance(tmp_path / "routes.npy", MOE, 2) == (6 + 4 + 8 + 8) / 4 / 4
    # Each on a rank of its own: 3, 2, 4 and 4 copies, of which the mean is 2.
    assert measured_imbalance(tmp_path / "routes.npy", MOE, 4) == (3 + 2 + 4 + 4) / 4 / 2
    measured = altered(moe(EP), {"options.expert_routes": tmp_path / "routes.npy"})
    assert measured.expert_imbalance == 26 / 16
    assert stage_memory(measured, 0).activations == stage_memory(moe(EP, 26 / 16), 0).activations
    assert speed(measured) == speed(moe(EP, 26 / 16))
    page = plan_text(make_plan(measured), [], [])
    assert "TP 1, PP 1, CP 1, DP 2, EP 2; packs" in page
    assert "1.62 times the mean of the copies (measured from routes)" in page


def test_routes_of_another_model_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "routes.npy", np.zeros((3, 2, 2), np.uint8))
    with pytest.raises(ConfigError, match=r"routes\.npy: .*the model has 4 layers and 2 of 4"):
        measured_imbalance(tmp_path / "routes.npy", MOE, 2)
