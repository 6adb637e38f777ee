"""megatron-core loads what bapo-ckpt writes, at any layout and with its default strictness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from safetensors.torch import load_file

from bapo_megatron.config import ParallelConfig
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.hf.config import read_model_shape
from bapo_megatron.hf.parameter_map import mapping_table
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.policy.weight_map import shard
from checkpoints_tools import to_hf, to_megatron
from tests.support.checkpoint_models import join
from tests.support.layouts import layout
from tests.support.models import FAMILIES, random_samples, save_tiny_model
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


def load_extra_states(checkpoint: Path, layers: int, modules: list[str]) -> list[Any]:
    """As the modules of Transformer Engine ask for their own states."""
    keys = [f"decoder.layers.{module}._extra_state" for module in modules]
    state = {
        f"{key}{layer}": ShardedObject(key, None, (layers,), (layer,))
        for key in keys
        for layer in range(layers)
    }
    state["final"] = ShardedObject("decoder.final_layernorm._extra_state", None, (1,), (0,))
    loaded = dist_checkpointing.load(dict(state), str(checkpoint))
    return [loaded[key] for key in state]


def test_states_of_transformer_engine_are_there(tmp_path: Path) -> None:
    """Without them the default strictness refuses the checkpoint."""
    folder = save_tiny_model("qwen3", tmp_path / "hf")
    to_megatron(folder, tmp_path / "megatron")
    modules = ["linear_qkv", "core_attention", "linear_proj", "q_layernorm", "k_layernorm"]
    modules = [*(f"self_attention.{module}" for module in modules), "mlp.linear_fc1", "mlp.linear_fc2"]
    arguments = (tmp_path / "megatron/release", 4, modules)
    [found] = run_layout(load_extra_states, ParallelConfig(), *arguments)
    assert found == [None] * (4 * 7 + 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_export(family: str, tmp_path: Path) -> None:
    """And gives the logits that it gave before."""
    folder = save_tiny_model(family, tmp_path / "hf")
    to_megatron(folder, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back", shard_bytes=50_000)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    tokens = torch.arange(20).reshape(1, -1)
    logits = []
    for source in (folder, tmp_path / "back"):
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        with torch.no_grad():
            logits.append(model(tokens).logits)
    assert torch.equal(*logits)
