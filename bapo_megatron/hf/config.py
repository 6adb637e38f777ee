"""Model shape from config.json, for all families (``families.py``), its FLOPs, and config.json for exports.

``read_model_shape(folder)`` returns a ``ModelShape`` or raises ConfigError for an unsupported model or
setting. ``with_dtype`` and ``for_servers`` edit an export's config.json; ``carried_files``: what it copies.

Forward-pass FLOPs are the basis of `bapo plan`'s speeds and of the cost that balances packs. They count
matrix products (Chowdhery et al. 2022, PaLM, appendix B) and causal attention; a multiply-add is two FLOPs. A
backward pass costs twice the forward pass.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapo_megatron.errors import CheckpointError, ConfigError
from bapo_megatron.hf.config_fields import flag, integer, real, table
from bapo_megatron.hf.families import FAMILIES, Family, fields_for_servers, layer_types
from bapo_megatron.hf.fp8 import check_quantization, without_quantization
from bapo_megatron.layers import Block, Kind, size_problems
from bapo_megatron.layers.attention import Attention
from bapo_megatron.layers.mlp import Experts
from bapo_megatron.runtime.files import CHAT_TEMPLATES, check_files_inside, read_file_inside
from bapo_megatron.runtime.written_folders import MARK

# megatron-core takes the factor of Llama 3's RoPE scaling as an argument and hard-codes these three.
_LLAMA3_ROPE = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}

_WEIGHT_FILES = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".ckpt"),
    *(".gguf", ".h5", ".h5.index.json", ".msgpack", ".msgpack.index.json"),
    *(".onnx", ".onnx_data", ".ot", ".npz"),
    "adapter_config.json",  # with peft, transformers would load the model it names
)
"""Endings of weight files in any format: beside other weights they would be the untrained ones."""

_LONGEST_BYTES = 1 << 24
_MOST_LAYERS = 10_000


@dataclass(frozen=True)
class ModelShape:
    """Shape of a decoder with RMSNorm and RoPE: hidden size, vocabulary, positions, RoPE settings, and the
    kinds of every layer (``blocks``, ``pattern``)."""

    family: str
    hidden: int
    ffn: int
    """MLP width from config.json, or an expert's; unused if all layers have experts."""
    vocab: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: float | None
    """Factor of Llama 3's frequency scaling, or None."""
    tied: bool
    blocks: tuple[Block, ...]
    """The distinct layers of the model."""
    pattern: tuple[int, ...]
    """Index of each layer's block."""

    @property
    def layers(self) -> int:
        return len(self.pattern)

    @property
    def body(self) -> str:
        """Prefix of all tensor names except the output layer's."""
        return FAMILIES[self.family].body

    @property
    def untrained(self) -> tuple[str, ...]:
        """Prefixes of untrained tensors in the folder."""
        return FAMILIES[self.family].untrained

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The distinct kinds of its layers."""
        return tuple(dict.fromkeys(kind for block in self.blocks for kind in block.kinds))

    @property
    def is_uniform(self) -> bool:
        """Whether all layers are alike. If so, checkpoints stack them; otherwise each has its own keys."""
        return len(self.blocks) == 1

    def block_of(self, layer: int | None) -> Block:
        """The block of a layer; for None, i.e. a parameter outside the layers, the first block."""
        return self.blocks[self.pattern[layer or 0]]

    def layers_of(self, kind: Kind) -> tuple[int, ...]:
        having = [kind in block.kinds for block in self.blocks]
        return tuple(layer for layer, block in enumerate(self.pattern) if having[block])

    @property
    def attention(self) -> Attention:
        return next(kind for kind in self.kinds if isinstance(kind, Attention))

    @property
    def experts(self) -> Experts | None:
        """The experts of its layers; None for a dense model."""
        return next((kind for kind in self.kinds if isinstance(kind, Experts)), None)


def read_model_shape(folder: Path) -> ModelShape:
    """Read the shape of the model in ``folder``. Raises ConfigError if it is unsupported."""
    check_files_inside(folder)
    path = folder / "config.json"
    try:
        config = json.loads(read_file_inside(folder, path.name, _LONGEST_BYTES))
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise ConfigError(
            f"model.hf_path={folder}: no config.json there; give a Hugging Face model folder"
        ) from None
    except (ValueError, RecursionError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return model_shape(config, source=str(path))


def read_text_config(folder: Path) -> tuple[Family, dict[str, Any]]:
    """Read the family and text-model fields of the model in ``folder``, even of an unsupported family."""
    config = json.loads(read_file_inside(folder, "config.json"))
    family = FAMILIES.get(config.get("model_type"), Family("another"))
    return family, family.text_config(config)


def model_shape(config: dict[str, Any], source: str) -> ModelShape:
    """Parse the shape from a decoded config.json; ``source`` names it in errors."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(f"{name} ({known_family.title})" for name, known_family in FAMILIES.items())
        raise ConfigError(f"{source}: model_type={family!r:.80} is not supported; supported are {known}")
    try:
        config = FAMILIES[family].text_config(config)
        layers = {"layers": integer(config, "num_hidden_layers")}
        _raise_first(size_problems(layers, _MOST_LAYERS), source)
        rope_theta, rope_scaling = _rope(config, source)
        stack = FAMILIES[family].stack(config)
        blocks = tuple(dict.fromkeys(stack))
        shape = ModelShape(
            family=family,
            hidden=integer(config, "hidden_size"),
            ffn=integer(
                config, "intermediate_size" if "intermediate_size" in config else "moe_intermediate_size"
            ),
            vocab=integer(config, "vocab_size"),
            max_positions=integer(config, "max_position_embeddings"),
            norm_eps=real(config, "rms_norm_eps"),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tied=flag(config, "tie_word_embeddings"),
            blocks=blocks,
            pattern=tuple(blocks.index(block) for block in stack),
        )
        _check_counts(shape, source)
        _refuse_variants(config, source)
    except KeyError as error:
        raise ConfigError(f"{source}: field {error.args[0]!r} is missing") from None
    except (TypeError, ValueError, AttributeError, OverflowError, ZeroDivisionError) as error:
        raise ConfigError(f"{source}: {error!s:.200}") from None
    return shape


