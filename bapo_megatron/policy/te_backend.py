"""Transformer Engine's attention for packs: its module, and whether it has a kernel for this GPU.

If it has no kernel for a GPU it does not refuse: without context parallelism it computes all scores of padded
documents (unfused), with it a layer fails in the first pass. So ``model.py`` asks before it chooses
the attention; ``check_environment`` belongs to the checks before a run starts. Used by ``model.py`` and
``trainer/preflight.py``.
"""

from __future__ import annotations

import os
from dataclasses import fields
from functools import cache
from typing import Any

from bapo_megatron.errors import ConfigError

_NONDETERMINISTIC = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
_SWITCHES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def check_environment() -> None:
    """Check that no variable disables a kernel of Transformer Engine, which megatron asserts. ConfigError."""
    for name in _SWITCHES:
        value = os.environ.get(name, "1")
        if value != "1":
            raise ConfigError(
                f"{name}={value} in the environment: megatron-core wants all of {', '.join(_SWITCHES)} unset "
                f"or 1 and chooses the kernel itself: unset {name}"
            )


@cache
def pack_attention() -> type:
    """``TEDotProductAttention`` with ``pad_between_seqs`` passed on: there is no padding between documents.

    Without it Transformer Engine before 2.20 compares ``cu_seqlens`` with the padded ones in every layer,
    which synchronizes with the GPU. A function, because its base class imports Transformer Engine.
    """
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class PackAttention(TEDotProductAttention):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.kept_packed_seq_params.add("pad_between_seqs")

    return PackAttention


def has_te_attention(config: Any, longest: int) -> bool:
    """Whether Transformer Engine has a flash or fused kernel for this rank's heads of ``config``.

    ``longest``: length of the longest document in tokens. ConfigError if NVTE_ALLOW_NONDETERMINISTIC_ALGO=0
    is set and it has no deterministic kernel: torch has none either.
    """
    deterministic = os.environ.get(_NONDETERMINISTIC, "1") == "0"
    found = _selected(config, longest, deterministic)
    if deterministic and not found:
        raise ConfigError(
            f"{_NONDETERMINISTIC}=0 in the environment: there is no deterministic attention here for packs "
            f"of {longest} tokens in Transformer Engine, nor in torch: unset it; a resumed run then "
            "continues to rounding, not bit for bit"
        )
    return found


def _selected(config: Any, longest: int, deterministic: bool) -> bool:
    """Transformer Engine's backend selection, called with the arguments of a layer in training."""
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    tensor, context = config.tensor_model_parallel_size, config.context_parallel_size
    # The number of documents matters for determinism only: then it is the most that a pack can have.
    documents = max(1, longest // (2 * context)) if deterministic else 1
    asked = {
        "qkv_dtype": config.params_dtype,
        "qkv_layout": "thd_thd_thd",
        "batch_size": documents,
        "num_heads": config.num_attention_heads // tensor,
        "num_gqa_groups": config.num_query_groups // tensor,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
        "num_tokens_q": longest // context,
        "num_tokens_kv": longest // context,
        "head_dim_qk": config.kv_channels,
        "head_dim_v": config.kv_channels,
        "attn_mask_type": "padding_causal",
        "window_size": (-1, 0),
        "bottom_right_diagonal": False,
        "core_attention_bias_requires_grad": False,
        "context_parallel": context > 1,
        "cp_size": context,
        "deterministic": deterministic,
    }
    known = {field.name for field in fields(utils.AttentionParams)}
    answer = utils.get_attention_backend(
        utils.AttentionParams(**{name: value for name, value in asked.items() if name in known})
    )
    use_flash, _, use_fused, *_ = answer
    return bool(use_flash or use_fused)
