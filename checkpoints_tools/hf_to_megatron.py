"""Conversions to torch_dist, megatron-core's format: from a Hugging Face folder, or a checkpoint (reshard).

``to_megatron`` and ``reshard`` return a ``Conversion``; the output appears whole or not at all. A resharded
checkpoint has another grid of chunks or vocabulary padding, and one key per parameter for all layers if these
are of one kind. The trainer loads torch_dist at any parallel layout without a reshard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bapo_megatron.errors import CheckpointError, ConfigError
from bapo_megatron.hf.blocks import BlockTensor
from bapo_megatron.hf.config import ModelShape, problems_of, read_model_shape
from bapo_megatron.hf.parameter_map import embedding_name, hf_tensors, tensor_problems
from bapo_megatron.hf.safetensors_folder import read_safetensors_folder
from bapo_megatron.runtime.written_folders import temporary_folder
from checkpoints_tools.archives.pickle_allow_list import PickledObject
from checkpoints_tools.archives.torch_archive import Call, Instance, Name, object_archive
from checkpoints_tools.conversion import DEFAULTS, Conversion, Settings, carried_beside, convert
from checkpoints_tools.core.atomic_output import OutputPlan, check_output
from checkpoints_tools.formats.distcp import COMMON_OBJECT, ChunkFiles
from checkpoints_tools.formats.locate import LATEST, TRACKER, OpenedCheckpoint, open_checkpoint
from checkpoints_tools.formats.mp_rank import MpRank
from checkpoints_tools.formats.safetensors_folder import (
    UNTRAINED,
    plan_safetensors,
    untrained_tensors,
    without_tied_copy,
)
from checkpoints_tools.formats.torch_dist import OPTIMIZER, OPTIMIZER_STATES, RESHARDABLE, TorchDist
from checkpoints_tools.formats.torch_dist_writer import Contents, plan_torch_dist

# Megatron-LM's name for weights that none of its training runs saved; it then requires no optimizer.
_RELEASE = "release"
_CONTENT = "content_metadata"
_LAYERS_APART = "non_homogeneous_layers"


def to_megatron(hf_folder: Path, output: Path, grid: int = 8, settings: Settings = DEFAULTS) -> Conversion:
    """Write ``output/release/`` in torch_dist and its tracker file; return the result.

    ``grid``: number of pieces of a matrix, the largest TP at which a rank reads only its part. Config,
    tokenizer and untrained tensors are copied to ``release/hf``. Raises ConfigError and CheckpointError
    before writing anything, except if the disk fills up.
    """
    output = check_output(output, settings.overwrite, [hf_folder])
    shape = read_model_shape(hf_folder)
    tensors = _model_tensors(hf_folder, shape)
    root = temporary_folder(output)
    folder = root / _RELEASE
    plan = plan_torch_dist(tensors, shape, folder, grid, Contents(_new_common(shape)))
    plan.copied = carried_beside(hf_folder, folder)
    tensors |= _carry_untrained(plan, hf_folder, shape, folder)
    plan.last = {root / TRACKER: _RELEASE.encode(), **plan.last}
    return convert(hf_folder, tensors, plan, output, settings)


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
    optimizer is resharded, too, unless ``weights_only``. Raises ConfigError before writing anything for an
    optimizer that cannot be converted, CheckpointError for a damaged source.
    """
    source = open_checkpoint(checkpoint, step, reference)
    output = check_output(output, settings.overwrite, [source.location.folder, source.reference])
    _check_source(source, weights_only)
    iteration = source.location.iteration
    name = _RELEASE if iteration is None else f"iter_{iteration:07d}"
    root = temporary_folder(output)
    tensors = {name: source.tensors[name] for name in hf_tensors(source.shape)}
    if vocabulary_multiple is not None and vocabulary_multiple < 1:
        raise ConfigError(f"--vocab-multiple {vocabulary_multiple}: give a number of at least 1")
    padded = -(-source.shape.vocab // (vocabulary_multiple or 1)) * (vocabulary_multiple or 1)
    contents = replace(_contents(source, weights_only), vocabulary_rows=padded)
    if contents.states:
        tensors |= _optimizer_tensors(source)
    plan = plan_torch_dist(tensors, source.shape, root / name, grid, contents)
    plan.copied = carried_beside(source.reference, root / name)
    tensors |= _carry_untrained(plan, source.reference, source.shape, root / name)
    plan.last = {root / TRACKER: (_RELEASE if iteration is None else str(iteration)).encode(), **plan.last}
    return convert(source.location.folder, tensors, plan, output, settings)


def _check_source(source: OpenedCheckpoint, weights_only: bool) -> None:
    """Raise ConfigError for an optimizer that would be lost, or a source for another command."""
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
    """Return contents besides the weights: a torch_dist source's, or, for weights only, a new common
    state."""
    content = source.content
    if weights_only or not isinstance(content, TorchDist):
        return Contents(_new_common(source.shape, source.location.iteration or 0))
    # Layers' own states have the layers' keys, so they fit only if these stay the same.
    same_keys = _has_our_keys(content) and not content.prefix
    with ChunkFiles() as files:
        objects = {
            key: files.read(place)
            for key, place in content.metadata.objects.items()
            if key != COMMON_OBJECT and (same_keys or "._extra_state" not in key)
        }
    states = tuple(f"{OPTIMIZER}{state}." for state in OPTIMIZER_STATES) if source.has_whole_optimizer else ()
    layout = content.common.layout
    return Contents(common_for_stacked(content), states, objects, common_layout=layout)


def _optimizer_tensors(source: OpenedCheckpoint) -> dict[str, BlockTensor]:
    """Return the optimizer's state, each tensor named by its state's prefix and its weight."""
    return {
        f"{OPTIMIZER}{state}.{name}": replace(tensor, name=f"{OPTIMIZER}{state}.{name}")
        for state, tensors in source.optimizer().items()
        for name, tensor in tensors.items()
    }


def common_for_stacked(source: TorchDist) -> bytes:
    """Return the common state of the resharded checkpoint: the source's bytes if the layout of the layers'
    keys stays. Raises CheckpointError for an object that the pickle writer does not support."""
    common = source.common
    if _has_our_keys(source):
        with common.place.file.open("rb") as file:
            file.seek(common.place.start)
            return file.read(common.place.length)
    content = common.content.get(_CONTENT)
    kept = content if isinstance(content, dict) else {}
    others = {name: value for name, value in kept.items() if name != _LAYERS_APART}
    changed = {**others, **_rules(source.shape)}
    try:
        state = _as_written({**common.content, _CONTENT: changed})
        return object_archive([state] if common.layout == COMMON_OBJECT else state)
    except (TypeError, CheckpointError) as error:
        raise CheckpointError(
            f"{common.place.file}: the common state cannot be written anew ({error}); --weights-only leaves "
            "it behind"
        ) from None


def _has_our_keys(source: TorchDist) -> bool:
    """Whether the source's layer layout is the one to be written."""
    return source.layout == ("stacked" if source.shape.is_uniform else "per_layer")


def _rules(shape: ModelShape) -> dict[str, bool]:
    """Return the rules of our keys, which megatron-core reads from the common state."""
    rules = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    return rules if shape.is_uniform else {**rules, _LAYERS_APART: True}


def _as_written(value: Any) -> Any:
    """Convert a value of the pickle reader for the pickle writer. Raises CheckpointError if impossible."""
    if isinstance(value, dict):
        return {key: _as_written(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_as_written(inner) for inner in value)
    if not isinstance(value, PickledObject):
        return value
    module, _, name = value.class_name.rpartition(".")
    if not value.arguments:
        return Instance(Name(module, name), _as_written(value.state))
    if value.state is not None:
        raise CheckpointError(f"it holds an object of {value.class_name}")
    return Call(Name(module, name), _as_written(value.arguments))


def _carry_untrained(
    plan: OutputPlan, reference: Path, shape: ModelShape, folder: Path
) -> dict[str, BlockTensor]:
    """Plan a file in ``folder/hf`` of the untrained tensors; return them."""
    untrained = untrained_tensors(reference, shape)
    if untrained:
        files = dict.fromkeys(untrained, UNTRAINED)
        planned = {name: (tensor.weight_type, tensor.shape) for name, tensor in untrained.items()}
        own = plan_safetensors(planned, folder / "hf", 0, files)
        plan.tensors |= own.tensors
        plan.sizes |= own.sizes
        plan.around |= own.around
    return untrained


def _model_tensors(folder: Path, shape: ModelShape) -> dict[str, BlockTensor]:
    """Return a Hugging Face folder's tensors. Raises CheckpointError for missing, unknown or misshapen ones,
    and for a tied model's output layer that differs from the embedding; an equal copy is dropped."""
    tensors = read_safetensors_folder(folder)
    if problems := tensor_problems({name: tensor.shape for name, tensor in tensors.items()}, shape):
        raise CheckpointError(problems_of(folder, problems))
    if shape.tied:
        tensors = without_tied_copy(tensors, folder, embedding_name(shape))
    return {name: tensors[name] for name in hf_tensors(shape)}


def _new_common(shape: ModelShape, iteration: int = 0) -> bytes:
    namespace = Instance(Name("argparse", "Namespace"), arguments(shape))
    return object_archive(
        {"checkpoint_version": 3.0, "iteration": iteration, _CONTENT: _rules(shape), "args": namespace}
    )


def arguments(shape: ModelShape) -> Mapping[str, Any]:
    """Return a model's Megatron-LM arguments, which Megatron-LM reads from a checkpoint or compares."""
    return {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        **{name: value for kind in shape.kinds for name, value in kind.arguments().items()},
        "add_bias_linear": False,
        "swiglu": True,
        "normalization": "RMSNorm",
        "norm_epsilon": shape.norm_eps,
        "max_position_embeddings": shape.max_positions,
        "position_embedding_type": "rope",
        "rotary_base": int(shape.rope_theta),
        "use_rope_scaling": shape.rope_scaling is not None,
        "rope_scaling_factor": shape.rope_scaling or 8.0,
        "untie_embeddings_and_output_weights": not shape.tied,
        "padded_vocab_size": shape.vocab,
        "consumed_train_samples": 0,
        "no_save_optim": True,
        "no_save_rng": True,
    }
