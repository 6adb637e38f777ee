"""Folders of fp8 weights with block scales: their config.json fields, scale names and shapes.

Such a folder (Qwen3.5-*-FP8, DeepSeek-V3) holds a matrix as float8_e4m3fn numbers q, and beside it
``NAME_scale_inv`` with a number s for each 128 x 128 block: the weight is q s. Blocks at the right and lower
edge may be smaller. Norms, embeddings, output layer and routers stay bfloat16, as does Gated DeltaNet except
its large projections. ``check_quantization`` raises ConfigError for any other format. Nothing here computes
weights: ``reader.py`` reads them, ``checkpoints_tools/core/fp8.py`` quantizes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.errors import CheckpointError, ConfigError
from bapo_megatron.runtime.files import read_file_inside

BLOCK = 128
"""Rows and columns of a block with one scale."""

FP8 = "F8_E4M3"
"""safetensors' name of float8_e4m3fn: 4 exponent bits, 3 mantissa bits, no infinity, at most 448."""

SCALE_TYPES = ("F32", "BF16")
"""Scale types: float32 in DeepSeek's and transformers' folders, bfloat16 in Qwen's."""

_FIELD, _SUFFIX = "quantization_config", "_scale_inv"
_WRITTEN = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}
_PROJECTION = re.compile(r".*(?:_proj|\.linear_attn\.in_proj_(?:qkv|z))\.weight")
_ONE_IN_ENGINES = re.compile(r"(.*\.)(?:self_attn\.[qkv]_proj|linear_attn\.in_proj_(?:qkv|z))\.weight")
"""A layer's matrices that engines fuse."""
_EXPERTS = re.compile(r"(\.mlp\.experts)\.\d+\.\w+$")


def check_quantization(config: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError, naming ``source``, for any quantization but fp8 with scales of 128 x 128 blocks."""
    asked = config.get(_FIELD)
    if not asked:
        return
    fields = asked if isinstance(asked, dict) else {"quant_method": asked}
    wanted: dict[str, Sequence[Any]] = {
        "quant_method": ("fp8",),
        "weight_block_size": ([BLOCK, BLOCK],),
        "fmt": (None, "e4m3"),
        "expert_dtype": (None, "fp8"),
        "modules_to_convert": (None, []),
    }
    for field, values in wanted.items():
        if fields.get(field) not in values:
            raise ConfigError(
                f"{source}: {_FIELD} has {field}={fields.get(field)!r:.80}, which is not supported; give a "
                f"folder in bfloat16, or in fp8 (e4m3) with scales of {BLOCK} x {BLOCK} blocks"
            )


def is_quantized(folder: Path) -> bool:
    """Whether config.json says that a folder's weights are quantized; False if it cannot be read."""
    try:
        config = json.loads(read_file_inside(folder, "config.json"))
    except (CheckpointError, OSError, ValueError, RecursionError):
        return False  # the shape parser reports the error
    return isinstance(config, dict) and bool(config.get(_FIELD))


def scale_name(weight: str) -> str:
    """Name of a matrix's scale tensor."""
    return weight + _SUFFIX


def weight_of_scale(name: str) -> str | None:
    """Name of the matrix with the scales ``name``; None if they are not scales."""
    return name.removesuffix(_SUFFIX) if name.endswith(_SUFFIX) else None


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the scales of a matrix or stack of matrices: the number of blocks."""
    *leading, rows, columns = shape
    return (*leading, -(-rows // BLOCK), -(-columns // BLOCK))


def scales_problem(
    name: str,
    weight: tuple[str, tuple[int, ...]] | None,
    scales: tuple[str, tuple[int, ...]] | None,
    stacked_rows: int | None,
    described: bool,
) -> str | None:
    """Problem of the matrix ``name`` and its scales, each as type and shape (None: missing); None if none.
    ``stacked_rows``: from ``fused_rows``. ``described``: whether config.json declares fp8."""
    if weight is None or weight[0] != FP8:
        return None if scales is None else f"tensor {scale_name(name)} is there, but no {name} in {FP8}"
    if not described:
        return f"tensor {name} is {FP8}, but config.json has no {_FIELD}: take that of the model"
    if scales is None or len(weight[1]) < 2:
        return f"tensor {name} is {FP8} of shape {list(weight[1])}, without scales ({scale_name(name)})"
    wanted = scale_shape(weight[1])
    if scales[0] not in SCALE_TYPES or scales[1] != wanted:
        return (
            f"tensor {scale_name(name)} is {scales[0]} {list(scales[1])}; {name} of shape "
            f"{list(weight[1])} has {' or '.join(SCALE_TYPES)} {list(wanted)}"
        )
    if stacked_rows is not None and stacked_rows % BLOCK:
        return (
            f"tensor {name} stacks projections of {stacked_rows} rows, no multiple of {BLOCK}: a scale could "
            "be of two projections; save the model with a tensor for each expert"
        )
    return None


def quantized_names(tensors: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Names of the matrices that an fp8 folder holds in fp8, from a model's tensors with shapes.

    These are the projections of attention, MLPs and experts. One with a side above 128 that is not a multiple
    of it stays bfloat16: SGLang rejects it, and transformers silently cuts other blocks. So do the matrices
    that engines fuse with it (q, k and v; in_proj_qkv and z).
    """
    names = {name for name in tensors if _PROJECTION.fullmatch(name)}
    odd = {name for name in names if not all(n < BLOCK or n % BLOCK == 0 for n in tensors[name])}
    together = {name: match[1] for name in names if (match := _ONE_IN_ENGINES.fullmatch(name))}
    layers = {together.get(name) for name in odd} - {None}
    return {name for name in names - odd if together.get(name) not in layers}


def modules_in_bfloat16(tensors: Mapping[str, Any], quantized: set[str]) -> list[str]:
    """Modules that an fp8 folder leaves in bfloat16, for ``modules_to_not_convert``, in natural order.
    Experts count as one module there. The output layer is included even if tied."""
    weights = (name for name in tensors if name.endswith(".weight") and name not in quantized)
    modules = (_EXPERTS.sub(r"\1", name.removesuffix(".weight")) for name in weights)
    return list(dict.fromkeys([*modules, "lm_head"]))


def without_quantization(config: bytes) -> bytes:
    """config.json without its ``quantization_config``, for bfloat16 weights; unchanged without one."""
    parsed = json.loads(config)
    if not isinstance(parsed, dict) or _FIELD not in parsed:
        return config
    del parsed[_FIELD]
    return _dumped(parsed)


def with_fp8(config: bytes, in_bfloat16: Sequence[str]) -> bytes:
    """config.json of an fp8 folder that leaves the modules ``in_bfloat16`` unconverted."""
    parsed = json.loads(config)
    return _dumped({**parsed, _FIELD: {**_WRITTEN, "modules_to_not_convert": list(in_bfloat16)}})


def _dumped(config: Mapping[str, Any]) -> bytes:
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
