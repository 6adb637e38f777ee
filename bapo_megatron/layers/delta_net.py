"""Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464), linear attention with a state, as a layer kind.

The module itself is in ``policy/delta_net.py``; ``DeltaNet`` holds its sizes. The megatron parameter
``in_proj`` stacks queries, keys, values, output gates (z), and beta and alpha of each value head. Each of the
six is sharded over TP and stored separately, as in megatron-core's ``GatedDeltaNet``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bapo_megatron.layers import Kind, Mapping, RowSegment, plain
from bapo_megatron.layers.costs import FP32, Cut, Decoding, Flops, Place, Saved

CHUNK = 64
"""Tokens of a chunk, within which no state is stored."""
_PARTS = ("query", "key", "value", "z", "beta", "alpha")


@dataclass(frozen=True)
class DeltaNet(Kind):
    """Gated DeltaNet: numbers and widths of key and value heads, and its convolution's length in tokens."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    builder = "bapo_megatron.policy.delta_net:DeltaNetBuilder"
    norm_keys = ("self_attention.in_proj.layer_norm_weight", "input_layernorm.weight")

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def sections(self) -> tuple[int, ...]:
        """Rows of queries, keys, values, gates, beta and alpha."""
        return (self.keys, self.keys, self.values, self.values, self.value_heads, self.value_heads)

    def parameters(self, hidden: int) -> dict[str, Mapping]:
        heads, values = self.value_heads, self.values
        convolved = 2 * self.keys + values
        rows = {"qkv": convolved, "z": values, "b": heads, "a": heads}
        projection = Mapping(
            tuple(f"linear_attn.in_proj_{part}.weight" for part in rows),
            tuple((count, hidden) for count in rows.values()),
            tuple(RowSegment(number, 0, count) for number, count in enumerate(rows.values())),
            tp_dim=0,
            served_each=tuple(
                f"linear_attn.in_proj_{fused}.weight" for fused in ("qkvz", "qkvz", "ba", "ba")
            ),
        )
        convolution = plain("linear_attn.conv1d.weight", (convolved, 1, self.kernel), tp_dim=0)
        decay = plain("linear_attn.A_log", (heads,), tp_dim=0)
        norm = plain("linear_attn.norm.weight", (self.value_dim,))
        return {
            "input_layernorm.weight": plain("input_layernorm.weight", (hidden,)),
            "self_attention.in_proj.weight": self._apart(projection),
            "self_attention.conv1d.weight": self._apart(convolution),
            "self_attention.dt_bias": plain("linear_attn.dt_bias", (heads,), tp_dim=0),
            "self_attention.A_log": replace(decay, dtype="float32"),
            "self_attention.out_norm.weight": replace(norm, dtype="float32", served_in_models_dtype=True),
            "self_attention.out_proj.weight": plain("linear_attn.out_proj.weight", (hidden, values), 1),
        }

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.key_heads > 0 and self.value_heads % self.key_heads:
            yield (
                f"linear_num_value_heads={self.value_heads} is not a multiple of "
                f"linear_num_key_heads={self.key_heads}"
            )

    def sizes(self) -> dict[str, int]:
        return {
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_key_head_dim": self.key_dim,
            "linear_value_head_dim": self.value_dim,
            "linear_conv_kernel_dim": self.kernel,
        }

    def arguments(self) -> dict[str, object]:
        return {"experimental_attention_variant": "gated_delta_net", **self.sizes()}

    def states(self) -> tuple[str, ...]:
        return "self_attention.in_proj", "self_attention.out_proj"

    def cuts(self) -> tuple[Cut, ...]:
        return (Cut("heads", "key heads of Gated DeltaNet", self.key_heads),)

    def flops(self, hidden: int) -> Flops:
        """Projections, convolution, and per value head the products (and a triangular solve) of a chunk's
        keys, queries and values with each other and with the state."""
        k, v = self.key_dim, self.value_dim
        projections = 2.0 * hidden * (sum(self.sections) + self.values)
        convolution = 2.0 * self.kernel * (2 * self.keys + self.values)
        rule = self.value_heads * (CHUNK * (4 * k + 3 * v) + 6.0 * k * v)
        return Flops(projections + convolution + rule)

    def saved(self, at: Place) -> Saved:
        """Inputs of convolution and output matrix, the rule's tensors, and the gated norm's.

        The norm keeps float32 copies of its input and z, and both factors of its product. On a GPU the rule
        keeps its inputs, the decay sums and each chunk's inverse; its backward pass recomputes the states,
        and its peak is the workspace, without CP buffers. torch's float32 rule also keeps each chunk's
        products.
        """
        b, tensor = at.element, at.parallel.tensor
        heads, keys, values = (size / tensor for size in (self.value_heads, self.keys, self.values))
        convolved, key_heads = 2 * keys + values, self.key_heads / tensor
        wide = heads * (2 * self.key_dim + self.value_dim)  # key heads repeated per value head
        states = heads * self.key_dim * self.value_dim / CHUNK
        if at.spec == "te":
            rule = b * (convolved + heads * CHUNK) + FP32 * (2 * key_heads + 4 * heads)
            # Per value head 3 key-sized and 5 value-sized tensors, the states and their gradient; the
            # gradients of queries, keys and z.
            work = b * (heads * (3 * self.key_dim + 5 * self.value_dim) + 2 * (states + keys) + values)
        else:
            rule = b * convolved + FP32 * (4 * wide + 3 * values + 5 * heads * CHUNK + 3 * states)
            work = rule
        gated = FP32 * (4 * values + heads) + b * values
        whole = at.norm + at.input + b * (convolved + 2 * heads) + rule + gated
        return Saved(whole, whole, 0.0, workspace=work)

    def sent(self, at: Place) -> dict[str, float]:
        """CP: an all-to-all of queries, keys, values, beta and alpha, one of the outputs, and gradients."""
        context = at.parallel.context
        exchanged = (2 * self.keys + 2 * self.values + 2 * self.value_heads) / at.parallel.tensor * at.element
        exchanges = 2 + (at.recompute == "full") + at.passes
        return {"TP": at.pair(False), "CP": exchanged * (context - 1) / context * exchanges}

    def decoding(self) -> Decoding:
        """The float32 state, and the last inputs of the convolution."""
        state = FP32 * self.value_heads * self.key_dim * self.value_dim
        return Decoding(per_sequence=state + 2 * (self.kernel - 1) * (2 * self.keys + self.values))

    def _apart(self, mapping: Mapping) -> Mapping:
        """The mapping with sections that are sharded and stored separately."""
        count = 6 if len(mapping.hf_names) > 1 else 3
        keys = tuple(f".{part}" for part in _PARTS[:count])
        return replace(mapping, sections=self.sections[:count], section_keys=keys, stored_apart=True)
