"""Checkpoints of experts and hybrids: a layout loads those of any other; bapo-ckpt reads and writes them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from bapo_megatron.config import ParallelConfig
from bapo_megatron.hf.config import read_model_shape
from bapo_megatron.policy.layout import chunk_layers
from checkpoints_tools import inspect_checkpoint, reshard, to_hf, to_megatron, verify
from tests.distributed.test_converted_checkpoints import load_converted, log_probs, train_and_save
from tests.support.layouts import layout
from tests.support.models import EXPERT_HYBRID, EXPERTS, HYBRID, random_samples, save_tiny_model
from tests.support.policies import small_policy, weights_of
from tests.support.tiers import slow_but
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed

LOADED = {
    EXPERTS: ("one", "tp2-sp", "tp2-sp-etp2", "dp4-ep4", "dp2-pp3-ep2", "dp2-tp2-sp-ep2-etp2"),
    HYBRID: ("one", "cp2", "tp2-cp2", "pp2-vpp2", "pp2 layers3+5"),
    EXPERT_HYBRID: ("one", "dp2-ep2", "pp2", "dp2-tp2-sp-ep2-etp2"),
}
WRITTEN = [
    (EXPERTS, "float32", "dp2-ep2"),
    *((EXPERTS, "bfloat16", text) for text in ("tp2-sp-etp2", "dp2-tp2-sp-ep2-etp2")),
    *((HYBRID, dtype, "tp2-sp-pp2") for dtype in ("float32", "bfloat16")),
    *((EXPERT_HYBRID, dtype, "tp2-sp-ep2") for dtype in ("float32", "bfloat16")),
]
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: save_tiny_model(family, tmp_path_factory.mktemp(family)) for family in LOADED}


def load_and_look(folder: Path, parallel: ParallelConfig, path: Path) -> tuple[dict, Weights]:
    policy = small_policy(folder, parallel)
    policy.load(path, 1)
    return policy.state_digest(), weights_of(policy)


@pytest.mark.parametrize(
    ("family", "dtype", "text"),
    slow_but(
        WRITTEN,
        (EXPERTS, "float32", "dp2-ep2"),
        (EXPERTS, "bfloat16", "dp2-tp2-sp-ep2-etp2"),
        (HYBRID, "bfloat16", "tp2-sp-pp2"),
        (EXPERT_HYBRID, "bfloat16", "tp2-sp-ep2"),
    ),
)
def test_every_layout_loads_weights_and_optimizer_bit_for_bit(
    family: str, dtype: str, text: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """A checkpoint also becomes a folder of transformers, resharded or not."""
    path, folder, written = tmp_path / "policy", folders[family], layout(text).parallel
    [(digest, weights), *others] = run_layout(train_and_save, written, folder, written, path, dtype)
    assert all(len(values) == 1 for values in digest.values()), digest
    assert all(other[0] == digest for other in others)
    types = {name: tensor.dtype for name, tensor in weights.items()}
    kept = {name for name in types if name.endswith(("A_log", "linear_attn.norm.weight"))}
    assert {types[name] for name in kept} <= {torch.float32}
    assert {types[name] for name in types.keys() - kept} == {getattr(torch, dtype)}
    written_at = inspect_checkpoint(path).written_at
    assert (written_at["expert"], written_at["expert_tensor"]) == (written.expert, written.expert_tensor)
    layers = read_model_shape(folder).layers
    assert written_at["pipeline_layers"] == list(chunk_layers(written, layers))
    for other in LOADED[family] if dtype == "float32" else ():
        parallel = layout(other).parallel
        for found, same in run_layout(load_and_look, parallel, folder, parallel, path):
            assert found == digest, other
            assert all(torch.equal(same[name], tensor) for name, tensor in weights.items()), other
    reshard(path, tmp_path / "resharded", grid=3, reference=folder)
    compared = verify(path, tmp_path / "resharded", reference=folder)
    assert compared.equal
    assert compared.optimizer.startswith("compared")
    for number, source in enumerate((path, tmp_path / "resharded")):
        to_hf(source, tmp_path / f"hf {number}", reference=folder)
        converted = load_file(tmp_path / f"hf {number}/model.safetensors")
        assert converted.keys() == weights.keys()
        for name, tensor in weights.items():
            assert converted[name].dtype == tensor.dtype, name
            assert torch.equal(converted[name], tensor), name


def load_both(folder: Path, other: Path, parallel: ParallelConfig, checkpoint: Path) -> tuple[list, list]:
    """Log-probs of a policy made of the folder, and of one of other weights that loaded the checkpoint."""
    samples = random_samples(8, seed=3)
    expected = log_probs(small_policy(folder, parallel), samples)
    policy = small_policy(other, parallel)
    load_converted(policy, checkpoint)
    return expected, log_probs(policy, samples)


@pytest.mark.parametrize(
    ("family", "text"),
    slow_but(
        [
            *((EXPERTS, text) for text in ("tp2-sp-etp2", "dp2-pp2-ep2")),
            *((HYBRID, text) for text in ("tp2-cp2", "pp2-vpp2")),
            (EXPERT_HYBRID, "tp2-sp-ep2"),
        ],
        (EXPERTS, "dp2-pp2-ep2"),
        (HYBRID, "tp2-cp2"),
        (EXPERT_HYBRID, "tp2-sp-ep2"),
    ),
)
def test_megatron_loads_what_the_converter_writes(
    family: str, text: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The other layouts load the same names and shapes from the trainer's checkpoints."""
    other, parallel = save_tiny_model(family, tmp_path / "other", seed=2), layout(text).parallel
    to_megatron(folders[family], tmp_path / "megatron", grid=4)
    arguments = (folders[family], other, parallel, tmp_path / "megatron/release")
    for expected, found in run_layout(load_both, parallel, *arguments):
        assert expected
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def digests_of_a_flip(folder: Path, parallel: ParallelConfig) -> tuple[list[str], list[str]]:
    """The digests of the weights, before and after one element of one expert on the last rank is changed."""
    policy = small_policy(folder, parallel)
    before = policy.state_digest()["weights"]
    if dist.get_rank() == dist.get_world_size() - 1:
        key = next(key for key in policy._weights.local if ".experts." in key[0])
        with torch.no_grad():
            policy._weights.local[key][0, 0] += 1e-6
    return before, policy.state_digest()["weights"]


