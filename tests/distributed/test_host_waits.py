"""What a policy takes: host waits at known places of an update, and memory as `bapo plan` says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from bapo_megatron.algo.bapo import eq8_literal
from bapo_megatron.algo.losses import build_loss
from bapo_megatron.algo.objective import Objective
from bapo_megatron.config import AlgorithmConfig, BatchConfig, ModelConfig, OptimizerConfig, ParallelConfig
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.policy.megatron import MegatronPolicy
from tests.support.host_waits import HostWaits
from tests.support.measured import KINDS, Case, compare, save_model
from tests.support.models import HYBRID, random_samples, save_tiny_model
from tests.support.tiers import slow_but
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed

ONE = ParallelConfig()
FORWARD = {"policy/passes.py _sum_over_ranks": 1}
"""The vector of a pass, which the search for the bounds reads on the host."""
UPDATE = {
    **FORWARD,
    "distributed/finalize_model_grads.py finalize_model_grads": 1,  # megatron-core: is there any token?
    "optimizer/clip_grads.py get_grad_norm_fp32": 1,  # the norm of the gradient, which may stop the run
    "algo/tokens.py constant_on": 1,  # the update's bounds go to the device, once
}
OF_THE_HOST = {
    "policy/attention.py padding_plan",  # made once for a pack, on a CPU alone
    "policy/passes.py _part",  # the mask of a pack, before it goes to the device
    "policy/megatron.py update",
    "optimizer/optimizer.py step_with_ready_grads",  # torch's Adam keeps its step counters on the host
}
"""Reads of tensors that never leave the host."""


def waits(folder: Path, chunk_tokens: int, pack_tokens: int) -> list[Counter[str]]:
    """Of a forward pass and of an update; the second of each."""
    batch = BatchConfig(pack_tokens=pack_tokens, logprob_chunk_tokens=chunk_tokens)
    policy = MegatronPolicy(ModelConfig(folder, "float32"), ONE, batch, OptimizerConfig(), 10, 0.7)
    packs = pack_samples(random_samples(6), pack_tokens, layout=policy.pack_layout)
    loss = build_loss(AlgorithmConfig(bounds=eq8_literal()))
    objective, search = Objective(loss), loss.search
    assert search is not None
    found = []
    for _ in range(2):
        with HostWaits() as forward:
            measured = policy.token_sums(packs, search.measure)
        bounds = search.find(measured)
        with HostWaits() as update:
            policy.update(packs, objective.token_fn(bounds, policy.version))
        found = [forward.places, update.places]
    return found


def of_the_device(places: Counter[str]) -> dict[str, int]:
    return {place: count for place, count in places.items() if place not in OF_THE_HOST}


@pytest.mark.parametrize(
    ("family", "chunk", "pack"),
    [*(("qwen2", *sizes) for sizes in ((4096, 4096), (16, 4096), (16, 80))), (HYBRID, 16, 80)],
)
def test_no_chunk_no_layer_and_no_pack_adds_a_wait(
    family: str, chunk: int, pack: int, tmp_path: Path
) -> None:
    """The same few waits with one chunk and with a dozen, with one pack and with several, of each kind."""
    folder = save_tiny_model(family, tmp_path)
    [[forward, update]] = run_layout(waits, ONE, folder, chunk, pack)
    assert of_the_device(forward) == FORWARD
    assert of_the_device(update) == UPDATE


SP = ParallelConfig(tensor=2, sequence=True)
PP = ParallelConfig(pipeline=2)
INTERLEAVED = ParallelConfig(pipeline=2, virtual=2)
ALL = ParallelConfig(tensor=2, pipeline=2, data=2, sequence=True)
ETP = ParallelConfig(tensor=2, data=2, sequence=True, expert_tensor=2)

CASES = [
    Case("qwen3", "bfloat16", "none", SP),
    Case("qwen2", "bfloat16", "none", INTERLEAVED),
    Case("qwen2", "bfloat16", "selective", ONE),
    Case("llama", "float32", "full", SP),
    Case("llama", "bfloat16", "selective", PP),
    Case("qwen2", "bfloat16", "none", ALL),
    Case("qwen3_moe", "bfloat16", "selective", ONE),
    Case("qwen3_moe", "float32", "full", PP),
    Case("qwen3_moe", "bfloat16", "none", ETP),
]


def name_of(case: Case) -> str:
    p = case.parallel
    layout = f"tp{p.tensor}{'sp' * p.sequence}-pp{p.pipeline}x{p.virtual}-dp{p.data or 1}"
    return f"{case.family}-{case.dtype}-{case.recompute}-{layout}"


@pytest.mark.parametrize("case", slow_but(CASES, *CASES[:2]), ids=name_of)
def test_predicted_memory_is_what_is_allocated(case: Case, tmp_path: Path) -> None:
    folder = save_model(case.family, tmp_path)
    for rank, (predicted, measured) in enumerate(compare(case, folder)):
        for kind in KINDS:
            assert predicted[kind] == pytest.approx(measured[kind], rel=0.1), f"rank {rank}: {kind}"
