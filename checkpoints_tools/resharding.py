"""Reshard: a Megatron checkpoint rewritten as torch_dist, with another grid of chunks or vocabulary padding.

Its common state (``common.pt``) is the source's, for stacked keys: all layers of a parameter under one. The
trainer loads torch_dist at any parallel layout as it is: that needs no reshard. Used by
``checkpoints_tools/`` and ``commands.py``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bapo_megatron.errors import CheckpointError, ConfigError
from bapo_megatron.hf.parameter_map import hf_tensors
from bapo_megatron.runtime.files import read_file_inside
from checkpoints_tools.archives.pickle_allow_list import PickledObject
from checkpoints_tools.archives.pickle_writer import Call, Instance, Name
from checkpoints_tools.archives.torch_archive import object_archive
from checkpoints_tools.archives.torch_dist_metadata import CONTENT, common
from checkpoints_tools.archives.torch_zip import StoredTensor
from checkpoints_tools.carried import carried_beside
from checkpoints_tools.conversion import DEFAULTS, Conversion, Settings, convert
from checkpoints_tools.core.atomic_output import check_output, temporary_folder
from checkpoints_tools.core.blocks import BlockTensor
from checkpoints_tools.formats.distcp import ChunkFiles
from checkpoints_tools.formats.locate import LATEST, TRACKER
from checkpoints_tools.formats.mp_rank import MpRank
from checkpoints_tools.formats.opening import OpenedCheckpoint, open_checkpoint
from checkpoints_tools.formats.torch_dist import OPTIMIZER, OPTIMIZER_STATES, RESHARDABLE, TorchDist
from checkpoints_tools.formats.torch_dist_writer import Contents, plan_torch_dist
from checkpoints_tools.to_megatron import RELEASE, arguments

_COMMON = "common.pt"
_CONTENT = "content_metadata"


def common_for_stacked(source: TorchDist) -> bytes:
    """``common.pt`` of the resharded checkpoint; the source's bytes, if its keys are stacked already.

    CheckpointError for an object that the pickle writer cannot write.
    """
    path = source.folder / _COMMON
    if source.layout == "stacked":
        return read_file_inside(source.folder, _COMMON)
    content = source.common.get(_CONTENT)
    kept = content if isinstance(content, dict) else {}
    changed = {**kept, **CONTENT}
    changed.pop("non_homogeneous_layers", None)
    try:
        return object_archive(_as_written({**source.common, _CONTENT: changed}))
    except (TypeError, CheckpointError) as error:
        raise CheckpointError(
            f"{path} cannot be written anew ({error}); --weights-only leaves it behind"
        ) from None


def _as_written(value: Any) -> Any:
    """A value of the pickle reader as objects of the pickle writer. CheckpointError if there are none."""
    if isinstance(value, dict):
        return {key: _as_written(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_as_written(inner) for inner in value)
    if isinstance(value, StoredTensor):
        raise CheckpointError("it holds a tensor")
    if not isinstance(value, PickledObject):
        return value
    module, _, name = value.class_name.rpartition(".")
    if not value.arguments:
        return Instance(Name(module, name), _as_written(value.state))
    if value.state is not None:
        raise CheckpointError(f"it holds an object of {value.class_name}")
    return Call(Name(module, name), _as_written(value.arguments))


def reshard(
    checkpoint: Path,
    output: Path,
    grid: int = 8,
    vocabulary_multiple: int | None = None,
    weights_only: bool = False,
    reference: Path | None = None,
    step: str = LATEST,
    settings: Settings = DEFAULTS,
) -> Conversion:
    """Write ``output`` with a folder ``iter_XXXXXXX`` (``release`` without an iteration) and its tracker.

    ``grid``: pieces of each matrix. The vocabulary is padded to a multiple of ``vocabulary_multiple``. The
    optimizer is resharded, too, unless ``weights_only``. ConfigError, before anything is written, for an
    optimizer that cannot be converted, and CheckpointError for a damaged source.
    """
    settings.check()
    _check(grid, vocabulary_multiple)
    source = open_checkpoint(checkpoint, step, reference)
    output = check_output(output, settings.overwrite, [source.location.folder, source.reference])
    _check_source(source, weights_only)
    iteration = source.location.iteration
    name = RELEASE if iteration is None else f"iter_{iteration:07d}"
    root = temporary_folder(output)
    tensors = {name: source.tensors[name] for name in hf_tensors(source.shape)}
    contents = _contents(source, weights_only)
    contents = replace(contents, vocabulary_rows=_padded(source.shape.vocab, vocabulary_multiple or 1))
    if contents.states:
        tensors |= _optimizer_tensors(source)
    plan = plan_torch_dist(tensors, source.shape, root / name, grid, contents)
    plan.copied = carried_beside(source.reference, root / name)
    plan.last = {root / TRACKER: (RELEASE if iteration is None else str(iteration)).encode(), **plan.last}
    return convert(source.location.folder, tensors, plan, output, settings)


def _check(grid: int, multiple: int | None) -> None:
    if not 1 <= grid <= 1024:
        raise ConfigError(f"--grid {grid}: give a number from 1 to 1024; 8 serves TP1 to TP8")
    if multiple is not None and multiple < 1:
        raise ConfigError(f"--vocab-multiple {multiple}: give a number above 0")


def _check_source(source: OpenedCheckpoint, weights_only: bool) -> None:
    """ConfigError for an optimizer that would be lost, and for what another command does."""
    content, folder = source.content, source.location.folder
    if content is None:
        raise ConfigError(f"{folder} is a Hugging Face folder; bapo-ckpt to-megatron makes torch_dist of it")
    if weights_only:
        return
    without = "--weights-only converts the weights and leaves the optimizer behind"
    if isinstance(content, MpRank) and content.files.has_optimizer:
        raise ConfigError(f"{folder}: the optimizer of mp_rank folders is not converted; {without}")
    saved_as = content.optimizer_format if isinstance(content, TorchDist) else None
    if saved_as is not None and not source.has_whole_optimizer:
        raise ConfigError(
            f"{folder}: its optimizer has the format {saved_as}, which only continues at "
            f"the layout it was saved with. Load it there and save it as {RESHARDABLE}, or: {without}"
        )


def _contents(source: OpenedCheckpoint, weights_only: bool) -> Contents:
    """Contents besides the weights: all that a torch_dist source has, or what a new checkpoint needs."""
    content = source.content
    if weights_only or not isinstance(content, TorchDist):
        return Contents(common(arguments(source.shape), source.location.iteration or 0))
    # Layers' own states have keys as the layers have, so they fit only where these stay the same.
    same_keys = content.layout == "stacked" and not content.prefix
    with ChunkFiles() as files:
        objects = {
            key: files.read(place)
            for key, place in content.metadata.objects.items()
            if same_keys or "._extra_state" not in key
        }
    states = tuple(f"{OPTIMIZER}{state}." for state in OPTIMIZER_STATES) if source.has_whole_optimizer else ()
    return Contents(common_for_stacked(content), states, objects)


def _optimizer_tensors(source: OpenedCheckpoint) -> dict[str, BlockTensor]:
    """The optimizer's state, each tensor named by its key's prefix and by the weight that it is of."""
    return {
        f"{OPTIMIZER}{state}.{name}": replace(tensor, name=f"{OPTIMIZER}{state}.{name}")
        for state, tensors in source.optimizer().items()
        for name, tensor in tensors.items()
    }


def _padded(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple
