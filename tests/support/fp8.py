"""Reference formulas of fp8 with block scales, in torch, and folders that are written with them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from torch import Tensor

from tests.support.checkpoint_models import load_tensors, save_tensors

FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCKS = {"weight_block_size": [128, 128]}
_QUANTIZED = re.compile(r".*_proj(_qkv|_z)?\.weight")


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers and scales of a matrix; blocks at its edges are filled up with zeros.

    DeepSeek's cast by block, with transformers' order of roundings.
    """
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
    padded[:rows, :columns] = weight.float()
    blocks = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
    amax = blocks.abs().amax(dim=(1, 3))
    factor = torch.where(amax > 0, 448.0 / torch.where(amax > 0, amax, 1.0), 1.0)
    numbers = (blocks * factor[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return numbers.view(padded.shape)[:rows, :columns].contiguous(), 1.0 / factor


def dequantize(numbers: Tensor, scales: Tensor) -> Tensor:
    """The weights: each number times the scale of its block, rounded once to bfloat16."""
    rows, columns = numbers.shape[-2:]
    wide = scales.float().repeat_interleave(128, -2).repeat_interleave(128, -1)
    return (numbers.float() * wide[..., :rows, :columns]).bfloat16()


def save_fp8_folder(source: Path, folder: Path, scale_type: torch.dtype = torch.float32) -> Path:
    """The model of ``source`` with every projection in fp8, also those whose sides are not multiples of 128.

    What published folders of hybrids leave in bfloat16 or float32 stays so.
    """
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix == ".json" and "index" not in path.name:
            (folder / path.name).write_bytes(path.read_bytes())
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_tensors(source).items():
        if is_quantized(name):
            tensors[name], scales = quantize(tensor)
            tensors[f"{name}_scale_inv"] = scales.to(scale_type)
        else:
            tensors[name] = (
                tensor if name.endswith((".A_log", ".linear_attn.norm.weight")) else tensor.bfloat16()
            )
    save_tensors(folder, tensors)
    set_config(folder, quantization_config={**FP8_CONFIG, **BLOCKS})
    return folder


def is_quantized(name: str) -> bool:
    """Whether published folders in fp8 have this tensor of the text model or of the MTP head in fp8."""
    return _QUANTIZED.fullmatch(name) is not None and ".visual." not in name


def set_config(folder: Path, **fields: object) -> None:
    """Set fields of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def in_bfloat16(folder: Path) -> dict[str, Tensor]:
    """The weights of an fp8 folder by the reference formula."""
    held = load_tensors(folder)
    return {
        name: dequantize(tensor, held[f"{name}_scale_inv"]) if f"{name}_scale_inv" in held else tensor
        for name, tensor in held.items()
        if not name.endswith("_scale_inv")
    }


def save_fused(folder: Path, fused: Path) -> Path:
    """The experts of each layer in two tensors and their scales in two, as transformers fuses them."""
    fused.mkdir()
    tensors = load_tensors(folder)
    held = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    layers = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    for layer in layers:
        count = sum(f"{layer}.experts.{e}.up_proj.weight" in tensors for e in range(100))
        for end in ("weight", "weight_scale_inv"):
            own = [
                [tensors[f"{layer}.experts.{expert}.{kind}_proj.{end}"] for expert in range(count)]
                for kind in ("gate", "up", "down")
            ]
            gate, up, down = (torch.stack([one.view(torch.uint8) for one in part]) for part in own)
            kind, suffix = own[0][0].dtype, end.removeprefix("weight")
            held[f"{layer}.experts.gate_up_proj{suffix}"] = torch.cat([gate, up], 1).view(kind)
            held[f"{layer}.experts.down_proj{suffix}"] = down.view(kind)
    save_tensors(fused, held)
    (fused / "config.json").write_bytes((folder / "config.json").read_bytes())
    return fused
