"""The kind of grouped-query attention, with RoPE.

``linear_qkv`` stacks, for each KV group, its query heads, its key head and its value head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bapo_megatron.layers import Kind, Mapping, RowSegment, plain


@dataclass(frozen=True)
class Attention(Kind):
    """Grouped-query attention: sizes, and what its family adds."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    qk_norm: bool = False

    norm_keys = ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")

    def parameters(self, hidden: int) -> dict[str, Mapping]:
        width, d = self.heads * self.head_dim, self.head_dim
        table = {
            "input_layernorm.weight": plain("input_layernorm.weight", (hidden,)),
            "self_attention.linear_qkv.weight": self._qkv("weight", (hidden,)),
            "self_attention.linear_proj.weight": plain("self_attn.o_proj.weight", (hidden, width), tp_dim=1),
        }
        if self.qkv_bias:
            table["self_attention.linear_qkv.bias"] = self._qkv("bias", ())
        for x in "qk" if self.qk_norm else "":
            table[f"self_attention.{x}_layernorm.weight"] = plain(f"self_attn.{x}_norm.weight", (d,))
        return table

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.kv_heads > 0 and self.heads % self.kv_heads:
            yield f"num_attention_heads={self.heads} is no multiple of num_key_value_heads={self.kv_heads}"

    def _qkv(self, part: str, tail: tuple[int, ...]) -> Mapping:
        groups, d = self.kv_heads, self.head_dim
        rows = (self.heads // groups * d, d, d)  # of a group: query, key, value
        return Mapping(
            tuple(f"self_attn.{x}_proj.{part}" for x in "qkv"),
            tuple((groups * count, *tail) for count in rows),
            tuple(RowSegment(i, g * count, count) for g in range(groups) for i, count in enumerate(rows)),
            tp_dim=0,
        )
