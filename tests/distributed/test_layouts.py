"""One answer at every layout: the same rollouts give the same log-probs, bounds, loss and gradient norm."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from bapo_megatron.algo.bapo import Bounds, balanced, grpo
from bapo_megatron.algo.objective import contribution_fn, loss_fn, search
from bapo_megatron.config import BatchConfig, ModelConfig, OptimizerConfig, ParallelConfig
from bapo_megatron.data.packing import Sample, pack_samples
from bapo_megatron.policy.megatron import MegatronPolicy
from tests.models import random_samples, save_tiny_model
from tests.workers import run_layout

pytestmark = pytest.mark.distributed

# A target that the random samples reach with both bounds inside their ranges.
BOUNDS = dataclasses.replace(balanced(), target=0.4)

LAYOUTS = {
    "tp2": ParallelConfig(tensor=2),
    "tp2-sp": ParallelConfig(tensor=2, sequence=True),
    "pp2": ParallelConfig(pipeline=2),
    "pp4": ParallelConfig(pipeline=4),
    "pp2-vpp2": ParallelConfig(pipeline=2, virtual=2),
    "dp2": ParallelConfig(data=2),
    "dp3": ParallelConfig(data=3),
    "tp2-pp2": ParallelConfig(tensor=2, pipeline=2),
    "tp2-sp-pp2-vpp2": ParallelConfig(tensor=2, pipeline=2, virtual=2, sequence=True),
    "dp2-tp2": ParallelConfig(tensor=2, data=2),
    "dp2-pp2": ParallelConfig(pipeline=2, data=2),
}
FAMILIES = ["qwen2", "qwen3", "llama"]


@dataclass
class Answer:
    """What a layout says about the fixed rollouts."""

    log_probs: dict[int, torch.Tensor]
    entropies: dict[int, torch.Tensor]
    sums: torch.Tensor
    bounds: Bounds
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]


def answer(
    folder: Path, samples: list[Sample], parallel: ParallelConfig, batch: BatchConfig, updates: int
) -> Answer:
    policy = MegatronPolicy(
        ModelConfig(folder, "float32"),
        parallel,
        batch,
        OptimizerConfig(lr=1e-3, warmup_updates=2),
        updates,
        0.7,
    )
    # Weights of a mean over sequences, so that a weight that is lost shows.
    packs = pack_samples(samples, batch.pack_tokens, "sequence", policy.pack_layout)
    log_probs, entropies = {}, {}
    for pack, stats in zip(packs, policy.log_probs(packs), strict=True):
        for index, start, length in pack.rows:
            log_probs[index] = stats.log_prob_T[start : start + length].clone()
            entropies[index] = stats.entropy_T[start : start + length].clone()
    losses, norms, first = [], [], None
    for _ in range(updates):
        sums = policy.token_sums(packs, contribution_fn(BOUNDS))
        found = search(sums, BOUNDS)
        first = first or (sums, found.bounds)
        result = policy.update(packs, loss_fn(found, BOUNDS, policy.version))
        losses.append(float(result.sums[0]))
        norms.append(result.grad_norm)
    weights = {name: tensor.clone() for name, tensor in policy.hf_weights()}
    return Answer(log_probs, entropies, *first, losses, norms, weights)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("qwen2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return random_samples(12, seed=3)


def one_process(folder: Path, samples: list[Sample], pack_tokens: int = 96) -> Answer:
    parallel = ParallelConfig()
    return run_layout(answer, parallel, folder, samples, parallel, BatchConfig(pack_tokens=pack_tokens), 3)[0]


@pytest.fixture(scope="module")
def reference(qwen2: Path, samples: list[Sample]) -> Answer:
    """One process. Its search must have moved both bounds and stopped inside, or equal bounds say nothing."""
    found = one_process(qwen2, samples)
    assert found.bounds.reached
    assert 0.6 < found.bounds.low < 0.9
    return found


def check_agreement(ranks: list[Answer], reference: Answer, samples: list[Sample]) -> None:
    seen: set[int] = set()
    for ours in ranks:
        for index, log_prob in ours.log_probs.items():
            torch.testing.assert_close(log_prob, reference.log_probs[index], rtol=1e-5, atol=2e-6)
            torch.testing.assert_close(
                ours.entropies[index], reference.entropies[index], rtol=1e-5, atol=2e-6
            )
        seen |= ours.log_probs.keys()
        torch.testing.assert_close(ours.sums, reference.sums, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(ours.sums, ranks[0].sums, rtol=0, atol=0)
        assert (ours.bounds.low, ours.bounds.high) == (reference.bounds.low, reference.bounds.high)
        assert ours.losses == pytest.approx(reference.losses, rel=1e-4, abs=1e-5)
        assert ours.losses[0] == pytest.approx(reference.losses[0], rel=1e-5)
        assert ours.grad_norms[0] == pytest.approx(reference.grad_norms[0], rel=1e-5)
        assert ours.weights.keys() == reference.weights.keys()
        for name, tensor in ours.weights.items():
            torch.testing.assert_close(tensor, reference.weights[name], rtol=0, atol=4e-3)
    assert seen == set(range(len(samples)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_agrees_with_one_process(
    name: str, qwen2: Path, samples: list[Sample], reference: Answer
) -> None:
    parallel = LAYOUTS[name]
    ranks = run_layout(answer, parallel, qwen2, samples, parallel, BatchConfig(pack_tokens=96), 3)
    check_agreement(ranks, reference, samples)


def test_every_family_agrees_at_tp2_pp2(model: Path, samples: list[Sample]) -> None:
    parallel = LAYOUTS["tp2-pp2"]
    ranks = run_layout(answer, parallel, model, samples, parallel, BatchConfig(pack_tokens=96), 3)
    check_agreement(ranks, one_process(model, samples), samples)


@pytest.mark.parametrize("pack_tokens", [64, 200, 4096])
def test_packing_changes_nothing(
    pack_tokens: int, qwen2: Path, samples: list[Sample], reference: Answer
) -> None:
    check_agreement([one_process(qwen2, samples, pack_tokens)], reference, samples)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_changes_nothing(
    recompute: str, qwen2: Path, samples: list[Sample], reference: Answer
) -> None:
    parallel = ParallelConfig(pipeline=2)
    batch = BatchConfig(pack_tokens=96, recompute=recompute)
    check_agreement(run_layout(answer, parallel, qwen2, samples, parallel, batch, 3), reference, samples)


def test_dummy_packs_contribute_nothing(qwen2: Path, samples: list[Sample]) -> None:
    """Two samples on three ranks: one rank has nothing but a dummy, and changes nothing."""
    parallel = ParallelConfig(data=3)
    few = samples[:2]
    ranks = run_layout(answer, parallel, qwen2, few, parallel, BatchConfig(pack_tokens=96), 3)
    assert [len(rank.log_probs) for rank in ranks] == [1, 1, 0]
    check_agreement(ranks, one_process(qwen2, few), few)


@pytest.mark.parametrize("name", ["pp2-vpp2", "tp2-sp-pp2-vpp2"])
def test_the_interleaved_schedule_gets_as_many_packs_as_it_needs(
    name: str, qwen2: Path, samples: list[Sample], reference: Answer
) -> None:
    """All samples fit into one pack; megatron wants a multiple of the pipeline size."""
    parallel, batch = LAYOUTS[name], BatchConfig(pack_tokens=4096)
    check_agreement(run_layout(answer, parallel, qwen2, samples, parallel, batch, 3), reference, samples)


def save_and_go_on(
    folder: Path, dtype: str, samples: list[Sample], parallel: ParallelConfig, path: Path, load: bool
) -> list:
    """Two updates, save, two more; or load and two more. Losses, gradient norms and weights at the end.

    The warmup ends and the decay begins after the save, so the schedule's place matters.
    """
    optimizer = OptimizerConfig(lr=1e-3, warmup_updates=3, decay="cosine")
    policy = MegatronPolicy(
        ModelConfig(folder, dtype), parallel, BatchConfig(pack_tokens=96), optimizer, 6, 1.0
    )
    packs = pack_samples(samples, 96, "token", policy.pack_layout)
    found = search(torch.zeros(8, dtype=torch.float64), grpo())

    def go(count: int) -> list[tuple[float, float, float]]:
        results = [policy.update(packs, loss_fn(found, grpo(), policy.version)) for _ in range(count)]
        return [(float(r.sums[0]), r.grad_norm, r.learning_rate) for r in results]

    if load:
        policy.load(path, 2)
    else:
        go(2)
        policy.save(path)
    return [go(2), {name: tensor.clone() for name, tensor in policy.hf_weights()}]


@pytest.mark.parametrize(
    ("dtype", "written"),
    [
        ("float32", ParallelConfig(tensor=2, pipeline=2)),
        ("bfloat16", ParallelConfig(pipeline=2, virtual=2)),
        ("bfloat16", ParallelConfig(tensor=2, data=2, sequence=True)),
    ],
)
def test_a_checkpoint_continues_bitwise(
    dtype: str, written: ParallelConfig, qwen2: Path, samples: list[Sample], tmp_path: Path
) -> None:
    path = tmp_path / "policy"
    [steps, weights], *_ = run_layout(save_and_go_on, written, qwen2, dtype, samples, written, path, False)
    [again, same], *_ = run_layout(save_and_go_on, written, qwen2, dtype, samples, written, path, True)
    assert again == steps
    assert all(torch.equal(same[name], tensor) for name, tensor in weights.items())


def test_a_checkpoint_continues_at_other_layouts(qwen2: Path, samples: list[Sample], tmp_path: Path) -> None:
    written = ParallelConfig(tensor=2, pipeline=2)
    path = tmp_path / "policy"
    [steps, _], *_ = run_layout(save_and_go_on, written, qwen2, "float32", samples, written, path, False)
    for other in (
        ParallelConfig(),
        ParallelConfig(tensor=2),
        ParallelConfig(data=2),
        ParallelConfig(pipeline=4),
    ):
        [there, _], *_ = run_layout(save_and_go_on, other, qwen2, "float32", samples, other, path, True)
        np.testing.assert_allclose(there, steps, rtol=2e-4, atol=1e-6)


def test_bfloat16_trains_close_to_float32(qwen2: Path, samples: list[Sample], reference: Answer) -> None:
    parallel = ParallelConfig(tensor=2)
    [ours, _] = run_layout(bf16_loss, parallel, qwen2, samples, parallel)
    assert ours == pytest.approx(reference.losses[0], rel=0.03, abs=0.5)


def bf16_loss(folder: Path, samples: list[Sample], parallel: ParallelConfig) -> float:
    policy = MegatronPolicy(
        ModelConfig(folder, "bfloat16"),
        parallel,
        BatchConfig(pack_tokens=96),
        OptimizerConfig(lr=1e-3),
        1,
        0.7,
    )
    packs = pack_samples(samples, 96, "sequence", policy.pack_layout)
    found = search(policy.token_sums(packs, contribution_fn(BOUNDS)), BOUNDS)
    return float(policy.update(packs, loss_fn(found, BOUNDS, 0)).sums[0])


def save_before_any_update(folder: Path, samples: list[Sample], path: Path) -> tuple[list, list]:
    """What two updates give on a fresh policy, and on one that has loaded its untouched checkpoint."""

    def policy() -> MegatronPolicy:
        model, batch = ModelConfig(folder, "float32"), BatchConfig(pack_tokens=96)
        return MegatronPolicy(model, ParallelConfig(), batch, OptimizerConfig(lr=1e-3), 4)

    def go(policy: MegatronPolicy) -> list[tuple[float, float]]:
        packs = pack_samples(samples, 96)
        found = search(torch.zeros(8, dtype=torch.float64), grpo())
        results = [policy.update(packs, loss_fn(found, grpo(), policy.version)) for _ in range(2)]
        return [(float(r.sums[0]), r.grad_norm) for r in results]

    fresh = policy()
    fresh.save(path)
    loaded = policy()
    loaded.load(path, 0)
    return go(fresh), go(loaded)


def test_a_checkpoint_before_any_update(qwen2: Path, samples: list[Sample], tmp_path: Path) -> None:
    """A hard dataset may give no informative group until the first checkpoint is due."""
    arguments = (qwen2, samples, tmp_path / "policy")
    [(fresh, loaded)] = run_layout(save_before_any_update, ParallelConfig(), *arguments)
    assert fresh == loaded
