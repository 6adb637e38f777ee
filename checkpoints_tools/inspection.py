"""Checkpoint inspection: format, the parallel layout that wrote it, model, optimizer, sizes, and keys.

``inspect_checkpoint`` returns an ``Inspection``; ``as_text`` formats it for `bapo-ckpt inspect`. Reads only
metadata, no weights, so it is fast and cannot find damaged weights; `bapo-ckpt verify` can.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.blocks import ITEM_BYTES
from bapo_megatron.hf.config import read_model_shape
from bapo_megatron.hf.families import FAMILIES
from bapo_megatron.hf.parameter_map import hf_tensors
from bapo_megatron.hf.safetensors_folder import read_safetensors_folder
from bapo_megatron.runtime.text_table import text_table
from checkpoints_tools.archives.pickle_allow_list import DTYPE_BYTES, PickledObject
from checkpoints_tools.core.progress import format_bytes
from checkpoints_tools.formats.distcp import GlobalTensor, read_common, read_metadata
from checkpoints_tools.formats.locate import LATEST, Format, Location, hf_reference, locate
from checkpoints_tools.formats.mp_rank import RankFiles
from checkpoints_tools.formats.torch_dist import find_prefix, layers_layout, optimizer_format

OBJECT = "object"
"""dtype of a key that is not a tensor."""

# A layer, an object's place on its grid, an optimizer state.
_MEMBER = re.compile(r"(?<=\.)\d+(?=\.)|(?<=/shard_)\d+|(?<=optimizer\.state\.)[a-z0-9_]+")
# Parallel layout: fields of Megatron's arguments, and short names.
_PARALLEL = {
    "tensor": ("tensor_model_parallel_size", "TP"),
    "pipeline": ("pipeline_model_parallel_size", "PP"),
    "virtual": ("virtual_pipeline_model_parallel_size", "VPP"),
    "context": ("context_parallel_size", "CP"),
    "data": ("data_parallel_size", "DP"),
    "expert": ("expert_model_parallel_size", "EP"),
    "expert_tensor": ("expert_tensor_parallel_size", "ETP"),
    "world": ("world_size", "ranks "),
}


@dataclass(frozen=True)
class KeyGroup:
    """Group of checkpoint keys that differ only in numbers, such as the layer, or in the optimizer state:
    common name, type, shape, number of keys."""

    key: str
    """Common name of the keys, with ``*`` for the differences."""
    dtype: str
    """Element type, or OBJECT."""
    shape: tuple[int, ...]
    count: int
    chunks: int
    """Number of chunks per key."""


@dataclass(frozen=True)
class Inspection:
    """Result of ``inspect_checkpoint``: format, key layout, iteration, parallel layout of the run that wrote
    the checkpoint, model, optimizer, bytes, groups of keys."""

    folder: str
    format: str
    layout: str | None
    """Layer layout: stacked, per_layer, singleton; None for mp_rank folders, whose ``keys`` are shards of all
    tensor ranks, and for a Hugging Face folder."""
    common_state: str | None
    """Location of a torch_dist folder's common state: the file ``common.pt`` or an object's key (from
    megatron-core 0.19 on)."""
    iteration: int | None
    written_at: dict[str, Any]
    """Sizes of the writing run's process groups, and ``pipeline_layers``, layers per model chunk in model
    order; as far as stored."""
    model: dict[str, Any] | None
    """Fields of config.json that shape the model; None if the checkpoint has none."""
    parameters: int
    """Model parameters if known, otherwise elements of the weights on all ranks."""
    dtypes: dict[str, int]
    """Bytes of weights by type."""
    optimizer: str | None
    """Optimizer format; None without one."""
    optimizer_bytes: int
    total_bytes: int
    """Bytes of all files."""
    keys: tuple[KeyGroup, ...]

    def as_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class _Content:
    """What an inspection reads from a checkpoint: weights, optimizer tensors, objects, common state."""

    layout: str | None
    common: Mapping[str, Any]
    weights: tuple[GlobalTensor, ...]
    optimizer: str | None
    optimizer_tensors: tuple[GlobalTensor, ...] = ()
    objects: tuple[str, ...] = ()
    ranks: Mapping[str, int] | None = None
    common_state: str | None = None


def inspect_checkpoint(path: Path, step: str = LATEST, reference: Path | None = None) -> Inspection:
    """Inspect the checkpoint that ``path`` names (``locate.py``). ``reference``: folder of config.json for a
    checkpoint without one. Raises CheckpointError if there is no checkpoint or its metadata is damaged."""
    location = locate(path, step)
    content = _READERS[location.format](location.folder)
    model, parameters = _model(location, reference)
    dtypes: dict[str, int] = {}
    for tensor in content.weights:
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + _nbytes(tensor)
    return Inspection(
        folder=str(location.folder),
        format=str(location.format),
        layout=content.layout,
        common_state=content.common_state,
        iteration=_iteration(location, content.common),
        written_at={**_written_at(content.common), **(content.ranks or {})},
        model=model,
        parameters=parameters or sum(prod(tensor.shape) for tensor in content.weights),
        dtypes=dtypes,
        optimizer=content.optimizer,
        optimizer_bytes=sum(_nbytes(tensor) for tensor in content.optimizer_tensors),
        total_bytes=sum(file.stat().st_size for file in location.folder.rglob("*") if file.is_file()),
        keys=tuple(_groups((*content.weights, *content.optimizer_tensors), content.objects)),
    )


def _nbytes(tensor: GlobalTensor) -> int:
    return prod(tensor.shape) * {**DTYPE_BYTES, **ITEM_BYTES}.get(tensor.dtype, 0)


def _read_torch_dist(folder: Path) -> _Content:
    metadata = read_metadata(folder)
    stored = read_common(folder, metadata)
    common = stored.content
    tensors = metadata.tensors.values()
    state = tuple(tensor for tensor in tensors if tensor.key.startswith("optimizer."))
    weights = tuple(tensor for tensor in tensors if not tensor.key.startswith("optimizer."))
    layout = layers_layout(metadata, find_prefix(metadata, folder))
    kind = optimizer_format(metadata, common)
    return _Content(
        layout,
        common,
        weights,
        kind,
        optimizer_tensors=state,
        objects=tuple(metadata.objects),
        common_state=stored.layout,
    )


def _read_mp_rank(folder: Path) -> _Content:
    files = RankFiles(folder)
    weights: list[GlobalTensor] = []
    for tensor, virtual, pipeline in product(*map(range, (files.tensor, files.virtual, files.pipeline))):
        chunk, stage = files.chunk(tensor, pipeline, virtual), pipeline + virtual * files.pipeline
        weights += [
            GlobalTensor(f"stage {stage}: {key}", t.dtype, t.shape, ()) for key, t in chunk.parameters.items()
        ]
    ranks = {"tensor": files.tensor, "pipeline": files.pipeline, "virtual": files.virtual}
    kind = "mp_rank" if files.has_optimizer else None
    return _Content(None, files.common, tuple(weights), kind, ranks=ranks)


def _read_hf(folder: Path) -> _Content:
    tensors = read_safetensors_folder(folder)
    scales = (tensor.scales for tensor in tensors.values() if tensor.scales is not None)
    stored = {**tensors, **{scale.name: scale for scale in scales}}
    weights = tuple(GlobalTensor(name, t.dtype, t.shape, ()) for name, t in stored.items())
    return _Content(None, {}, weights, None)


_READERS = {Format.TORCH_DIST: _read_torch_dist, Format.MP_RANK: _read_mp_rank, Format.HF: _read_hf}


def _model(location: Location, reference: Path | None) -> tuple[dict[str, Any] | None, int | None]:
    """Return the model's shape and number of parameters; (None, None) without a config.json."""
    try:
        folder = hf_reference(location, reference)
    except CheckpointError:
        return None, None
    shape = read_model_shape(folder)
    sizes = asdict(shape)
    del sizes["blocks"], sizes["pattern"]
    sizes |= {"layers": shape.layers, **asdict(shape.attention)}
    sizes["experts"] = asdict(shape.experts) if shape.experts else None
    model = {"name": FAMILIES[shape.family].title, "config": str(folder), **sizes}
    return model, sum(prod(tensor) for tensor in hf_tensors(shape).values())


