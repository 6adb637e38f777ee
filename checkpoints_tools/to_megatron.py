"""HF-to-Megatron conversion: a Hugging Face folder as a torch_dist checkpoint that loads at any layout.

``bapo-ckpt to-megatron``. The output appears whole or not at all. Used by ``checkpoints_tools/``,
``commands.py`` and ``resharding.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bapo_megatron.errors import CheckpointError, ConfigError
from bapo_megatron.hf.config import ModelShape, read_model_shape
from bapo_megatron.hf.parameter_map import hf_tensors
from checkpoints_tools.archives.torch_dist_metadata import common
from checkpoints_tools.carried import carried_beside
from checkpoints_tools.conversion import DEFAULTS, Conversion, Settings, convert
from checkpoints_tools.core.atomic_output import check_output, temporary_folder
from checkpoints_tools.core.blocks import BlockTensor
from checkpoints_tools.formats.locate import TRACKER
from checkpoints_tools.formats.safetensors_folder import read_safetensors_folder, without_tied_copy
from checkpoints_tools.formats.torch_dist_writer import Contents, plan_torch_dist

# Megatron-LM's name for weights that no training run of its own has saved: it then asks for no optimizer.
RELEASE = "release"
_SHOWN = 8


def to_megatron(hf_folder: Path, output: Path, grid: int = 8, settings: Settings = DEFAULTS) -> Conversion:
    """Write ``output/release/`` in torch_dist and the tracker file that names it.

    ``grid`` is the number of pieces into which a matrix is cut, so that a TP rank need not read all of it:
    the largest TP that will load the checkpoint. Config and tokenizer go along, in ``release/hf``.
    ConfigError and CheckpointError before anything is written, but for a disk that fills up.
    """
    settings.check()
    if not 1 <= grid <= 1024:
        raise ConfigError(f"--grid {grid}: give a number from 1 to 1024; 8 serves TP1 to TP8")
    output = check_output(output, settings.overwrite, [hf_folder])
    shape = read_model_shape(hf_folder)
    tensors = model_tensors(hf_folder, shape)
    root = temporary_folder(output)
    folder = root / RELEASE
    plan = plan_torch_dist(tensors, shape, folder, grid, Contents(common(arguments(shape))))
    plan.copied = carried_beside(hf_folder, folder)
    plan.last = {root / TRACKER: RELEASE.encode(), **plan.last}
    return convert(hf_folder, tensors, plan, output, settings)


def model_tensors(folder: Path, shape: ModelShape) -> dict[str, BlockTensor]:
    """The tensors of a Hugging Face folder. CheckpointError names missing, unknown and misshapen ones.

    Tied models are often stored with a copy of the embedding as the output layer: an equal copy is left out,
    an unequal one is refused.
    """
    found = read_safetensors_folder(folder)
    expected = hf_tensors(shape)
    known = {*expected, "lm_head.weight"} if shape.tied else {*expected}
    problems = [f"tensor {name} is missing" for name in expected if name not in found]
    problems += [f"tensor {name} is not of this model family" for name in found if name not in known]
    problems += [
        f"tensor {name} has shape {list(found[name].shape)}, config.json asks for {list(wanted)}"
        for name, wanted in expected.items()
        if name in found and found[name].shape != wanted
    ]
    if problems:
        more = f"\n... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(f"model folder {folder}:\n" + "\n".join(problems[:_SHOWN]) + more)
    return without_tied_copy(found, folder) if shape.tied else found


def arguments(shape: ModelShape) -> Mapping[str, Any]:
    """Megatron-LM's arguments of a model, which it reads from a checkpoint or compares with its own."""
    return {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "group_query_attention": True,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "qk_layernorm": shape.qk_norm,
        "add_qkv_bias": shape.qkv_bias,
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
        **_expert_arguments(shape),
    }


def _expert_arguments(shape: ModelShape) -> Mapping[str, Any]:
    if shape.experts is None:
        return {}
    return {
        "num_experts": shape.experts.count,
        "moe_ffn_hidden_size": shape.experts.ffn,
        "moe_router_topk": shape.experts.per_token,
        "moe_router_pre_softmax": not shape.experts.normalized,
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": 1,
    }
