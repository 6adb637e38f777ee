"""The kind of Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464), a linear attention with a state.

``in_proj`` stacks queries, keys, values, output gates (z), and for each value head beta and alpha. Each of
the six is cut over TP, and stored, on its own, as in megatron-core's ``GatedDeltaNet``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bapo_megatron.layers import Kind, Mapping, RowSegment, plain
from bapo_megatron.layers.costs import FP32, Cut, Decoding, Flops, Place, Saved

CHUNK = 64
"""Tokens of a chunk, within which the state is not written out."""
_PARTS = ("query", "key", "value", "z", "beta", "alpha")


@dataclass(frozen=True)
class DeltaNet(Kind):
    """Gated DeltaNet: sizes of its heads, and tokens that the convolution before them covers."""

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
        """Projections, the convolution, and of each value head the products of a chunk's keys, queries and
        values with each other (a triangular solve among them), and those with the state."""
        k, v = self.key_dim, self.value_dim
        projections = 2.0 * hidden * (sum(self.sections) + self.values)
        convolution = 2.0 * self.kernel * (2 * self.keys + self.values)
        rule = self.value_heads * (CHUNK * (4 * k + 3 * v) + 6.0 * k * v)
        return Flops(projections + convolution + rule)

    def saved(self, at: Place) -> Saved:
        """The convolution's input, the rule's own, of the gated norm float32 copies of its input and of z,
        both halves of its product, and the last matrix's input.

        On a GPU the rule keeps its inputs, the decay's sums, and the inverse of each chunk; states are
        computed again in its backward pass, whose peak is the workspace. torch's, which is in float32, keeps
        products of each chunk, too. What CP moves is not there at that peak."""
        b, tensor = at.element, at.parallel.tensor
        heads, keys, values = (size / tensor for size in (self.value_heads, self.keys, self.values))
        convolved, key_heads = 2 * keys + values, self.key_heads / tensor
        wide = heads * (2 * self.key_dim + self.value_dim)  # key heads repeated for the value heads
        states = heads * self.key_dim * self.value_dim / CHUNK
        if at.spec == "te":
            rule = b * (convolved + heads * CHUNK) + FP32 * (2 * key_heads + 4 * heads)
            # Of a value head 3 tensors as its keys and 5 as its values, the states and their gradient; the
            # gradients of queries, keys and z.
            work = b * (heads * (3 * self.key_dim + 5 * self.value_dim) + 2 * (states + keys) + values)
        else:
            rule = b * convolved + FP32 * (4 * wide + 3 * values + 5 * heads * CHUNK + 3 * states)
            work = rule
        gated = FP32 * (4 * values + heads) + b * values
        whole = at.norm + at.input + b * (convolved + 2 * heads) + rule + gated
        return Saved(whole, whole, 0.0, workspace=work)

    def sent(self, at: Place) -> dict[str, float]:
        """Of CP an all-to-all of queries, keys, values, beta and alpha from tokens to heads, and one of the
        outputs back, with as much for the gradients."""
        context = at.parallel.context
        exchanged = (2 * self.keys + 2 * self.values + 2 * self.value_heads) / at.parallel.tensor * at.element
        exchanges = 2 + (at.recompute == "full") + at.passes
        return {"TP": at.pair(False), "CP": exchanged * (context - 1) / context * exchanges}

    def decoding(self) -> Decoding:
        """The state in float32, and the last inputs of the convolution."""
        state = FP32 * self.value_heads * self.key_dim * self.value_dim
        return Decoding(per_sequence=state + 2 * (self.kernel - 1) * (2 * self.keys + self.values))

    def _apart(self, mapping: Mapping) -> Mapping:
        """The mapping with sections that are cut and stored each on its own."""
        count = 6 if len(mapping.hf_names) > 1 else 3
        keys = tuple(f".{part}" for part in _PARTS[:count])
        return replace(mapping, sections=self.sections[:count], section_keys=keys, stored_apart=True)