@pytest.mark.parametrize(("text", "copies"), [("dp2-ep2", 1), ("dp2", 2)])
def test_one_changed_element_of_one_expert_changes_the_digest(
    text: str, copies: int, folders: dict[str, Path]
) -> None:
    """With a second copy of the expert both digests are told, that of the good one among them."""
    where = layout(text).parallel
    for before, after in run_layout(digests_of_a_flip, where, folders[EXPERTS], where):
        assert len(before) == 1
        assert len(after) == copies
        assert (before[0] in after) == (copies == 2)


def gathered(folder: Path, parallel: ParallelConfig) -> Weights:
    return weights_of(small_policy(folder, parallel))


@pytest.mark.parametrize(
    "text",
    slow_but(["dp2-etp2", "dp4-ep2", "dp2-pp3-ep2", "dp2-cp2-ep4", "dp4-ep2-etp2"], "dp2-etp2", "dp4-ep2"),
)
def test_every_rank_gathers_the_experts_of_all(text: str, folders: dict[str, Path]) -> None:
    """With ETP, too, a replica may hold a part of each expert. A rank that does not join ends the wait."""
    folder, where = folders[EXPERTS], dataclasses.replace(layout(text).parallel, timeout_minutes=5)
    wanted = load_file(folder / "model.safetensors")
    for weights in run_layout(gathered, where, folder, where):
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in wanted.items())
