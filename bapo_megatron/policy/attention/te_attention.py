"""Transformer Engine's attention module for packs. Importing it imports Transformer Engine.

So ``policy/model.py`` imports it only where layers are Transformer Engine's. Used by ``policy/model.py``.
"""

from __future__ import annotations

from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention


class PackAttention(TEDotProductAttention):  # type: ignore[misc]
    """``TEDotProductAttention`` with ``pad_between_seqs`` passed on: there is no padding between documents.

    Without it Transformer Engine before 2.20 compares ``cu_seqlens`` with the padded ones in every layer,
    which synchronizes with the GPU. Named in the layer spec of ``policy/model.py``; megatron-core makes one
    for each layer.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.kept_packed_seq_params.add("pad_between_seqs")
