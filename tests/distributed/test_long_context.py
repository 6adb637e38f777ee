"""At the size of real runs: a sequence of 65,536 tokens over four ranks, and 94 layers on unlike stages."""

from __future__ import annotations

import dataclasses
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file

from bapo_megatron.algo.bapo import Bounds, balanced
from bapo_megatron.algo.losses.clip import contribution_fn, search
from bapo_megatron.config import BatchConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.planning.job import find_shape
from bapo_megatron.policy.megatron import MegatronPolicy
from checkpoints_tools import inspect_checkpoint, to_hf, to_megatron
from tests.distributed.test_converted_checkpoints import load_converted, log_probs
from tests.support.bapo_objective import loss_fn
from tests.support.cluster_recipes import cluster_recipe
from tests.support.models import EXPERTS, VOCAB, random_samples, save_tiny_model
from tests.support.policies import small_policy
from tests.support.saves import complete
from tests.support.workers import run_layout

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LIMIT = 65536
BOUNDS = dataclasses.replace(balanced(), target=0.45)
# Far above every gradient, so that Adam's first step moves each weight by lr / eps x gradient.
OPTIMIZER = OptimizerConfig(lr=1e9, eps=1e6, weight_decay=0.0, clip_grad=1e9)


class Answer(NamedTuple):
    log_probs: dict[int, torch.Tensor]
    bounds: Bounds
    loss: float
    grad_norm: float
    gradient: dict[str, torch.Tensor]


def answer(folder: Path, samples: list[Sample], parallel: ParallelConfig) -> Answer:
    batch = BatchConfig(pack_tokens=LIMIT)
    policy = MegatronPolicy(ModelConfig(folder, "float32"), parallel, batch, OPTIMIZER, 1)
    before = {name: tensor.clone() for name, tensor in policy.hf_weights()}
    packs = pack_samples(samples, LIMIT, layout=policy.pack_layout)
    stats = policy.log_probs(packs)
    log_probs = {
        row: values.log_prob_T[start : start + length].clone()
        for pack, values in zip(packs, stats, strict=True)
        for row, start, length in pack.rows
    }
    measure = contribution_fn(BOUNDS)
    found = search(sum(measure(*pair) for pair in zip(stats, packs, strict=True)), BOUNDS)
    result = policy.update(packs, loss_fn(found, BOUNDS, 0))
    gradient = {name: before[name] - tensor for name, tensor in policy.hf_weights()}
    return Answer(log_probs, found.bounds, float(result.sums[0]), result.grad_norm, gradient)


def sample(generator: np.random.Generator, tokens: int, advantage: float) -> Sample:
    """A prompt of one token and a response; ``tokens`` predicting positions in all."""
    return Sample(
        token_ids=generator.integers(0, VOCAB, tokens + 1).astype(np.int32),
        log_probs_R=(-4.85 + 0.5 * generator.normal(size=tokens)).astype(np.float32),
        versions_R=np.zeros(tokens, dtype=np.int32),
        advantage=advantage,
    )


def test_a_sequence_at_the_limit(tmp_path: Path) -> None:
    """Beside it, in a pack of their own: short documents down to a single token."""
    small = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    folder = save_tiny_model("qwen2", tmp_path, **small, max_position_embeddings=LIMIT)
    generator = np.random.default_rng(0)
    lengths = [LIMIT, 1, 2, 777, 8, 3001]
    advantages = [-0.5, 1.0, -1.0, 3.0, 1.0, 4.0]
    samples = [sample(generator, *pair) for pair in zip(lengths, advantages, strict=True)]
    one, four = ParallelConfig(), ParallelConfig(context=4)
    [alone] = run_layout(answer, one, folder, samples, one)
    assert alone.bounds.high > 1.2  # the search has moved
    for ours in run_layout(answer, four, folder, samples, four):
        for row, expected in alone.log_probs.items():
            torch.testing.assert_close(ours.log_probs[row], expected, rtol=1e-5, atol=2e-6)
        assert (ours.bounds.low, ours.bounds.high) == (alone.bounds.low, alone.bounds.high)
        assert ours.loss == pytest.approx(alone.loss, rel=1e-5)
        assert ours.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)
        for name, gradient in alone.gradient.items():
            scale = float(gradient.abs().max())
            torch.testing.assert_close(ours.gradient[name], gradient, rtol=1e-3, atol=2e-5 * scale)


