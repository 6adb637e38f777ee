"""One answer at every layout: the same rollouts give the same log-probs, bounds, loss and gradient norm."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bapo_megatron.algo.bapo import Bounds, balanced
from bapo_megatron.algo.bounds import search_bounds
from bapo_megatron.algo.losses.clip import contribution_fn, search_groups
from bapo_megatron.config import (
    AlgorithmConfig,
    BatchConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
)
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.tensor_types import MicroBatch, TokenFn, TokenStats
from bapo_megatron.trainer.update_loss import UpdateLoss
from tests.support.bapo_objective import loss_fn
from tests.support.layouts import Layout, layout
from tests.support.models import FAMILIES, FORMS, save_tiny_model
from tests.support.policies import weights_of
from tests.support.tiers import slow_but
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed

# A target that the random samples reach with both bounds inside their ranges.
BOUNDS = dataclasses.replace(balanced(), target=0.4)
GROUPED = dataclasses.replace(BOUNDS, scope="micro_batch", bounds_tokens=100)


# An eps above every gradient makes Adam's steps proportional to them, so that weights can be compared: with
# a small one the sign of a gradient that is nearly zero decides.
OPTIMIZER = OptimizerConfig(lr=1.0, eps=1.0, warmup_updates=2)
UPDATES = 2
"""The second has another learning rate, and begins with the weights and moments that the first has made."""


LAYOUTS = [
    *("one pack64", "tp2-sp full", "pp4 selective", "pp2-vpp2", "pp2-vpp2 pack4096", "pp3", "cp2 pack200"),
    *("cp4 selective", "cp2 pack4096 shuffled", "dp3", "dp4 shuffled", "tp2-sp-pp2"),
    *("pp2-vpp2-cp2 full shuffled", "pp3-cp2 selective", "dp2-tp2-sp", "dp2-cp2", "dp2-pp2-vpp2"),
    "tp2-sp-pp2-vpp2-cp2 full",
]
"""Ways to spread an update stand together by twos, but for some that only the optimizer joins."""
QUICK = ("one pack64", "tp2-sp full", "pp2-vpp2", "pp3", "cp2 pack200", "dp3", "tp2-sp-pp2", "dp2-cp2")


@dataclass
class Answer:
    """What a layout says about the fixed rollouts."""

    log_probs: dict[int, torch.Tensor]
    entropies: dict[int, torch.Tensor]
    sequences: torch.Tensor
    """Sum of the log-probs of each sequence's response, in the order of the samples."""
    sums: torch.Tensor
    bounds: Bounds
    grouped: list[Bounds]
    """Bounds of each search group, in the order of the samples; empty where they are shuffled."""
    grouped_loss: float
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]
    routes: list[list[float]]
    """``UpdateResult.routes`` of each update, of samples with routes."""
    experts: list[torch.Tensor]
    """``UpdateResult.experts`` of each update, of a mixture of experts."""


def answer(folder: Path, samples: list[Sample], where: Layout, updates: int) -> Answer:
    order = list(range(len(samples)))
    if where.shuffled:
        order.sort(key=lambda index: (index * 7) % len(samples))
    policy = MegatronPolicy(
        ModelConfig(folder, "float32"),
        where.parallel,
        where.batch,
        OPTIMIZER,
        updates,
        0.7,
    )
    # Weights of a mean over sequences, so that a weight that is lost shows.
    packs = pack_samples(
        [samples[index] for index in order], where.pack_tokens, "sequence", policy.pack_layout
    )
    log_probs, entropies = {}, {}
    for pack, stats in zip(packs, policy.log_probs(packs), strict=True):
        for row, start, length in pack.rows:
            log_probs[order[row]] = stats.log_prob_T[start : start + length].clone()
            entropies[order[row]] = stats.entropy_T[start : start + length].clone()
    by_place, for_groups, sums = summed_together(
        policy, packs, sequence_sums, contribution_fn(GROUPED), contribution_fn(BOUNDS)
    )
    sequences = torch.empty_like(by_place)
    sequences[torch.tensor(order)] = by_place
    groups = search_groups(for_groups, GROUPED)
    grouped_loss = float(policy.token_sums(packs, loss_fn(groups, GROUPED, policy.version))[0])
    grouped = [] if where.shuffled else list(groups)
    first = sums, search_bounds(sums, BOUNDS)
    losses, norms, routes, experts = [], [], [], []
    for number in range(updates):
        sums = policy.token_sums(packs, contribution_fn(BOUNDS)) if number else sums
        result = policy.update(packs, loss_fn(search_bounds(sums, BOUNDS), BOUNDS, policy.version))
        losses.append(float(result.sums[0]))
        norms.append(result.grad_norm)
        if result.routes is not None:
            routes.append(result.routes.tolist())
        if result.experts is not None:
            experts.append(result.experts)
    return Answer(
        log_probs,
        entropies,
        sequences,
        *first,
        grouped,
        grouped_loss,
        losses,
        norms,
        weights_of(policy),
        routes,
        experts,
    )