def _iteration(location: Location, common: Mapping[str, Any]) -> int | None:
    stored = common.get("iteration")
    return location.iteration if location.iteration is not None or type(stored) is not int else stored


def _written_at(common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parallel layout that wrote the checkpoint, from our metadata or Megatron-LM's arguments."""
    arguments, ours = common.get("args"), common.get("written_at")
    layout: dict[str, Any] = {}
    if isinstance(ours, dict):
        layout = {name: ours.get(name) for name in _PARALLEL}
    elif isinstance(arguments, PickledObject):
        layout = {name: arguments.field(field) for name, (field, _) in _PARALLEL.items()}
    known: dict[str, Any] = {name: value for name, value in layout.items() if type(value) is int}
    layers = ours.get("pipeline_layers") if isinstance(ours, dict) else None
    if isinstance(layers, list) and all(type(count) is int for count in layers):
        known["pipeline_layers"] = layers
    return known


def _groups(tensors: Iterable[GlobalTensor], objects: Iterable[str]) -> list[KeyGroup]:
    counts: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for tensor in tensors:
        entry = counts.setdefault((_MEMBER.sub("*", tensor.key), tensor.dtype, tensor.shape), [0, 1])
        entry[0] += 1
        entry[1] = max(entry[1], len(tensor.chunks))
    for key in objects:
        counts.setdefault((_MEMBER.sub("*", key), OBJECT, ()), [0, 1])[0] += 1
    return [KeyGroup(*group, count, chunks) for group, (count, chunks) in sorted(counts.items())]


def as_text(inspection: Inspection) -> str:
    """Return the inspection as text: facts, one per line, then the keys."""
    keys = [f"  {group.key}  {_what(group)}" for group in inspection.keys]
    return "\n".join([*text_table(list(_facts(inspection))), "keys", *keys])


def _facts(inspection: Inspection) -> Iterator[tuple[str, str]]:
    yield "checkpoint", inspection.folder
    yield "format", inspection.format + (f", {inspection.layout}" if inspection.layout else "")
    if inspection.common_state is not None:
        yield "common state", inspection.common_state
    if inspection.iteration is not None:
        yield "iteration", str(inspection.iteration)
    if inspection.written_at:
        yield "written at", _layout_text(inspection.written_at)
    yield "model", _model_text(inspection)
    yield "parameters", f"{inspection.parameters:,}"
    yield "weights", ", ".join(f"{dtype} {format_bytes(size)}" for dtype, size in inspection.dtypes.items())
    size = f", {format_bytes(inspection.optimizer_bytes)}" if inspection.optimizer_bytes else ""
    yield "optimizer", f"{inspection.optimizer or 'none'}{size}"
    yield "on disk", format_bytes(inspection.total_bytes)


def _layout_text(written_at: Mapping[str, Any]) -> str:
    """Return the layout in a line; that of experts only if they are split."""
    return " ".join(
        f"{_PARALLEL[name][1]}{size}"
        for name, size in written_at.items()
        if name in _PARALLEL and (size > 1 or not name.startswith("expert"))
    )


def _model_text(inspection: Inspection) -> str:
    if inspection.model is None:
        return "unknown: the checkpoint carries no config.json; --hf-reference names one"
    model = inspection.model
    experts, tied = model["experts"], "tied" if model["tied"] else "untied"
    mlp = f"MLP {model['ffn']}"
    if experts:
        mlp = f"{experts['count']} experts of {experts['ffn']}, {experts['per_token']} for each token"
    return (
        f"{model['name']}: {model['layers']} layers, hidden {model['hidden']}, {model['heads']} heads of "
        f"{model['head_dim']} on {model['kv_heads']} KV groups, {mlp}, vocabulary {model['vocab']:,}, "
        f"{tied} embeddings"
    )


def _what(group: KeyGroup) -> str:
    what = f"{group.dtype} {list(group.shape)}" if group.dtype != OBJECT else OBJECT
    times = f" x {group.count}" if group.count > 1 else ""
    return what + times + (f", {group.chunks} chunks" if group.chunks > 1 else "")