def with_dtype(config: bytes, dtypes: Collection[str]) -> bytes:
    """config.json with its dtype field set to the weights' dtype, if ``dtypes`` has a single one.

    Sets the existing fields of transformers 4 (``torch_dtype``) and 5 (``dtype``). Removes
    ``quantization_config``: the written weights are not in fp8. Adds the fields that servers need
    (``for_servers``). Only these two change other bytes.
    """
    config = for_servers(without_quantization(config))
    if len(set(dtypes)) != 1:
        return config
    [name] = set(dtypes)
    return re.sub(
        rb'("(?:torch_)?dtype"\s*:\s*)(?:"[\w.]+"|null)',
        lambda match: match[1] + b'"' + name.encode() + b'"',
        config,
    )


def for_servers(config: bytes) -> bytes:
    """config.json with the fields needed by SGLang and omitted by transformers; unchanged if none is missing.
    Also unchanged for a hybrid that SGLang does not serve: ``SglangBackend.check_weights`` rejects it."""
    fields = json.loads(config)
    family = FAMILIES.get(fields.get("model_type"))
    own = fields.get(family.text, {}) if family and family.text else fields
    with suppress(ValueError):
        if missing := fields_for_servers(own):
            own.update(missing)
            return json.dumps(fields, indent=2, sort_keys=True).encode() + b"\n"  # in transformers' format
    return config


def carried_files(folder: Path) -> dict[str, Path]:
    """Files that an export copies from a model folder, by relative path: all but weights, and chat templates.

    Raises CheckpointError for a link out of the folder, and ConfigError for a generation_config.json that
    engines could not read.
    """
    check_files_inside(folder)
    _check_generation_config(folder)
    places = [*folder.iterdir(), *(folder / CHAT_TEMPLATES).glob("*")]
    files = [
        place
        for place in sorted(places)
        if place.is_file() and not place.name.endswith((MARK, *_WEIGHT_FILES))
    ]
    return {path.relative_to(folder).as_posix(): path for path in files}


def _check_generation_config(folder: Path) -> None:
    name = "generation_config.json"
    with suppress(FileNotFoundError):
        try:
            dict(json.loads(read_file_inside(folder, name)))
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{folder / name} cannot be read: {error!s:.200}: mend it, or delete it"
            ) from None


def problems_of(folder: Path, problems: Sequence[str]) -> str:
    """Error message about a model folder, with the first eight of its problems."""
    more = f"\n... and {len(problems) - 8} more" if len(problems) > 8 else ""
    return f"model folder {folder}:\n" + "\n".join(problems[:8]) + more


def _check_counts(shape: ModelShape, source: str) -> None:
    sizes = {field: getattr(shape, field) for field in ("hidden", "ffn", "vocab", "max_positions")}
    _raise_first(size_problems(sizes), source)
    for name, number in {"rms_norm_eps": shape.norm_eps, "rope_theta": shape.rope_theta}.items():
        if not (math.isfinite(number) and number > 0):
            raise ConfigError(f"{source}: {name}={number} cannot be")
    _raise_first((problem for kind in shape.kinds for problem in kind.problems()), source)


def _raise_first(problems: Iterator[str], source: str) -> None:
    if problem := next(problems, None):
        raise ConfigError(f"{source}: {problem}")


