"""Conversions from and to folders in fp8: bit for bit the reference formulas, and what transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.weight_files import INDEX
from checkpoints_tools import cli, to_hf, to_megatron, verify
from checkpoints_tools.core import copying
from checkpoints_tools.core.copying import to_bfloat16
from checkpoints_tools.core.fp8 import as_float32, dequantized, quantized
from tests.support import fp8
from tests.support.checkpoint_models import load_tensors, save_random_model, save_tensors
from tests.support.models import EXPERTS

# Four heads of 64 on two KV groups, so key and value rows 128; sides of 384, 256 and 128.
SIZES = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 384, "num_hidden_layers": 2}
MIXTURE = {**SIZES, "moe_intermediate_size": 128}


def model_of(folder: Path, family: str, dtype: str = "BF16", files: int = 1, **sizes: Any) -> Path:
    """Normal random numbers, of another magnitude in each tensor."""
    save_random_model(folder, family, dtype, files, **sizes)
    generator = torch.Generator().manual_seed(3)
    tensors = load_tensors(folder)
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        noise = torch.randn(tensor.shape, generator=generator) * 2.0 ** (number % 40 - 30)
        tensors[name] = noise.to(tensor.dtype)
    save_tensors(folder, tensors, files)
    return folder


def in_fp8(folder: Path, tmp_path: Path, grid: int = 3, **arguments: Any) -> Path:
    """The folder by way of torch_dist, in fp8."""
    to_megatron(folder, tmp_path / "megatron", grid)
    to_hf(tmp_path / "megatron", tmp_path / "out", quantize="fp8-block", **arguments)
    return tmp_path / "out"


def test_a_block_by_hand() -> None:
    """amax 7: the factor is 64, the scale 1/64. 7 is 448 (0x7E); -1.75 is -112 (0xEE); 0.001 is 0.064, which
    lies between 0.0625 (0x18) and 0.0703125; 2^-16 is 2^-10, half of the smallest number: to even, 0."""
    values = np.zeros((128, 130), np.float32)
    values[0, :4] = 7.0, -1.75, 0.001, 2.0**-16
    values[1, 0] = 3 * 2.0**-16  # 1.5 of the smallest number 2^-9: to even, 2
    values[0, 128] = 2.0**-140  # its factor would be no float32
    numbers, scales = quantized(values)
    assert scales.tolist() == [[1 / 64, 1.0]]
    assert numbers[0, :4].tolist() == [0x7E, 0xEE, 0x18, 0x00]
    assert numbers[1, 0] == 0x02
    assert not numbers[2:].any()
    assert not numbers[:, 128:].any()


@pytest.mark.parametrize("shape", [(1536, 2048), (576, 1000), (200, 129), (1, 1), (128, 128), (130, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_numbers_are_those_of_the_formula(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
    weight[: shape[0] // 2, :128] = 0.0
    weight = weight.to(dtype)
    name = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[dtype]
    wanted, scales = fp8.quantize(weight)
    data = memoryview(weight.view(torch.uint8).numpy()).cast("B")
    rows = [
        quantized(as_float32(data, name).reshape(shape)[row : row + 128].copy())
        for row in range(0, shape[0], 128)
    ]
    assert np.array_equal(np.concatenate([part for part, _ in rows]), wanted.view(torch.uint8).numpy())
    assert np.array_equal(np.concatenate([own for _, own in rows]), scales.numpy())
    stored = memoryview(wanted.view(torch.uint8).numpy()).cast("B")
    values = dequantized(stored, shape[1], 0, scales.numpy())
    back = np.frombuffer(to_bfloat16(memoryview(values).cast("B"), "F32"), np.uint16).reshape(shape)
    assert np.array_equal(back.view(np.int16), fp8.dequantize(wanted, scales).view(torch.int16).numpy())


def test_every_number_is_rounded_as_torch_does() -> None:
    """All 65,536 float32 whose lower half is 0, 1, 0x7FFF and so on, up to 448."""
    high = np.arange(65536, dtype=np.uint32) << 16
    values = np.concatenate([high | low for low in (0, 1, 0x7FFF, 0x8000, 0xFFFF)]).view(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) <= 448)]
    values = np.concatenate([np.full(1, 448, np.float32), values])
    blocks = np.zeros((-(-len(values) // 127), 128), np.float32)
    blocks[:, 0] = 448.0  # so that the factor of each block is 1
    blocks[:, 1:].flat[: len(values)] = values
    wanted = torch.from_numpy(blocks).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    for row in range(0, len(blocks), 128):
        numbers, scales = quantized(blocks[row : row + 128].copy())
        assert scales.item() == 1.0
        assert np.array_equal(numbers, wanted[row : row + 128])


@pytest.mark.parametrize(
    ("family", "dtype", "grid", "buffer"),
    [
        *((family, dtype, 3, None) for family in ("qwen2", "llama", EXPERTS) for dtype in ("BF16", "F32")),
        # One block, where a real buffer holds 4096 columns: parts begin within the source's chunks.
        *(("qwen2", "BF16", grid, 128 * 128 * 2) for grid in (1, 3)),
    ],
)
def test_a_written_folder_has_the_values_of_the_formula(
    family: str, dtype: str, grid: int, buffer: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_of(tmp_path / "hf", family, dtype, **(MIXTURE if family == EXPERTS else SIZES))
    if buffer:
        monkeypatch.setattr(copying, "BUFFER_BYTES", buffer)
    found, source = load_tensors(in_fp8(folder, tmp_path, grid)), load_tensors(folder)
    projections = {name for name in source if name.endswith("_proj.weight")}
    assert found.keys() == source.keys() | {f"{name}_scale_inv" for name in projections}
    for name, tensor in source.items():
        if name in projections:
            numbers, scales = fp8.quantize(tensor)
            assert torch.equal(found[name].view(torch.uint8), numbers.view(torch.uint8)), name
            assert torch.equal(found[f"{name}_scale_inv"], scales), name
        else:
            assert torch.equal(found[name], tensor.bfloat16()), name


def test_transformers_quantizes_to_the_same_bits(tmp_path: Path) -> None:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    folder = model_of(tmp_path / "hf", EXPERTS, **MIXTURE)
    found = load_tensors(in_fp8(folder, tmp_path))

    class Quantizer:
        quantization_config = FineGrainedFP8Config(weight_block_size=(128, 128))

    quantizer = Fp8Quantize(Quantizer())
    for name, tensor in load_tensors(folder).items():
        if f"{name}_scale_inv" not in found:
            continue
        theirs = quantizer.convert({name: tensor})
        scales = theirs[f"{name}_scale_inv"]
        assert torch.equal(found[name].view(torch.uint8), theirs[name].view(torch.uint8)), name
        assert torch.equal(found[f"{name}_scale_inv"], scales), name
        read = Fp8Dequantize(Quantizer())._dequantize_one(theirs[name], scales, torch.bfloat16)
        assert torch.equal(read, fp8.dequantize(theirs[name], scales))


@pytest.mark.parametrize("grid", [1, 8])
def test_an_fp8_folder_becomes_bfloat16_and_back(grid: int, tmp_path: Path) -> None:
    """Sides of 144, 200 and 320, which have blocks at their edges, are read; the files are the formula's."""
    sizes = {"hidden_size": 144, "head_dim": 40, "num_key_value_heads": 2, "intermediate_size": 200}
    folder = fp8.save_fp8_folder(model_of(tmp_path / "plain", "qwen2", **sizes), tmp_path / "hf")
    to_megatron(folder, tmp_path / "megatron", grid)
    to_hf(tmp_path / "megatron", tmp_path / "back")
    found, wanted = load_tensors(tmp_path / "back"), fp8.in_bfloat16(folder)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert "quantization_config" not in config
    assert config["torch_dtype"] == "bfloat16"
    for other in (tmp_path / "megatron", tmp_path / "back"):
        assert verify(folder, other).equal
        assert verify(other, folder, digests=True).equal


