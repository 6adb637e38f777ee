"""The kinds of gated SiLU MLPs: a dense one, and a mixture of experts.

``linear_fc1`` stacks the gate over the up projection, on each TP rank anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bapo_megatron.layers import Kind, Mapping, RowSegment, plain

_MOST_EXPERTS = 1 << 20
_NORM, _FUSED_NORM = "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"


@dataclass(frozen=True)
class Mlp(Kind):
    """A dense MLP: gate and up projection to ``ffn``, and the down projection."""

    ffn: int

    norm_keys = (_FUSED_NORM, _NORM)

    def parameters(self, hidden: int) -> dict[str, Mapping]:
        return {**_norm(hidden), **_gated("mlp.", self.ffn, hidden)}


@dataclass(frozen=True)
class Experts(Kind):
    """A mixture of experts: a router and gated SiLU MLPs; each token takes a few of them."""

    count: int
    per_token: int
    """Experts of a token, those of its highest router logits (top-k)."""
    ffn: int
    normalized: bool
    """Whether the weights of a token's experts sum to 1; else they are their probabilities among all."""

    norm_keys = (_NORM, _FUSED_NORM)

    def parameters(self, hidden: int) -> dict[str, Mapping]:
        """The router, which every rank has, and each expert's MLP."""
        router = plain("mlp.gate.weight", (self.count, hidden))
        table = {**_norm(hidden), "mlp.router.weight": router}
        for number in range(self.count):
            for name, mapping in _gated(f"mlp.experts.{number}.", self.ffn, hidden).items():
                table[name] = replace(mapping, expert=number)
        return table

    def sizes(self) -> dict[str, int]:
        return {"experts": self.count, "width of an expert": self.ffn}

    def problems(self) -> Iterator[str]:
        for field, value in {"num_experts": self.count, "moe_intermediate_size": self.ffn}.items():
            if not 1 <= value <= _MOST_EXPERTS:
                yield f"a model with {field}={str(value)[:20]} cannot be"
        if self.per_token == 1 and self.normalized:
            yield (
                "num_experts_per_tok=1 with norm_topk_prob is not supported: a token's one expert has the "
                "weight 1 always, so the router has no gradient"
            )
        if not 1 <= self.per_token <= self.count:
            yield f"num_experts_per_tok={self.per_token} cannot be: there are {self.count} experts"


def _norm(hidden: int) -> dict[str, Mapping]:
    return {_NORM: plain("post_attention_layernorm.weight", (hidden,))}


def _gated(prefix: str, ffn: int, hidden: int) -> dict[str, Mapping]:
    """A gated MLP of width ``ffn``, named alike in both: that of a dense layer, or one expert."""
    return {
        f"{prefix}linear_fc1.weight": Mapping(
            tuple(f"{prefix}{x}_proj.weight" for x in ("gate", "up")),
            ((ffn, hidden),) * 2,
            (RowSegment(0, 0, ffn), RowSegment(1, 0, ffn)),
            tp_dim=0,
            sections=(ffn, ffn),
            section_keys=("_w", "_v"),
        ),
        f"{prefix}linear_fc2.weight": plain(f"{prefix}down_proj.weight", (hidden, ffn), tp_dim=1),
    }
