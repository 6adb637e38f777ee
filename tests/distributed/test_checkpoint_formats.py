"""What megatron-core itself saves is read back bit for bit, and what we write it loads, at every layout."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from megatron.core import parallel_state

from bapo_megatron.config import ParallelConfig
from bapo_megatron.data.samples import Sample
from bapo_megatron.errors import CheckpointError, ConfigError
from bapo_megatron.hf.config import read_model_shape
from bapo_megatron.policy import checkpoint as megatron_checkpoint
from bapo_megatron.policy.layout import chunk_layers
from bapo_megatron.policy.megatron import MegatronPolicy
from checkpoints_tools import inspect_checkpoint, reshard, to_hf, verify
from checkpoints_tools.formats.torch_dist import TorchDist
from tests.support.checkpoint_models import bits, load_tensors
from tests.support.layouts import layout
from tests.support.models import FAMILIES, random_samples, save_tiny_model
from tests.support.policies import small_policy, updates_of, weights_of
from tests.support.saves import complete
from tests.support.tiers import slow_but
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: save_tiny_model(family, root / family) for family in FAMILIES}


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return random_samples(6, seed=3)


def norms(policy: MegatronPolicy, samples: list[Sample]) -> list[tuple[float, float]]:
    """Losses and gradient norms of two updates."""
    return [(float(one.sums[0]), one.grad_norm) for one in updates_of(policy, samples, 2)]


def save(
    folder: Path,
    dtype: str,
    parallel: ParallelConfig,
    path: Path,
    samples: list[Sample],
    content: dict[str, Any],
) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]]]:
    """One update, save; the weights then, and what two more updates give. ``content`` is for megatron."""
    megatron_checkpoint._CONTENT.update(content)
    policy = small_policy(folder, parallel, dtype)
    updates_of(policy, samples)
    complete(policy.save(path))
    return weights_of(policy), norms(policy, samples)


def go_on(
    folder: Path, dtype: str, parallel: ParallelConfig, path: Path, samples: list[Sample]
) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]]]:
    """The weights after loading, and what two updates give then."""
    policy = small_policy(folder, parallel, dtype)
    policy.load(path, 1)
    return weights_of(policy), norms(policy, samples)


STACKED: dict[str, Any] = {}
SINGLETON = {"singleton_local_shards": True}


FORMATS = {"stacked": STACKED, "per_layer": {"non_homogeneous_layers": True}, "singleton": SINGLETON}


@pytest.mark.parametrize(
    ("family", "dtype", "text", "form"),
    slow_but(
        [
            *(("qwen3", "bfloat16", "pp2-vpp2", "stacked"), ("llama", "float32", "dp2-tp2-sp", "stacked")),
            *(("qwen2", "bfloat16", "tp2-pp2", "per_layer"), ("llama", "bfloat16", "cp2", "singleton")),
        ],
        ("qwen3", "bfloat16", "pp2-vpp2", "stacked"),
        ("llama", "bfloat16", "cp2", "singleton"),
    ),
)
def test_what_the_trainer_saves_is_read_bitwise(
    family: str,
    dtype: str,
    text: str,
    form: str,
    models: dict[str, Path],
    samples: list[Sample],
    tmp_path: Path,
) -> None:
    """Weights as the policy names them; the optimizer's fp32 weights round to them; all can be resharded."""
    model, path, parallel = models[family], tmp_path / "policy", layout(text).parallel
    [(saved, _), *_] = run_layout(save, parallel, model, dtype, parallel, path, samples, FORMATS[form])
    stored = TorchDist(path, read_model_shape(model))
    assert (stored.layout, stored.optimizer_format) == (form, "fully_reshardable")
    to_hf(path, tmp_path / "hf", model)
    exported = load_tensors(tmp_path / "hf")
    assert exported.keys() == saved.keys()
    for name, tensor in saved.items():
        assert exported[name].dtype == tensor.dtype
        assert torch.equal(bits(exported[name]), bits(tensor)), name
    to_hf(path, tmp_path / "masters", model, origin="optimizer")
    masters = load_tensors(tmp_path / "masters")
    assert any(not torch.equal(masters[name], saved[name].float()) for name in saved) == (dtype != "float32")
    for name, tensor in masters.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor.to(saved[name].dtype), saved[name]), name
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "masters", dtype="auto")
    assert loaded.dtype == torch.float32
    reshard(path, tmp_path / "again", grid=3, vocabulary_multiple=96, reference=model)
    found = verify(path, tmp_path / "again")
    assert (found.equal, found.tensors) == (True, 4 * len(saved)), found


def test_a_resharded_checkpoint_continues_bitwise(
    models: dict[str, Path], samples: list[Sample], tmp_path: Path
) -> None:
    """At the layout that wrote it, model and optimizer: from stacked keys with a padded vocabulary."""
    parallel = ParallelConfig(tensor=2, pipeline=2)
    model, path = models["qwen2"], tmp_path / "policy"
    arguments = (model, "bfloat16", parallel, path, samples)
    [(saved, steps), *_] = run_layout(save, parallel, *arguments, STACKED)
    reshard(path, tmp_path / "again", grid=3, vocabulary_multiple=96, reference=model)
    again = (model, "bfloat16", parallel, tmp_path / "again/release", samples)
    [(loaded, same), *_] = run_layout(go_on, parallel, *again)
    assert same == steps
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())


