"""megatron-core loads what bapo-ckpt writes, at any layout and with its default strictness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from safetensors.torch import load_file

from bapo_megatron.config import ParallelConfig
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.hf.config import read_model_shape
from bapo_megatron.hf.parameter_map import mapping_table
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.policy.weight_map import shard
from checkpoints_tools import to_megatron
from tests.support.checkpoint_models import join
from tests.support.layouts import layout
from tests.support.models import random_samples, save_tiny_model
from tests.support.policies import small_policy, updates_of, weights_of
from tests.support.saves import complete
from tests.support.tiers import slow_but
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed


def load_converted(policy: MegatronPolicy, checkpoint: Path) -> None:
    """The weights alone, as a program of megatron-core loads them: no argument about strictness."""
    metadata = {
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    chunks: list[Any] = []
    for chunk in policy._model:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        chunks.append(chunk)
    state = {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}
    loaded = dist_checkpointing.load(state, str(checkpoint))
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{i}"], strict=True)


def log_probs(policy: MegatronPolicy, samples: list[Sample]) -> list[torch.Tensor]:
    packs = pack_samples(samples, 96, "token", policy.pack_layout)
    return [stats.log_prob_T for stats in policy.log_probs(packs)]


def load_and_look(
    other: Path, folder: Path, checkpoint: Path, parallel: ParallelConfig, samples: list[Sample]
) -> tuple[int, list[torch.Tensor], list[torch.Tensor]]:
    """Load into a policy that began as another model. Parameters found right, and the log-probs of a policy
    made of the Hugging Face folder itself, and of this one."""
    expected = log_probs(small_policy(folder, parallel), samples)
    policy = small_policy(other, parallel)
    load_converted(policy, checkpoint)
    tensors, table = load_file(folder / "model.safetensors"), mapping_table(read_model_shape(folder))
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    right = 0
    for (name, layer), parameter in policy._weights.local.items():
        mapping = table[name]
        whole = join(mapping, [tensors[n.format(layer=layer)] for n in mapping.hf_names])
        assert torch.equal(parameter.detach(), shard(mapping, whole, rank, size)), (name, layer)
        right += 1
    return right, expected, log_probs(policy, samples)


CASES = [("qwen3", "tp2-pp2"), ("qwen2", "tp4"), ("llama", "pp2-vpp2")]


@pytest.mark.parametrize(("family", "text"), slow_but(CASES, CASES[0]))
def test_megatron_loads_it(family: str, text: str, tmp_path: Path) -> None:
    heads, parallel = {"num_key_value_heads": 4} if text == "tp4" else {}, layout(text).parallel
    folder = save_tiny_model(family, tmp_path / "hf", seed=1, **heads)
    other = save_tiny_model(family, tmp_path / "other", seed=2, **heads)
    to_megatron(folder, tmp_path / "megatron", grid=4)
    samples = random_samples(8, seed=3)
    checkpoint = tmp_path / "megatron/release"
    arguments = (other, folder, checkpoint, parallel, samples)
    for right, expected, found in run_layout(load_and_look, parallel, *arguments):
        assert right >= 6
        assert expected
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def train_and_save(
    folder: Path, parallel: ParallelConfig, path: Path, dtype: str
) -> tuple[dict[str, list[str]], dict[str, torch.Tensor]]:
    """The digests and the weights after one update, which is saved."""
    policy = small_policy(folder, parallel, dtype)
    updates_of(policy, random_samples(8, seed=4))
    complete(policy.save(path))
    return policy.state_digest(), weights_of(policy)
