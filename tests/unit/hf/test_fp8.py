"""Folders in fp8 as the loader reads them: values of the reference formula, and refusals in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bapo_megatron.errors import CheckpointError, ConfigError
from bapo_megatron.hf.config import model_shape, read_model_shape, with_dtype
from bapo_megatron.hf.fp8 import modules_in_bfloat16, quantized_names
from bapo_megatron.hf.parameter_map import hf_tensors
from bapo_megatron.hf.reader import HfReader, dequantized
from bapo_megatron.rollout.engines.sglang.backend import SglangBackend
from checkpoints_tools import to_megatron
from tests.support.checkpoint_models import (
    config_of,
    load_tensors,
    save_changed,
    save_random_model,
    save_tensors,
)
from tests.support.fp8 import in_bfloat16, save_fp8_folder, save_fused, set_config
from tests.support.models import EXPERTS, SingleWriter, tiny_model

# Query rows 320, key rows 80, MLP 200, hidden 144: a block and a part of one, or two and a part.
ODD = {"hidden_size": 144, "head_dim": 40, "num_key_value_heads": 2, "intermediate_size": 200}
ODD_EXPERTS = {"hidden_size": 144, "moe_intermediate_size": 136}


@pytest.fixture(params=["qwen2", EXPERTS])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    sizes = ODD if request.param == "qwen2" else ODD_EXPERTS
    plain = finite_model(tmp_path / "plain", request.param, **sizes)
    return save_fp8_folder(plain, tmp_path / "fp8")


def finite_model(folder: Path, family: str, **changes: Any) -> Path:
    save_random_model(folder, family, **changes)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: (0.1 * torch.randn(tensor.shape, generator=generator)).bfloat16()
        for name, tensor in sorted(load_tensors(folder).items())
    }
    save_tensors(folder, tensors)
    return folder


def test_a_weight_is_its_number_times_the_scale_of_its_block() -> None:
    """0x38 is 1, 0x7E 448, 0x01 2^-9, 0xC0 -2: sign, exponent from -7, mantissa. 0.3 x 448 = 134.4."""
    numbers = torch.zeros(129, 130, dtype=torch.uint8)
    numbers[0, 0], numbers[127, 127], numbers[0, 128], numbers[128, 129] = 0x38, 0x7E, 0x01, 0xC0
    scales = torch.tensor([[0.3, 0.5], [4.0, 0.75]])
    found = dequantized(numbers.view(torch.float8_e4m3fn), scales)
    assert found.dtype == torch.bfloat16
    assert found[0, 0] == torch.tensor(0.3).bfloat16() == 0.30078125
    assert found[127, 127] == 134.0, "134.4 between 134 and 135"
    assert found[0, 128] == 2**-10
    assert found[128, 129] == -1.5
    assert found.count_nonzero() == 4


@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16])
def test_the_loader_reads_the_values_of_the_formula(scale_type: torch.dtype, tmp_path: Path) -> None:
    plain = finite_model(tmp_path / "plain", "qwen2", **ODD)
    folder = save_fp8_folder(plain, tmp_path / "fp8", scale_type)
    reader, wanted = HfReader(folder), in_bfloat16(folder)
    reader.check(shape := read_model_shape(folder))
    for name in hf_tensors(shape):
        assert torch.equal(reader.read(name), wanted[name]), name
        assert reader.read(name).dtype == torch.bfloat16
    name = "model.layers.1.self_attn.q_proj.weight"
    for rows, columns in ((slice(0, 320), slice(100, 144)), (slice(127, 257), slice(0, 129))):
        assert torch.equal(reader.read(name, rows, columns), wanted[name][rows, columns])
    assert torch.equal(reader.read(name, slice(300, 320)), wanted[name][300:])


def test_fused_experts_in_fp8_read_as_those_apart(tmp_path: Path) -> None:
    model = tiny_model(EXPERTS, hidden_size=144, moe_intermediate_size=128, num_hidden_layers=2)
    model.bfloat16().save_pretrained(tmp_path / "plain")
    folder = save_fp8_folder(tmp_path / "plain", tmp_path / "fp8")
    fused = save_fused(folder, tmp_path / "fused")
    apart, together = HfReader(folder), HfReader(fused)
    together.check(shape := read_model_shape(fused))
    assert len(together.fused_experts) == 4
    for name in hf_tensors(shape):
        assert torch.equal(together.read(name), apart.read(name)), name
    up = "model.layers.1.mlp.experts.5.up_proj.weight"
    assert torch.equal(together.read(up, slice(30, 90), slice(120, 140)), apart.read(up)[30:90, 120:140])


def test_fused_experts_whose_projections_would_share_a_scale_are_refused(tmp_path: Path) -> None:
    model = tiny_model(EXPERTS, hidden_size=144, moe_intermediate_size=192, num_hidden_layers=1)
    model.bfloat16().save_pretrained(tmp_path / "plain")
    fused = save_fused(save_fp8_folder(tmp_path / "plain", tmp_path / "fp8"), tmp_path / "fused")
    tensors = load_tensors(fused)
    scales = "model.layers.0.mlp.experts.gate_up_proj_scale_inv"
    save_tensors(fused, {**tensors, scales: tensors[scales][:, :3].contiguous()})
    message = r"experts\.gate_up_proj stacks projections of 192 rows, no multiple of 128"
    with pytest.raises(CheckpointError, match=message):
        HfReader(fused)


Q = "model.layers.1.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{Q}_scale_inv": None}, r"o_proj\.weight is F8_E4M3 of .*, without scales \(.*_scale_inv\)"),
        ({Q: torch.zeros(144, 192).bfloat16()}, r"_scale_inv is there, but no .*o_proj\.weight in F8_E4M3"),
        ({f"{Q}_scale_inv": torch.ones(2, 1)}, r"is F32 \[2, 1\]; .* has F32 or BF16 \[2, 2\]"),
    ],
)
def test_scales_that_do_not_fit_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    plain = finite_model(tmp_path / "plain", EXPERTS, **ODD_EXPERTS)
    folder = save_changed(save_fp8_folder(plain, tmp_path / "fp8"), tmp_path / "changed", **change)
    with pytest.raises(CheckpointError, match=message):
        HfReader(folder)


def test_a_scale_that_is_no_number_is_refused(folder: Path, tmp_path: Path) -> None:
    scales = load_tensors(folder)
    scales["model.layers.0.self_attn.q_proj.weight_scale_inv"][0, 1] = torch.nan
    save_tensors(folder, scales)
    with pytest.raises(ConfigError, match="scale of the fp8 weights is not finite"):
        HfReader(folder).read("model.layers.0.self_attn.q_proj.weight")
    with pytest.raises(CheckpointError, match=r"q_proj\.weight: its scales are not all finite"):
        to_megatron(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_in_fp8_without_a_word_in_the_config_are_refused(folder: Path) -> None:
    set_config(folder, quantization_config=None)
    with pytest.raises(CheckpointError, match=r"is F8_E4M3, but config\.json has no quantization_config"):
        HfReader(folder)


def test_sides_that_engines_would_cut_at_other_places_stay() -> None:
    """Key and value rows 192, query rows 384: the query projection stays with the others. Experts of 136 rows
    are one module."""
    sizes = {
        "hidden_size": 256,
        "num_key_value_heads": 4,
        "num_hidden_layers": 1,
        "moe_intermediate_size": 136,
    }
    tensors = hf_tensors(model_shape(config_of(EXPERTS, head_dim=48, **sizes), "here"))
    names = quantized_names(tensors)
    assert names == {"model.layers.0.self_attn.o_proj.weight"}
    modules = modules_in_bfloat16(tensors, names)
    assert [name for name in modules if name.endswith(("_proj", "experts"))] == [
        *(f"model.layers.0.self_attn.{x}_proj" for x in "qkv"),
        "model.layers.0.mlp.experts",
    ]


def test_weights_beside_the_config_of_an_fp8_folder_are_not_called_fp8(folder: Path, tmp_path: Path) -> None:
    config = (folder / "config.json").read_bytes()
    assert "quantization_config" not in json.loads(with_dtype(config, {"bfloat16"}))
    staging = SingleWriter(tmp_path / "weights", folder)
    weights = in_bfloat16(folder)
    staged = staging.write(weights.items(), 1)
    assert "quantization_config" not in json.loads((staged / "config.json").read_text())
    assert load_file(staged / "model-00000.safetensors").keys() == weights.keys()


def test_sglang_is_not_given_an_fp8_folder(folder: Path) -> None:
    with pytest.raises(ConfigError, match="is quantized: servers would load it into fp8 layers"):
        SglangBackend().check_weights(folder)