def load_and_save(folder: Path, dtype: str, parallel: ParallelConfig, path: Path, again: Path) -> None:
    policy = small_policy(folder, parallel, dtype)
    policy.load(path, 1)
    complete(policy.save(again))


LOADED = [
    ("qwen2", "pp2-vpp2", ("tp2-pp2", "dp2-cp2")),
    ("qwen2", "pp3", ("pp2 layers1+3", "tp2-pp2", "pp2-vpp2")),  # of four layers: 1, 2, 1
    ("qwen2", "dp2-cp2", ("dp2-tp2-sp", "tp2-pp2-vpp2", "one")),
    ("llama", "pp2 layers1+3", ("pp3", "one")),
    ("llama", "pp4", ("tp2-cp2", "tp2-pp2-vpp2")),  # tied: the first and the last stage have the embedding
]


@pytest.mark.parametrize(("family", "text", "others"), slow_but(LOADED, *LOADED[:2]), ids=str)
def test_the_trainer_loads_its_checkpoints_at_any_layout(
    family: str,
    text: str,
    others: tuple[str, ...],
    models: dict[str, Path],
    samples: list[Sample],
    tmp_path: Path,
) -> None:
    """Loaded elsewhere and saved again, weights and optimizer are what they were, bit for bit."""
    model, path, written = models[family], tmp_path / "policy", layout(text).parallel
    [(saved, _), *_] = run_layout(save, written, model, "bfloat16", written, path, samples, STACKED)
    assert inspect_checkpoint(path).written_at == sizes_of(written)
    for number, other in enumerate(layout(one).parallel for one in others):
        again = tmp_path / f"again{number}"
        run_layout(load_and_save, other, model, "bfloat16", other, path, again)
        found = verify(path, again, reference=model)
        assert (found.equal, found.tensors) == (True, 4 * len(saved)), found
        assert inspect_checkpoint(again).written_at == sizes_of(other)


def sizes_of(parallel: ParallelConfig) -> dict[str, int | list[int]]:
    names = ("tensor", "pipeline", "virtual", "context", "data", "expert", "expert_tensor")
    sizes: dict[str, int | list[int]] = {name: getattr(parallel, name) or 1 for name in names}
    return {**sizes, "pipeline_layers": list(chunk_layers(parallel, 4))}


def save_legacy(folder: Path, parallel: ParallelConfig, path: Path) -> None:
    """As Megatron-LM does without dist_checkpointing: each rank's state in a file of its own."""
    policy = small_policy(folder, parallel, "bfloat16")
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if parallel.pipeline > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    (path / name).mkdir(parents=True)
    chunks = megatron_checkpoint._named_chunks(policy._model)
    state = {chunk: model.state_dict_for_save_checkpoint() for chunk, model in chunks}
    arguments = argparse.Namespace(tensor_model_parallel_size=parallel.tensor, params_dtype=torch.bfloat16)
    state |= {"args": arguments, "checkpoint_version": 3.0, "iteration": 7}
    torch.save(state, path / name / "model_optim_rng.pt")


@pytest.mark.parametrize(
    ("family", "text"),
    slow_but([("qwen3", "tp2"), ("llama", "tp2-pp2"), ("llama", "pp2-vpp2")], ("qwen3", "tp2")),
)
def test_what_megatron_saves_for_each_rank_is_read_bitwise(
    family: str, text: str, models: dict[str, Path], tmp_path: Path
) -> None:
    path, parallel = tmp_path / "iter_0000007", layout(text).parallel
    run_layout(save_legacy, parallel, models[family], parallel, path)
    to_hf(path, tmp_path / "hf", models[family])
    exported = load_tensors(tmp_path / "hf")
    for name, tensor in load_tensors(models[family]).items():
        assert torch.equal(bits(exported[name]), bits(tensor.bfloat16())), name
    found = inspect_checkpoint(path)
    assert (found.format, found.iteration) == ("mp_rank", 7)
    sizes = {"tensor": parallel.tensor, "pipeline": parallel.pipeline, "virtual": parallel.virtual}
    assert found.written_at == sizes


def test_an_optimizer_of_one_layout_is_refused(
    models: dict[str, Path], samples: list[Sample], tmp_path: Path
) -> None:
    """dp_reshardable keeps no whole tensors: named, with what to do; the weights can be had all the same."""
    parallel, model, path = ParallelConfig(tensor=2), models["qwen2"], tmp_path / "policy"
    content = {"distrib_optim_sharding_type": "dp_reshardable"}
    [(saved, _), *_] = run_layout(save, parallel, model, "bfloat16", parallel, path, samples, content)
    assert inspect_checkpoint(path).optimizer == "dp_reshardable"
    with pytest.raises(
        ConfigError, match=r"dp_reshardable, which only continues.*save it as fully_reshardable"
    ):
        reshard(path, tmp_path / "out", reference=model)
    with pytest.raises(
        CheckpointError, match=r"saved as dp_reshardable, which keeps no whole tensor of param"
    ):
        to_hf(path, tmp_path / "out", model, origin="optimizer")
    reshard(path, tmp_path / "out", reference=model, weights_only=True)
    assert inspect_checkpoint(tmp_path / "out").optimizer is None
    to_hf(tmp_path / "out", tmp_path / "hf")
    exported = load_tensors(tmp_path / "hf")
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())