SMALL = {"hidden_size": 16, "head_dim": 4, "num_experts": 4, "moe_intermediate_size": 4}


class Stage(NamedTuple):
    """What a rank holds and answers, with the weights of the converted checkpoint."""

    number: int
    layers: list[int]
    """The layers of the folder whose routers its layers have, in its order."""
    differing: list[str]
    """Tensors that differ from the folder's, of those that a weight sync sends."""
    log_probs: list[torch.Tensor]


def layers_of(policy: MegatronPolicy, tensors: dict[str, torch.Tensor], layers: int) -> list[int]:
    """By the values of the routers, which no two layers share: no name and no offset is trusted."""
    routers = [tensors[f"model.layers.{layer}.mlp.gate.weight"] for layer in range(layers)]
    own = [parameter for (name, _), parameter in policy._weights.local.items() if ".router." in name]
    return [next(n for n, router in enumerate(routers) if torch.equal(router, one)) for one in own]


def load_and_save(
    folder: Path, other: Path, parallel: ParallelConfig, checkpoint: Path, path: Path, layers: int
) -> Stage:
    """Load the checkpoint into a policy made of the ``other`` weights, and save it."""
    policy = small_policy(other, parallel)
    load_converted(policy, checkpoint)
    tensors = load_file(folder / "model.safetensors")
    sent = {name: torch.equal(tensor, tensors[name]) for name, tensor in policy.hf_weights()}
    assert sent.keys() == tensors.keys()
    complete(policy.save(path))
    return Stage(
        parallel_state.get_pipeline_model_parallel_rank(),
        layers_of(policy, tensors, layers),
        [name for name, is_same in sent.items() if not is_same],
        log_probs(policy, random_samples(6, seed=3)),
    )


def log_probs_of(folder: Path, parallel: ParallelConfig) -> list[torch.Tensor]:
    """Of a policy made of the folder itself."""
    return log_probs(small_policy(folder, parallel), random_samples(6, seed=3))


def test_stages_of_the_recipe_hold_their_layers(tmp_path: Path) -> None:
    """Its pipeline alone: TP, CP, DP and EP would need 128 processes."""
    path = cluster_recipe("qwen3_235b_a22b")
    run = load_recipe(path, RunConfig)
    layers, split = find_shape(path, run.model.hf_path).layers, run.parallel.pipeline_layers
    folder = save_tiny_model(EXPERTS, tmp_path / "hf", num_hidden_layers=layers, **SMALL)
    other = save_tiny_model(EXPERTS, tmp_path / "other", seed=2, num_hidden_layers=layers, **SMALL)
    to_megatron(folder, tmp_path / "megatron")

    parallel = ParallelConfig(pipeline=run.parallel.pipeline, pipeline_layers=split)
    saved = tmp_path / "policy"
    arguments = (folder, other, parallel, tmp_path / "megatron/release", saved, layers)
    stages: list[Stage] = run_layout(load_and_save, parallel, *arguments)
    [expected] = run_layout(log_probs_of, ParallelConfig(), folder, ParallelConfig())

    assert [one.number for one in stages] == [0, 1, 2, 3]
    for one, size, end in zip(stages, split, accumulate(split), strict=True):
        assert one.layers == list(range(end - size, end)), f"layers of stage {one.number}"
        assert one.differing == [], f"sent from stage {one.number}"
        assert all(torch.equal(a, b) for a, b in zip(one.log_probs, expected, strict=True))
    assert expected
    assert inspect_checkpoint(saved).written_at["pipeline_layers"] == list(split) == [22, 24, 24, 24]

    tensors = load_file(folder / "model.safetensors")
    for checkpoint in (tmp_path / "megatron", saved):  # by the converter, and by the trainer at this layout
        back = tmp_path / f"back-{checkpoint.name}"
        to_hf(checkpoint, back, reference=folder)
        found = load_file(back / "model.safetensors")
        assert found.keys() == tensors.keys()
        assert [name for name in tensors if not torch.equal(found[name], tensors[name])] == []
