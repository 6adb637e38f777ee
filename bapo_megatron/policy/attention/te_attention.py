"""Transformer Engine's attention for packs of documents without padding between them.

Importing this imports Transformer Engine.
"""

from __future__ import annotations

from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention


class PackAttention(TEDotProductAttention):  # type: ignore[misc]
    """Megatron's attention of Transformer Engine, told that there is no padding between the documents.

    Otherwise Transformer Engine before 2.20 compares ``cu_seqlens`` with their padded ones in every layer,
    and so waits for the GPU.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.kept_packed_seq_params.add("pad_between_seqs")