def _rope(config: dict[str, Any], source: str) -> tuple[float, float | None]:
    """RoPE's base, and the factor of Llama 3's scaling (or None).

    transformers 5 writes ``rope_parameters``, earlier versions ``rope_theta`` and ``rope_scaling``. If a
    config has both, transformers 5 reads ``rope_scaling`` instead of ``rope_parameters``, transformers 4 only
    the old fields, and other readers the new one. Raises ConfigError unless all agree.
    """
    old, new = (table(config, field) for field in ("rope_scaling", "rope_parameters"))
    base = config.get("rope_theta")
    forms = [{"rope_theta": base, **form} for form in (old, new) if form] or [{"rope_theta": base}]
    if new and base:
        forms.append({**(old or new), "rope_theta": base})
    defaults = {"rope_theta": 10000.0}
    forms = [defaults | {name: value for name, value in form.items() if value is not None} for form in forms]
    forms_read = [(real(form, "rope_theta"), _rope_scaling(form, config, source)) for form in forms]
    if len(set(forms_read)) > 1:
        told = ", ".join(
            f"{field}={config[field]!r:.200}"
            for field in ("rope_theta", "rope_scaling", "rope_parameters")
            if config.get(field)
        )
        raise ConfigError(
            f"{source}: {told} contradict each other, and transformers and engines differ in which they "
            "follow: keep either rope_parameters, or rope_theta and rope_scaling"
        )
    return forms_read[0]


def _rope_scaling(rope: dict[str, Any], config: dict[str, Any], source: str) -> float | None:
    """Factor of Llama 3's scaling in the settings ``rope``, or None. Raises ConfigError for others."""
    if nested := [name for name, value in rope.items() if isinstance(value, dict)]:
        raise ConfigError(f"{source}: RoPE settings of their own for {nested[0]!r:.80} are not supported")
    for where in (rope, config):
        part = float(where.get("partial_rotary_factor") or 1)
        if part != 1 and "partial_rotary_factor" not in FAMILIES[config["model_type"]].allows:
            raise ConfigError(f"{source}: partial_rotary_factor={part} is not supported")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(f"{source}: RoPE scaling {kind!r} is not supported; supported are default, llama3")
    # transformers prefers the number of positions beside the settings to the one in them, and falls back to
    # the model's.
    positions = "original_max_position_embeddings"
    fields = {positions: config.get("max_position_embeddings"), **rope}
    fields |= {positions: config[positions]} if config.get(positions) else {}
    for field, value in _LLAMA3_ROPE.items():
        if (actual := fields.get(field)) != value:
            raise ConfigError(
                f"{source}: RoPE scaling llama3 with {field}={actual!r:.80} is not supported; megatron-core "
                f"has {value}"
            )
    return real(rope, "factor")


def _refuse_variants(config: dict[str, Any], source: str) -> None:
    """Raise ConfigError for unsupported settings, which would silently change the model's function."""
    refused = {
        "use_sliding_window": flag(config, "use_sliding_window"),
        "attention_bias": flag(config, "attention_bias"),
        "mlp_bias": flag(config, "mlp_bias"),
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "mlp_only_layers": bool(config.get("mlp_only_layers")),
        "decoder_sparse_step": config.get("decoder_sparse_step", 1) != 1,
        "layer_types": set(layer_types(config)) - {"full_attention"} != set(),
    }
    family = FAMILIES[config["model_type"]]
    for field, wrong in refused.items():
        if wrong and field not in family.allows:
            raise ConfigError(f"{source}: {field}={config[field]!r:.80} is not supported")
    check_quantization(config, source)


def head_flops_per_token(shape: ModelShape) -> float:
    """Forward FLOPs of the output layer for one token: 2 hidden vocab."""
    return 2.0 * shape.hidden * shape.vocab


def linear_flops_per_token(shape: ModelShape) -> float:
    """Forward FLOPs of all weight matrices for one token: with output layer, without attention scores."""
    flops = ((len(shape.layers_of(kind)), kind.flops(shape.hidden)) for kind in shape.kinds)
    return sum(count * (own.linear + own.routed) for count, own in flops) + head_flops_per_token(shape)


def attention_flops(shape: ModelShape, n: float) -> float:
    """Forward FLOPs of causal attention for a sequence of ``n`` tokens, proportional to n^2."""
    flops = ((len(shape.layers_of(kind)), kind.flops(shape.hidden)) for kind in shape.kinds)
    return sum(count * own.quadratic for count, own in flops) * n**2


def attention_weight(shape: ModelShape) -> float:
    """w of the cost n + w n^2 of n tokens: the relative cost of attention, in units of a token's linear cost.
    About 1e-5 for a 32B model: at n = 1 / w, some 98,000 tokens, attention costs as much as the matrices."""
    return attention_flops(shape, 1) / linear_flops_per_token(shape)