def summed_together(
    policy: MegatronPolicy, packs: list[MicroBatch], *measures: TokenFn
) -> list[torch.Tensor]:
    """The sums of several measures, of one pass."""
    sizes: list[int] = []

    def measure(stats: TokenStats, batch: MicroBatch) -> torch.Tensor:
        parts = [one(stats, batch) for one in measures]
        sizes[:] = map(len, parts)
        return torch.cat([part.double() for part in parts])

    total = policy.token_sums(packs, measure)
    return list(total.split(sizes))


def sequence_sums(stats: TokenStats, batch: MicroBatch) -> torch.Tensor:
    """Log-probs of the tokens at hand, summed for each sequence of the update."""
    zeros = stats.log_prob_T.new_zeros(batch.sequences + 1)
    return zeros.index_add_(0, batch.sequence_T + 1, stats.log_prob_T)[1:]


@pytest.fixture(scope="module", params=slow_but(FORMS, *FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


def answers(text: str, folder: Path, samples: list[Sample]) -> list[Answer]:
    """What every rank of a layout says."""
    where = layout(text)
    return run_layout(answer, where.parallel, folder, samples, where, UPDATES)


@pytest.fixture(scope="module")
def reference(qwen2: Path, samples: list[Sample]) -> Answer:
    """One process. Its search must have moved both bounds and stopped inside, or equal bounds say nothing."""
    [found] = answers("one", qwen2, samples)
    assert found.bounds.reached
    assert 0.6 < found.bounds.low < 0.9
    assert len({(one.low, one.high) for one in found.grouped}) > 1
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
        for index, total in enumerate(ours.sequences):
            response = reference.log_probs[index][-samples[index].response_tokens :].double().sum()
            torch.testing.assert_close(total, response, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(ours.sums, reference.sums, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(ours.sums, ranks[0].sums, rtol=0, atol=0)
        assert (ours.bounds.low, ours.bounds.high) == (reference.bounds.low, reference.bounds.high)
        if ours.grouped:
            assert [(one.low, one.high) for one in ours.grouped] == [
                (one.low, one.high) for one in reference.grouped
            ]
            assert ours.grouped_loss == pytest.approx(reference.grouped_loss, rel=1e-5, abs=1e-5)
        assert ours.losses == pytest.approx(reference.losses, rel=1e-5, abs=1e-5)
        assert ours.grad_norms == pytest.approx(reference.grad_norms, rel=1e-5)
        assert ours.routes == reference.routes
        for found, expected in zip(ours.experts, reference.experts, strict=True):
            torch.testing.assert_close(found[:, :-1], expected[:, :-1], rtol=0, atol=0)  # counts
            torch.testing.assert_close(found[:, -1], expected[:, -1], rtol=1e-5, atol=0)
        assert ours.weights.keys() == reference.weights.keys()
        for name, tensor in ours.weights.items():
            torch.testing.assert_close(tensor, reference.weights[name], rtol=1e-5, atol=2e-6)
    assert seen == set(range(len(samples)))


@pytest.mark.parametrize("text", slow_but(LAYOUTS, *QUICK))
def test_layout_agrees_with_one_process(
    text: str, qwen2: Path, samples: list[Sample], reference: Answer
) -> None:
    check_agreement(answers(text, qwen2, samples), reference, samples)


@pytest.fixture(scope="module")
def alone(model: Path, samples: list[Sample]) -> Answer:
    """One process, of each family."""
    [found] = answers("one", model, samples)
    return found


@pytest.mark.parametrize("text", slow_but(["tp2-pp2", "tp2-sp-cp2"], "tp2-pp2"))
def test_every_family_agrees(text: str, model: Path, samples: list[Sample], alone: Answer) -> None:
    check_agreement(answers(text, model, samples), alone, samples)


UNEVEN = ["pp2-vpp2 layers1+2+1+2 full", "tp2-pp2-vpp2 layers2+1+2+1", "pp4 layers2+1+2+1"]


@pytest.fixture(scope="module", params=slow_but(["qwen3", "llama"], "qwen3"))
def deep(
    request: pytest.FixtureRequest, samples: list[Sample], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Answer]:
    """A model of six layers, and what one process says."""
    folder = save_tiny_model(request.param, tmp_path_factory.mktemp("deep"), num_hidden_layers=6)
    [found] = answers("one", folder, samples)
    return folder, found


@pytest.mark.parametrize("text", slow_but(UNEVEN, "pp2-vpp2 layers1+2+1+2 full"))
def test_chunks_of_unlike_size_agree(text: str, deep: tuple[Path, Answer], samples: list[Sample]) -> None:
    """Six layers in four chunks, which interleave or do not; llama has its embedding on two stages."""
    folder, alone = deep
    check_agreement(answers(text, folder, samples), alone, samples)


@pytest.fixture(scope="module")
def alone_with_one_sample(qwen2: Path, samples: list[Sample]) -> Answer:
    [found] = answers("one", qwen2, samples[1:2])
    return found


@pytest.mark.parametrize("text", slow_but(["dp3", "pp2-vpp2"], "dp3"))
def test_dummy_packs_contribute_nothing(
    text: str, qwen2: Path, samples: list[Sample], alone_with_one_sample: Answer
) -> None:
    """One sample where the layout needs two or three packs: the rest are dummies, and change nothing."""
    few = samples[1:2]
    ranks = answers(text, qwen2, few)
    if text == "dp3":
        assert [len(rank.log_probs) for rank in ranks] == [1, 0, 0]
    check_agreement(ranks, alone_with_one_sample, few)


@pytest.fixture(scope="module")
def gradients(qwen2: Path, samples: list[Sample]) -> dict[str, torch.Tensor]:
    """In float32, by one process."""
    [found] = run_layout(gradients_of, ParallelConfig(), qwen2, samples, ParallelConfig(), "float32", False)
    return found


@pytest.mark.parametrize(
    ("text", "hold"),
    slow_but([("one", True), ("tp2-sp", False), ("pp2", False), ("cp2", False)], ("tp2-sp", False)),
)
def test_gradients_in_bfloat16_are_close_to_float32(
    text: str, hold: bool, qwen2: Path, samples: list[Sample], gradients: dict[str, torch.Tensor]
) -> None:
    """``hold``: the forward passes are held for the backward passes."""
    parallel = layout(text).parallel
    ours = run_layout(gradients_of, parallel, qwen2, samples, parallel, "bfloat16", hold)[0]
    for tensor, expected in gradients.items():
        found = ours[tensor]
        cosine = torch.nn.functional.cosine_similarity(found.flatten(), expected.flatten(), dim=0)
        assert cosine > 0.98, tensor
        assert float(found.norm()) == pytest.approx(float(expected.norm()), rel=0.08), tensor


def gradients_of(
    folder: Path, samples: list[Sample], parallel: ParallelConfig, dtype: str, hold: bool
) -> dict[str, torch.Tensor]:
    """From what one huge step of an Adam that is linear in them changes."""
    lr = 1e4
    settings = OptimizerConfig(lr=lr, eps=1.0, clip_grad=1e9, weight_decay=0.0)
    batch = BatchConfig(pack_tokens=96, hold_forwards=hold)
    policy = MegatronPolicy(ModelConfig(folder, dtype), parallel, batch, settings, 1, 0.7)
    before = {name: tensor.float().clone() for name, tensor in policy.hf_weights()}
    packs = pack_samples(samples, 96, "sequence", policy.pack_layout)
    clipping = UpdateLoss(AlgorithmConfig(bounds=BOUNDS), hold)
    policy.update(packs, clipping.loss(policy, packs, on_policy=False))
    return {name: (before[name] - tensor.float()) / lr for name, tensor in policy.hf_weights()}
