"""Grouped-query attention with RoPE as layer kinds: ``Attention``, ``GatedAttention`` (output gate).

The megatron parameter ``linear_qkv`` stacks, for each KV group, its query heads, its key head and its value
head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bapo_megatron.layers import Kind, Mapping, RowSegment, plain
from bapo_megatron.layers.costs import FP32, Cut, Decoding, Flops, Place, Saved


@dataclass(frozen=True)
class Attention(Kind):
    """Grouped-query attention: query and KV heads, head width, optional QKV bias and query/key norms."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    qk_norm: bool = False

    builder = "bapo_megatron.policy.layers:AttentionBuilder"
    norm_keys = ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")

    @property
    def rotary_dim(self) -> int:
        """Number of rotated entries of a head, the first ones."""
        return self.head_dim

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
            yield f"num_attention_heads={self.heads} is not a multiple of num_key_value_heads={self.kv_heads}"

    def arguments(self) -> dict[str, object]:
        return {
            "num_attention_heads": self.heads,
            "group_query_attention": True,
            "num_query_groups": self.kv_heads,
            "kv_channels": self.head_dim,
            "qk_layernorm": self.qk_norm,
            "add_qkv_bias": self.qkv_bias,
        }

    def states(self) -> tuple[str, ...]:
        modules = ("core_attention", "linear_qkv", "linear_proj")
        norms = ("q_layernorm", "k_layernorm") if self.qk_norm else ()
        return tuple(f"self_attention.{module}" for module in modules + norms)

    def cuts(self) -> tuple[Cut, ...]:
        return Cut("tensor", "attention heads", self.heads), Cut("tensor", "KV heads", self.kv_heads)

    def flops(self, hidden: int) -> Flops:
        """Projections of q, k, v and output; scores and weighted values cost 2 heads head_dim FLOPs each for
        each of the n^2 / 2 causal token pairs."""
        linear = 4.0 * hidden * self.head_dim * (self.heads + self.kv_heads)
        return Flops(linear, quadratic=2.0 * self.heads * self.head_dim)

    def saved(self, at: Place) -> Saved:
        """Query and key norms keep contiguous copies of their inputs; the attention keeps its queries, keys
        and values (in a ring, those of the last message) and a log-sum-exp per head, but no scores.
        Transformer Engine's attention is never recomputed alone: that would also keep the fused projection's
        output, which contains the values. torch's keeps padded queries, keys, values and output."""
        b, heads, kv_heads = at.element, self.heads / at.parallel.tensor, self.kv_heads / at.parallel.tensor
        q, kv = heads * self.head_dim, kv_heads * self.head_dim
        fused = b * (q + 2 * kv)
        copied = b * q if kv_heads > 1 else 0.0  # with several groups the queries are not a view of it
        norms, around = FP32 * (heads + kv_heads), at.norm + at.input + b * q
        ring = 4 * 2 * kv * b if at.parallel.context > 1 else 0.0
        if at.spec == "te":
            whole = around + (b * (q + kv) + norms) * self.qk_norm + fused + FP32 * heads
            return Saved(whole, whole, 0.0, buffers=ring)
        core, arguments = fused + b * q + FP32 * heads, copied + fused
        if self.qk_norm:  # float32 inputs are kept as they are, others as float32 copies
            around += FP32 * (q + kv) + norms + (fused + copied if b == FP32 else FP32 * (q + kv))
            arguments = b * (q + kv) + (0.0 if b == FP32 else fused)
        return Saved(around + core, around + arguments, core, buffers=ring)

    def sent(self, at: Place) -> dict[str, float]:
        """CP: keys and values circle the ring once forward, and with their gradients backward."""
        kv = 2 * self.kv_heads * self.head_dim / at.parallel.tensor * at.element
        exchanges = 3 + (at.recompute == "full") + at.passes
        return {"TP": at.pair(False), "CP": kv * (at.parallel.context - 1) * exchanges}

    def decoding(self) -> Decoding:
        return Decoding(2 * 2 * self.kv_heads * self.head_dim, self.kv_heads)

    def _qkv(self, part: str, tail: tuple[int, ...]) -> Mapping:
        groups, d = self.kv_heads, self.head_dim
        stacked = tuple(
            segment
            for group in range(groups)
            for segment in (*self._queries(group), *(RowSegment(source, group * d, d) for source in (1, 2)))
        )
        queries = sum(segment.rows for segment in stacked if segment.source == 0)
        return Mapping(
            tuple(f"self_attn.{x}_proj.{part}" for x in "qkv"),
            tuple((count, *tail) for count in (queries, groups * d, groups * d)),
            stacked,
            tp_dim=0,
            served=f"self_attn.qkv_proj.{part}",
            heads=(self.heads, groups, groups),
        )

    def _queries(self, group: int) -> list[RowSegment]:
        """Rows of the query projection in a KV group."""
        count = self.heads // self.kv_heads * self.head_dim
        return [RowSegment(0, group * count, count)]


@dataclass(frozen=True, kw_only=True)
class GatedAttention(Attention):
    """Attention (Qwen3.5's) that multiplies each head's output by a sigmoid gate, with RoPE over a head's
    first ``rotated`` entries. HF's ``q_proj`` stacks each head's query and gate rows; megatron's
    ``linear_qkv`` each KV group's queries, gates, key and value."""

    rotated: int

    builder = "bapo_megatron.policy.layers:GatedAttentionBuilder"

    @property
    def rotary_dim(self) -> int:
        return self.rotated

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.rotated % 2 or self.rotated > self.head_dim:
            yield f"RoPE over {self.rotated} of the {self.head_dim} entries of a head cannot be"

    def arguments(self) -> dict[str, object]:
        part = self.rotated / self.head_dim
        return {
            **super().arguments(),
            "attention_output_gate": True,
            "apply_layernorm_1p": True,
            "rotary_percent": part,
        }

    def flops(self, hidden: int) -> Flops:
        own = super().flops(hidden)
        return replace(own, linear=own.linear + 2.0 * hidden * self.heads * self.head_dim)

    def saved(self, at: Place) -> Saved:
        """Adds the gate's float32 sigmoid and its other factor, in the element's type."""
        own = super().saved(at)
        gate = (FP32 + at.element) * self.heads / at.parallel.tensor * self.head_dim
        return replace(own, whole=own.whole + gate, selective=own.selective + gate)

    def _queries(self, group: int) -> list[RowSegment]:
        """All queries of the group, then all gates; the projection has each head's query and gate."""
        heads, d = self.heads // self.kv_heads, self.head_dim
        own = range(group * heads, (group + 1) * heads)
        return [RowSegment(0, (2 * head + gate) * d, d) for gate in (0, 1) for head in own]
