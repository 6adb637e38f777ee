"""Weights between Hugging Face folders, converted checkpoints and Transformer Engine: equal bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bapo_megatron.config import ParallelConfig
from bapo_megatron.hf.config import read_model_shape
from bapo_megatron.hf.parameter_map import mapping_table
from checkpoints_tools.hf_to_megatron import to_megatron
from checkpoints_tools.megatron_to_hf import to_hf
from tests.distributed.test_converted_checkpoints import load_converted
from tests.support.models import FAMILIES, save_tiny_model
from tests.support.policies import small_policy, weights_of
from tests.support.saves import complete
from tests.support.te_process import TransformerEngineProcess
from tests.te.conftest import at_versions

pytestmark = pytest.mark.distributed

ONE, TP2_PP2 = ParallelConfig(), ParallelConfig(tensor=2, pipeline=2)


def save_new_policy(folder: Path, path: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """A new policy, saved in ``path``: its weights in their HF names, and the names of its parameters."""
    policy = small_policy(folder, dtype="bfloat16")
    complete(policy.save(path))
    return weights_of(policy), [name for name, _ in policy._weights.local]


def load_checkpoint(other: Path, path: Path, parallel: ParallelConfig) -> dict[str, torch.Tensor]:
    """The weights of a policy that began as another model and loads ``path`` strictly."""
    policy = small_policy(other, parallel, "bfloat16")
    load_converted(policy, path)
    return weights_of(policy)


def assert_equal(found: dict[str, torch.Tensor], folder: Path) -> None:
    """``found`` is the model in ``folder``, rounded to bfloat16."""
    stored = load_file(folder / "model.safetensors")
    assert found.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(found[name], tensor.bfloat16()), name


@pytest.mark.parametrize(
    ("te", "family"), at_versions(((one,) for one in FAMILIES), ("qwen3",)), indirect=["te"]
)
def test_hugging_face_names_in_and_out(family: str, te: TransformerEngineProcess, tmp_path: Path) -> None:
    """Into Transformer Engine's modules; out of them; and out of their checkpoint by bapo-ckpt."""
    folder = save_tiny_model(family, tmp_path / "hf", seed=1)
    [(weights, names)] = te.run(save_new_policy, ONE, folder, tmp_path / "policy")
    assert_equal(weights, folder)
    assert set(names) == set(mapping_table(read_model_shape(folder)))
    to_hf(tmp_path / "policy", tmp_path / "back", reference=folder)
    assert_equal(load_file(tmp_path / "back/model.safetensors"), folder)


@pytest.mark.parametrize(
    ("te", "family", "parallel"),
    at_versions([("qwen3", ONE), *((family, TP2_PP2) for family in ("qwen2", "llama"))], ("qwen3", ONE)),
    indirect=["te"],
)
def test_converted_checkpoints_load_strictly(
    family: str, parallel: ParallelConfig, te: TransformerEngineProcess, tmp_path: Path
) -> None:
    """What bapo-ckpt writes has every key that the modules ask for, and none that they refuse."""
    folder = save_tiny_model(family, tmp_path / "hf", seed=1)
    other = save_tiny_model(family, tmp_path / "other", seed=2)
    to_megatron(folder, tmp_path / "megatron")
    for found in te.run(load_checkpoint, parallel, other, tmp_path / "megatron/release", parallel):
        assert_equal(found, folder)
