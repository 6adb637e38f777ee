"""Core attention in plain torch for ``thd`` packs: causal within each document, grouped-query.

Shapes: ``_THD`` [tokens, heads, head_dim] of a pack, ``_NHLD`` [documents, heads, length, head_dim].
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# Documents are computed as one padded batch while that costs less than this many times their tokens.
_MAX_PADDING = 1.5


class DocumentAttention(MegatronModule):  # type: ignore[misc]
    """Scaled dot-product attention in which each document of a pack attends to itself, causally.

    Documents of like length go through SDPA as one right-padded batch: under a causal mask no real query
    sees the padding behind it, so no mask tensor is needed and SDPA's flash kernels stay available.
    """

    def __init__(self, config: Any, *_args: Any, softmax_scale: float | None = None, **_kwargs: Any) -> None:
        super().__init__(config=config)
        if config.attention_dropout != 0.0:
            raise ValueError("attention dropout is not supported: log-probs must be reproducible")
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        **_kwargs: Any,
    ) -> Tensor:
        """[tokens, heads, head_dim] queries and [tokens, kv_heads, head_dim] keys, values to [tokens, h*d]."""
        if packed_seq_params is None:
            raise ValueError("this attention takes thd packs only")
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        lengths = [end - start for start, end in pairwise(bounds)]
        documents = [x.split(lengths) for x in (query, key, value)]
        outputs: list[Tensor] = [query.new_empty(0)] * len(lengths)
        for group in groups_of_like_length(lengths):
            q, k, v = (pad_sequence([x[d] for d in group], batch_first=True) for x in documents)
            padded = self._attend(q, k, v)
            for row, d in enumerate(group):
                outputs[d] = padded[row, : lengths[d]].flatten(1)
        return torch.cat([output for output in outputs if output.numel()])

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One right-padded batch, [documents, length, heads, head_dim]."""
        q_NHLD, k_NHLD, v_NHLD = (x.transpose(1, 2) for x in (q, k, v))
        out_NHLD = F.scaled_dot_product_attention(
            q_NHLD,
            k_NHLD,
            v_NHLD,
            is_causal=True,
            scale=self.scale,
            enable_gqa=q_NHLD.size(1) != k_NHLD.size(1),
        )
        return out_NHLD.transpose(1, 2)

    def sharded_state_dict(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        """Attention has no parameters."""
        return {}


def groups_of_like_length(lengths: list[int]) -> list[list[int]]:
    """Indices of non-empty documents in batches whose padding stays within the limit, longest first."""
    groups: list[list[int]] = []
    tokens = longest = 0
    for document in sorted((d for d, n in enumerate(lengths) if n), key=lambda d: -lengths[d]):
        padded = longest * (len(groups[-1]) + 1) if groups else 0
        if not groups or padded > _MAX_PADDING * (tokens + lengths[document]):
            groups.append([])
            tokens, longest = 0, lengths[document]
        groups[-1].append(document)
        tokens += lengths[document]
    return groups