def test_fused_experts_in_fp8_convert_as_those_apart(tmp_path: Path) -> None:
    """Six projections of 128 rows in a fused tensor: an expert's scales lie among those of all."""
    plain = model_of(tmp_path / "plain", EXPERTS, **MIXTURE)
    folder = fp8.save_fp8_folder(plain, tmp_path / "hf")
    fused = fp8.save_fused(folder, tmp_path / "fused")
    to_megatron(fused, tmp_path / "megatron")
    assert verify(folder, tmp_path / "megatron").equal
    assert verify(fused, folder).equal


def test_bands_that_begin_within_a_block_take_its_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large matrices are read in bands of as many rows as a buffer holds: 50 here, of blocks of 128."""
    folder = fp8.save_fp8_folder(model_of(tmp_path / "plain", "qwen2", **SIZES), tmp_path / "hf")
    monkeypatch.setattr(copying, "BUFFER_BYTES", 50 * 2 * SIZES["hidden_size"])
    to_megatron(folder, tmp_path / "megatron", grid=1)
    monkeypatch.undo()
    to_hf(tmp_path / "megatron", tmp_path / "back")
    found = load_tensors(tmp_path / "back")
    assert all(torch.equal(found[name], tensor) for name, tensor in fp8.in_bfloat16(folder).items())


def test_the_config_says_what_was_done(tmp_path: Path) -> None:
    folder = model_of(tmp_path / "hf", EXPERTS, "F32", **MIXTURE)
    config = json.loads((in_fp8(folder, tmp_path) / "config.json").read_text())
    asked = config.pop("quantization_config")
    layers = ["input_layernorm", "post_attention_layernorm", "mlp.gate", "self_attn.q_norm"]
    layers.append("self_attn.k_norm")
    stays = {f"model.layers.{layer}.{module}" for layer in (0, 1) for module in layers}
    assert set(asked.pop("modules_to_not_convert")) == stays | {"model.embed_tokens", "model.norm", "lm_head"}
    kind = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    assert asked == {**kind, "weight_block_size": [128, 128]}
    before = json.loads((folder / "config.json").read_text())
    assert config == {**before, "torch_dtype": "bfloat16"}


def test_a_model_without_such_matrices_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_random_model(tmp_path / "hf", hidden_size=144)
    to_megatron(folder, tmp_path / "megatron")
    arguments = ["to-hf", str(tmp_path / "megatron"), str(tmp_path / "out"), "--quantize", "fp8-block"]
    assert cli.run(arguments) == 2
    assert "no matrix of this model (hidden 144) has sides" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_command_writes_the_same_folder_in_any_number_of_files(tmp_path: Path) -> None:
    folder = model_of(tmp_path / "hf", EXPERTS, files=3, **MIXTURE)
    out = in_fp8(folder, tmp_path)
    index = json.loads((out / INDEX).read_text())
    old = json.loads((folder / INDEX).read_text())["weight_map"]
    held = load_tensors(out)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in held.values())
    for name, file in index["weight_map"].items():
        assert file == old[name.removesuffix("_scale_inv")]
        assert name in load_file(out / file)
    arguments = ["to-hf", str(tmp_path / "megatron"), str(tmp_path / "few"), "--quantize", "fp8-block"]
    assert cli.run([*arguments, "--shard-gb", "0.0002", "--threads", "1"]) == 0
    assert len(list((tmp_path / "few").glob("*.safetensors"))) > 3
    few = load_tensors(tmp_path / "few")
    assert few.keys() == held.keys()
    assert all(torch.equal(few[n].view(torch.uint8), held[n].view(torch.uint8)) for n in held)


def test_the_file_is_that_of_the_safetensors_library(tmp_path: Path) -> None:
    out = in_fp8(model_of(tmp_path / "hf", EXPERTS, **MIXTURE), tmp_path)
    save_file(load_file(out / "model.safetensors"), tmp_path / "library", {"format": "pt"})
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "library").read_bytes()


def test_an_fp8_folder_comes_back_in_its_own_files(tmp_path: Path) -> None:
    """Of a folder whose index has scales: without the flag they go, with it they keep their file."""
    plain = model_of(tmp_path / "plain", EXPERTS, **MIXTURE)
    folder = fp8.save_fp8_folder(plain, tmp_path / "hf")
    save_tensors(folder, load_tensors(folder), files=3)
    (folder / "model.safetensors").unlink()
    out = in_fp8(folder, tmp_path)
    old, new = (json.loads((path / INDEX).read_text()) for path in (folder, out))
    assert new == old
    to_hf(tmp_path / "megatron", tmp_path / "back")
    names = json.loads((tmp_path / "back" / INDEX).read_text())["weight_map"]
    assert names == {n: f for n, f in old["weight_map"].items() if not n.endswith("_scale_inv")}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_refused_and_nothing_is_left(value: float, tmp_path: Path) -> None:
    folder = model_of(tmp_path / "hf", "qwen2", **SIZES)
    tensors, name = load_tensors(folder), "model.layers.1.mlp.up_proj.weight"
    tensors[name][200, 3] = value
    save_tensors(folder, tensors)
    to_megatron(folder, tmp_path / "megatron")
    with pytest.raises(
        CheckpointError, match=r"mlp\.up_proj\.weight, rows 128 to 256: a number is not finite"
    ):
        to_hf(tmp_path / "megatron", tmp_path / "out", quantize="fp8-block")
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "megatron"}
