"""The conversion of a Megatron checkpoint to a Hugging Face folder that transformers and engines load."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.parameter_map import hf_tensors
from checkpoints_tools.carried import carried_files
from checkpoints_tools.conversion import DEFAULTS, Conversion, Settings, convert
from checkpoints_tools.core.atomic_output import check_output, temporary_folder
from checkpoints_tools.core.blocks import BlockTensor
from checkpoints_tools.formats.locate import LATEST, Format
from checkpoints_tools.formats.opening import OpenedCheckpoint, open_checkpoint
from checkpoints_tools.formats.safetensors_folder import INDEX, SINGLE, read_weight_map
from checkpoints_tools.formats.safetensors_writer import Sharding, plan_safetensors
from checkpoints_tools.formats.torch_dist import TorchDist

Origin = Literal["model", "optimizer"]
MOST_SHARD_BYTES = 5_000_000_000
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_CONFIG = "config.json"
_TORCH_TYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def to_hf(
    checkpoint: Path,
    output: Path,
    reference: Path | None = None,
    dtype: Literal["bf16"] | None = None,
    origin: Origin = "model",
    step: str = LATEST,
    shard_bytes: int | None = None,
    settings: Settings = DEFAULTS,
) -> Conversion:
    """Write ``output``: safetensors with config, tokenizer and chat templates as they once came.

    ``checkpoint`` is any path that ``locate.py`` understands, ``step`` one of several in it. ``reference`` is
    a Hugging Face folder of the model, for a checkpoint that carries none; its division into files is kept,
    unless ``shard_bytes`` gives the most bytes of one. ``origin`` "optimizer" takes its fp32 weights instead
    of the model's. ``dtype`` rounds to it; without it every bit stays. ConfigError and CheckpointError
    before anything is written, but for a disk that fills up.
    """
    settings.check()
    opened = open_checkpoint(checkpoint, step, reference)
    source, model, shape = opened.location.folder, opened.reference, opened.shape
    if opened.location.format is Format.HF:
        raise ConfigError(f"{source} is a Hugging Face folder already")
    output = check_output(output, settings.overwrite, [source, model])
    found = opened.tensors if origin == "model" else _masters(opened)
    tensors = {name: found[name] for name in hf_tensors(shape)}
    weight_map = None if shard_bytes is not None else _weight_map(model, tensors)
    if shape.tied and _OUTPUT in (weight_map or ()):
        tensors[_OUTPUT] = replace(tensors[_EMBEDDING], name=_OUTPUT)
    types = {name: "BF16" if dtype == "bf16" else tensor.dtype for name, tensor in tensors.items()}
    wanted = {name: (types[name], tensor.shape) for name, tensor in tensors.items()}
    folder = temporary_folder(output)
    sharding = Sharding(shard_bytes or MOST_SHARD_BYTES, weight_map, _index(model))
    plan = plan_safetensors(wanted, folder, sharding)
    files = carried_files(model)
    config = files.pop(_CONFIG).read_bytes()
    plan.copied = {folder / name: path for name, path in files.items()}
    changed = dtype is not None or origin == "optimizer"
    plan.last[folder / _CONFIG] = _with_type(config, set(types.values())) if changed else config
    return convert(source, tensors, plan, output, settings)


def _masters(opened: OpenedCheckpoint) -> dict[str, BlockTensor]:
    """The optimizer's fp32 weights."""
    if not isinstance(opened.content, TorchDist):
        raise ConfigError(
            f"{opened.location.folder} is of format {opened.location.format}, whose optimizer is not read; "
            "leave out --from optimizer"
        )
    return opened.content.optimizer_tensors("param")


def _weight_map(model: Path, tensors: Iterable[str]) -> dict[str, str] | None:
    """The file of each tensor in the model's own folder; None where it says nothing of files."""
    if (model / INDEX).is_file():
        return read_weight_map(model)
    return dict.fromkeys(tensors, SINGLE) if (model / SINGLE).is_file() else None


def _index(model: Path) -> bytes | None:
    return (model / INDEX).read_bytes() if (model / INDEX).is_file() else None


def _with_type(config: bytes, types: Collection[str]) -> bytes:
    """config.json, changed only in what it says of the weights' type, if that is one for all."""
    if len(types) != 1:
        return config
    name = _TORCH_TYPES[next(iter(types))]
    return re.sub(rb'("(?:torch_)?dtype"\s*:\s*)"\w+"', rb'\1"' + name.encode() + rb'"', config)
