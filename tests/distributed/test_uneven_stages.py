"""Qwen3-235B-A22B's 94 layers on the four unlike pipeline stages of its recipe: each stage holds the layers
that the recipe says, in the trainer, its checkpoints and its weight syncs."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file

from bapo_megatron.config import ParallelConfig, RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.planning.job import find_shape
from bapo_megatron.policy.megatron import MegatronPolicy
from checkpoints_tools import inspect_checkpoint, to_hf, to_megatron
from tests.distributed.test_converted_checkpoints import load_converted, log_probs, make_policy
from tests.support.cluster_recipes import cluster_recipe
from tests.support.models import EXPERTS, random_samples, save_tiny_model
from tests.support.saves import complete
from tests.support.workers import run_layout

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

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
    policy = make_policy(other, parallel)
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
    return log_probs(make_policy(folder, parallel), random_samples(6, seed=3))


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
