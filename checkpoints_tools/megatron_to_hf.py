"""Megatron-to-HF conversion: from a checkpoint to a Hugging Face folder for transformers and engines.

``to_hf`` writes the folder and returns a ``Conversion``. ``plan_hf_folder`` returns the plan of such a
folder, also for the trainer's export, which fills it with tensors from memory (``checkpoint/export.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.blocks import WEIGHT_TYPES, BlockTensor
from bapo_megatron.hf.config import ModelShape, carried_files, read_model_shape, with_dtype
from bapo_megatron.hf.families import FAMILIES
from bapo_megatron.hf.fp8 import (
    BLOCK,
    FP8,
    modules_in_bfloat16,
    quantized_names,
    scale_name,
    scale_shape,
    weight_of_scale,
    with_fp8,
)
from bapo_megatron.hf.parameter_map import (
    OUTPUT,
    embedding_name,
    hf_tensors,
    is_fused_experts,
    kept_in_float32,
)
from bapo_megatron.hf.safetensors_folder import read_safetensors
from bapo_megatron.hf.weight_files import INDEX, SINGLE, read_weight_map
from bapo_megatron.runtime.files import read_file_inside
from bapo_megatron.runtime.written_folders import temporary_folder
from checkpoints_tools.conversion import DEFAULTS, Conversion, Settings, convert
from checkpoints_tools.core.atomic_output import OutputPlan, check_output
from checkpoints_tools.formats.locate import LATEST, Format, OpenedCheckpoint, open_checkpoint
from checkpoints_tools.formats.safetensors_folder import (
    Planned,
    plan_safetensors,
    untrained_tensors,
    with_fused_experts,
)
from checkpoints_tools.formats.torch_dist import TorchDist

_MOST_SHARD_BYTES = 5_000_000_000
_CONFIG = "config.json"


def to_hf(
    checkpoint: Path,
    output: Path,
    reference: Path | None = None,
    dtype: Literal["bf16"] | None = None,
    origin: Literal["model", "optimizer"] = "model",
    step: str = LATEST,
    shard_bytes: int | None = None,
    settings: Settings = DEFAULTS,
    quantize: Literal["fp8-block"] | None = None,
) -> Conversion:
    """Convert a Megatron checkpoint to the Hugging Face folder ``output``.

    The folder holds the weights as safetensors, and config, tokenizer and chat templates as in the folder
    that training began from.

    Args:
        checkpoint: any path that ``formats/locate.py`` understands.
        output: the folder to write, which appears whole or not at all.
        reference: Hugging Face folder of the model, for a checkpoint that carries none. The weights keep its
            division into files, unless ``shard_bytes`` is given.
        dtype: type that the weights are rounded to; without it every bit stays.
        origin: "model" takes the model's weights, "optimizer" the fp32 master weights of the optimizer.
        step: which step, where the path holds several.
        shard_bytes: most bytes of one safetensors file.
        quantize: "fp8-block" writes matrices in fp8 with scales of 128 x 128 blocks, computed from the
            source's numbers, and all else as bfloat16, but for what is float32 in any model.

    ConfigError or CheckpointError comes before anything is written, except where the disk fills up.
    """
    opened = open_checkpoint(checkpoint, step, reference)
    source, model, shape = opened.location.folder, opened.reference, opened.shape
    if opened.location.format is Format.HF:
        raise ConfigError(f"{source} is a Hugging Face folder already")
    output = check_output(output, settings.overwrite, [source, model])
    readable = opened.tensors if origin == "model" else _masters(opened)
    untrained = untrained_tensors(model, shape)
    tensors = {**{name: readable[name] for name in hf_tensors(shape)}, **untrained}
    in_fp8 = _in_fp8(shape) if quantize == "fp8-block" else set()
    to_bf16 = dtype == "bf16" or bool(in_fp8)
    kept = kept_in_float32(shape) | untrained.keys()
    types = {n: "BF16" if to_bf16 and n not in kept else t.weight_type for n, t in tensors.items()}
    kinds = {types[name] for name in types.keys() - kept}
    types |= dict.fromkeys(in_fp8, FP8)
    wanted = {name: (types[name], tensor.shape) for name, tensor in tensors.items()}
    stored = _as_written(wanted, model, shape)
    weight_map = None if shard_bytes is not None else _weight_map(model, stored, in_fp8)
    if shape.tied and OUTPUT in (weight_map or ()):
        embedding = embedding_name(shape)
        tensors[OUTPUT], wanted[OUTPUT] = replace(tensors[embedding], name=OUTPUT), wanted[embedding]
    wanted |= {scale_name(name): ("F32", scale_shape(tensors[name].shape)) for name in in_fp8}
    folder = temporary_folder(output)
    plan = plan_hf_folder(model, folder, wanted, kinds, shard_bytes or _MOST_SHARD_BYTES, weight_map)
    if in_fp8:
        config = folder / _CONFIG
        plan.last[config] = with_fp8(plan.last[config], modules_in_bfloat16(tensors, in_fp8))
    return convert(source, tensors, plan, output, settings)


def plan_hf_folder(
    model: Path,
    folder: Path,
    tensors: Planned,
    kinds: Collection[str],
    most_bytes: int,
    weight_map: Mapping[str, str] | None = None,
) -> OutputPlan:
    """Return the plan of a Hugging Face ``folder`` with ``tensors`` and everything in ``model`` but its
    weights.

    ``kinds``: types of the weights before quantization, for config.json. Others: see ``plan_safetensors``.
    """
    index = read_file_inside(model, INDEX) if (model / INDEX).is_file() else None
    written = _as_written(tensors, model, read_model_shape(model))
    plan = plan_safetensors(written, folder, most_bytes, weight_map, index)
    files = carried_files(model)
    config = files.pop(_CONFIG).read_bytes()
    plan.copied = {folder / name: path for name, path in files.items()}
    plan.last[folder / _CONFIG] = with_dtype(config, {WEIGHT_TYPES[kind] for kind in kinds})
    return plan


def _masters(opened: OpenedCheckpoint) -> dict[str, BlockTensor]:
    if not isinstance(opened.content, TorchDist):
        raise ConfigError(
            f"{opened.location.folder} is of format {opened.location.format}, whose optimizer is not read; "
            "leave out --from optimizer"
        )
    return opened.content.optimizer_tensors("param")


def _in_fp8(shape: ModelShape) -> set[str]:
    """Return the names of the matrices to quantize. Raises ConfigError if there are none."""
    if names := quantized_names(hf_tensors(shape)):
        return names
    raise ConfigError(
        f"--quantize fp8-block: no matrix of this model (hidden {shape.hidden}) has sides that are multiples "
        f"of {BLOCK}, or below it; leave the flag out"
    )


def _as_written(tensors: Planned, model: Path, shape: ModelShape) -> Planned:
    """Return the folder's tensors, with experts fused or apart as in the model folder where the family allows
    both; apart in fp8."""
    form = FAMILIES[shape.family].experts
    if form == "apart" or any(dtype == FP8 for dtype, _ in tensors.values()):
        return tensors
    fuses = form == "fused"
    if any((model / name).is_file() for name in (INDEX, SINGLE)):
        names = read_weight_map(model) or [tensor.name for tensor in read_safetensors(model / SINGLE)]
        fuses = any(map(is_fused_experts, names))
    return with_fused_experts(tensors) if fuses else tensors


def _weight_map(model: Path, tensors: Iterable[str], in_fp8: Iterable[str]) -> dict[str, str] | None:
    """Return each tensor's safetensors file in the reference folder; missing scales go with their weights.
    None if the folder has no weights, or has fused experts that are written one by one."""
    if (model / INDEX).is_file():
        stored = read_weight_map(model) or {}
        if not set(tensors) <= set(stored):
            return None
        scales = {scale_name(name): stored.get(scale_name(name), stored[name]) for name in in_fp8}
        return {name: file for name, file in stored.items() if not weight_of_scale(name)} | scales
    names = [*tensors, *map(scale_name, in_fp8)]
    return dict.fromkeys(names, SINGLE) if (model / SINGLE).is_file() else None
