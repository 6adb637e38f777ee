"""Folders of hybrids in fp8, as published ones: experts apart, the MTP head in fp8, vision in bfloat16."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from bapo_megatron.hf.config import read_model_shape
from bapo_megatron.hf.fp8 import modules_in_bfloat16, quantized_names
from bapo_megatron.hf.parameter_map import hf_tensors
from bapo_megatron.hf.reader import HfReader
from bapo_megatron.rollout.engines.local_engine import LocalModel
from bapo_megatron.types import GenerateRequest, SamplingParams
from checkpoints_tools import to_hf, to_megatron, verify
from tests.support.checkpoint_models import load_tensors, save_tensors
from tests.support.fp8 import in_bfloat16, is_quantized, quantize, save_fp8_folder
from tests.support.models import EXPERT_HYBRID, HYBRID, HYBRIDS
from tests.unit.checkpoints_tools.test_hybrid_folders import save_multimodal
from tests.unit.rollout.test_local_decoding import loaded

SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 64}
SIZES |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
EXPERTS = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}


def published(folder: Path, family: str, tied: bool = False, **sizes: int) -> Path:
    """A multi-modal folder in fp8 with scales in bfloat16."""
    sizes = SIZES | (EXPERTS if family == EXPERT_HYBRID else {}) | sizes
    plain = save_multimodal(folder.parent / "plain", tied, family, **sizes)
    save_tensors(plain, {**experts_apart(load_tensors(plain)), "mtp.layers.0.mlp.up_proj.weight": matrix()})
    return save_fp8_folder(plain, folder, torch.bfloat16)


def matrix() -> Tensor:
    return torch.randn(384, 256, generator=torch.Generator().manual_seed(5)).bfloat16()


def experts_apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    apart = {}
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "experts.down_proj")):
            layer, kinds = name.rpartition(".")[0], ("gate", "up") if "gate_up" in name else ("down",)
            for expert, own in enumerate(tensor):
                for kind, part in zip(kinds, own.chunk(len(kinds)), strict=True):
                    apart[f"{layer}.{expert}.{kind}_proj.weight"] = part.contiguous()
        else:
            apart[name] = tensor
    return apart


def values(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, bytes]]:
    return {
        name: (one.dtype, bytes(one.contiguous().view(torch.uint8).numpy())) for name, one in tensors.items()
    }


@pytest.mark.parametrize(("family", "tied"), [(HYBRID, False), (HYBRID, True), (EXPERT_HYBRID, False)])
def test_a_published_folder_becomes_bfloat16_whole(family: str, tied: bool, tmp_path: Path) -> None:
    """Also what is not trained, of which the MTP head is in fp8."""
    folder = published(tmp_path / "hf", family, tied)
    HfReader(folder).check(read_model_shape(folder))
    assert "mtp.layers.0.mlp.up_proj.weight_scale_inv" in load_tensors(folder)
    to_megatron(folder, tmp_path / "megatron")
    for number, reference in enumerate((None, folder)):
        back = tmp_path / f"back {number}"
        to_hf(tmp_path / "megatron", back, reference=reference)
        own = load_tensors(back)
        assert values(own if reference else experts_apart(own)) == values(in_bfloat16(folder))
        assert "quantization_config" not in json.loads((back / "config.json").read_text())
        assert verify(folder, back).equal
    assert verify(folder, tmp_path / "megatron").equal


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_written_folder_has_in_fp8_what_published_ones_have(family: str, tmp_path: Path) -> None:
    """But for what is not trained, which stays as it was read."""
    folder = published(tmp_path / "hf", family)
    to_megatron(folder, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back", quantize="fp8-block")
    source, found, wanted = in_bfloat16(folder), load_tensors(tmp_path / "back"), {}
    for name, tensor in source.items():
        wanted[name] = tensor
        if is_quantized(name) and not name.startswith("mtp."):
            wanted[name], wanted[f"{name}_scale_inv"] = quantize(tensor)
    assert values(found) == values(wanted)
    config = json.loads((tmp_path / "back/config.json").read_text())
    stays = config["quantization_config"]["modules_to_not_convert"]
    layer = "model.language_model.layers.0."
    modules = [f"linear_attn.{part}" for part in ("in_proj_a", "in_proj_b", "conv1d", "norm")]
    modules += ["mlp.gate", "mlp.shared_expert_gate"] if family == EXPERT_HYBRID else []
    assert {*(layer + name for name in modules), "mtp.fc", "model.visual.patch_embed.proj", "lm_head"} < {
        *stays
    }
    assert not [name for name in stays if is_quantized(f"{name}.weight") and not name.startswith("mtp.")]


def test_projections_that_engines_keep_in_one_matrix_stay_together(tmp_path: Path) -> None:
    """The rows of one are not multiples of 128: 8 x 24 of z, or 2 x 4 x 40 and 8 x 32 of the other."""
    for key_dim, value_dim in ((40, 24), (40, 32)):
        sizes = {"linear_key_head_dim": key_dim, "linear_value_head_dim": value_dim}
        tensors = hf_tensors(read_model_shape(published(tmp_path / f"{value_dim}/hf", HYBRID, **sizes)))
        names = quantized_names(tensors)
        assert not [name for name in names if ".in_proj_" in name]
        assert "model.language_model.layers.0.mlp.up_proj.weight" in names
        modules = modules_in_bfloat16(tensors, names)
        assert {f"model.language_model.layers.0.linear_attn.in_proj_{part}" for part in ("qkv", "z")} < {
            *modules
        }


@pytest.mark.parametrize("family", HYBRIDS)
def test_transformers_loads_a_written_folder(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.quantizers import quantizer_finegrained_fp8

    # It asks for accelerate, which it does not use on a CPU, and which is not a part of the environment.
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    to_megatron(published(tmp_path / "hf", family), tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "out", quantize="fp8-block")
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True, local_files_only=True
    )
    assert not report["missing_keys"]
    wanted = in_bfloat16(tmp_path / "out")
    found = experts_apart({name: tensor.data for name, tensor in model.named_parameters()})
    for name, tensor in found.items():
        own = wanted[name.replace("model.", "model.language_model.", 1)]
        assert torch.equal(tensor.bfloat16(), own.bfloat16()), name


def test_the_embedded_engine_reads_a_published_folder(tmp_path: Path) -> None:
    """And loads it as an evaluation does, with what is not trained."""
    prompts, settings = ([3, 4, 5], [6, 7]), SamplingParams(1.0, 9, (1,), 7)
    requests = [GenerateRequest(f"{n}-0", np.array(ids, np.int32), settings) for n, ids in enumerate(prompts)]
    model = LocalModel(published(tmp_path / "hf", EXPERT_HYBRID), max_batch=4)
    before = model.generate(requests)
    asyncio.run(loaded(model, tmp_path / "hf"))
    after = model.generate(requests)
    model.close()
    to_megatron(tmp_path / "hf", tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "plain back")
    plain = LocalModel(tmp_path / "plain back", max_batch=4)
    for one, two, wanted in zip(before, after, plain.generate(requests), strict=True):
        assert one.log_probs_R.tolist() == two.log_probs_R.tolist() == wanted.log_probs_R.tolist()
    plain.close()
