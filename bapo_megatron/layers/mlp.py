"""Gated SiLU MLPs as layer kinds: ``Mlp`` (dense), ``Experts`` (mixture), ``SharedExperts`` (one shared).

The megatron parameter ``linear_fc1`` stacks gate over up projection, separately on each TP rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bapo_megatron.layers import Kind, Mapping, RowSegment, plain, size_problems
from bapo_megatron.layers.costs import FP32, INT32, INT64, Cut, Flops, Place, Saved

EXPERTS = "mlp.experts.experts."
"""Prefix of the checkpoint keys shared by all experts of a layer."""
_MOST_EXPERTS = 1 << 20
_SHARED = "mlp.shared_experts."
_NORM, _FUSED_NORM = "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"


@dataclass(frozen=True)
class Mlp(Kind):
    """Dense gated SiLU MLP of width ``ffn``: gate, up and down projection."""

    ffn: int

    builder = "bapo_megatron.policy.layers:MlpBuilder"
    norm_keys = (_FUSED_NORM, _NORM)

    def parameters(self, hidden: int) -> dict[str, Mapping]:
        return {**_norm(hidden), **_gated("mlp.", "mlp.", self.ffn, hidden)}

    def states(self) -> tuple[str, ...]:
        return "mlp.linear_fc1", "mlp.linear_fc2"

    def cuts(self) -> tuple[Cut, ...]:
        return (Cut("tensor", "MLP width", self.ffn),)

    def flops(self, hidden: int) -> Flops:
        linear = 6.0 * hidden * self.ffn
        return Flops(linear, selective=linear)

    def saved(self, at: Place) -> Saved:
        """Gate, up and their product; on torch's layers also silu(gate). The workspace holds gradients of the
        three, of the hidden state and of the gathered input."""
        gated, work = _gated_activations(self.ffn, at)
        # A fused norm is recomputed with the matrix.
        kept, again = (at.input, FP32 + at.input) if at.spec == "te" else (at.norm + at.input, 0.0)
        return Saved(at.norm + at.input + gated, kept, again + gated, work)

    def sent(self, at: Place) -> dict[str, float]:
        return {"TP": at.pair(True)}


@dataclass(frozen=True)
class Experts(Kind):
    """Mixture of experts: number of experts and of experts per token, width of each gated SiLU MLP, and
    whether a token's expert weights are normalized."""

    count: int
    per_token: int
    """Experts per token, by highest router logits (top-k)."""
    ffn: int
    normalized: bool
    """Whether a token's expert weights sum to 1; if not, they are the probabilities among all experts."""

    builder = "bapo_megatron.policy.layers:ExpertsBuilder"
    norm_keys = (_NORM, _FUSED_NORM)

    def parameters(self, hidden: int) -> dict[str, Mapping]:
        """The router, on every rank, and each expert's MLP."""
        router = plain("mlp.gate.weight", (self.count, hidden))
        table = {**_norm(hidden), "mlp.router.weight": router}
        for number in range(self.count):
            own = f"mlp.experts.{number}."
            for name, mapping in _gated(own, own, self.ffn, hidden).items():
                served = "mlp.experts.w13_weight" if mapping.served else "mlp.experts.w2_weight"
                table[name] = replace(mapping, expert=number, served=served)
        return table

    def arguments(self) -> dict[str, object]:
        return {
            "num_experts": self.count,
            "moe_ffn_hidden_size": self.ffn,
            "moe_router_topk": self.per_token,
            "moe_router_pre_softmax": not self.normalized,
            "moe_router_load_balancing_type": "none",
            "expert_model_parallel_size": 1,
        }

    def states(self) -> tuple[str, ...]:
        return "pre_mlp_layernorm", f"{EXPERTS}linear_fc1", f"{EXPERTS}linear_fc2"

    def cuts(self) -> tuple[Cut, ...]:
        return Cut("expert", "experts", self.count), Cut("expert_tensor", "experts' width", self.ffn)

    def flops(self, hidden: int) -> Flops:
        return Flops(routed=2.0 * hidden * (3 * self.per_token * self.ffn + self.count))

    def rows(self, at: Place) -> float:
        """Copies processed by the busiest rank's experts, per token of a pack on a CP rank: sequence
        parallelism splits the routed tokens, ETP gathers those of its ranks, which hold parts of the same
        experts."""
        return self.per_token / at.split * at.parallel.expert_tensor * at.imbalance

    def saved(self, at: Place) -> Saved:
        """Per routed token, its expert indices and their weights after the softmax, and per copy:

        Transformer Engine: input, gate and up, the weighted product (fused into SwiGLU), the weight, and with
        several local experts the position in expert order; its fused permutation keeps a map of 2 experts + 1
        numbers per token. megatron's SequentialMLP with torch permutation: gate and up, silu(gate), product,
        weighted product, and the weight; also the mask and weights of all experts per token, and each copy's
        token index.

        The norm is a separate module in both specs. The workspace holds a copy's gradients, or two of its
        hidden states during a permutation.
        """
        b, hidden, rows, share = at.element, at.hidden, self.rows(at), 1 / at.split
        width, local = self.ffn / at.parallel.expert_tensor, self.count // at.parallel.expert
        if at.spec == "te":
            routed = INT32 * (2 * self.count + 1) * share
            routed += rows * (b * (hidden + 3 * width) + FP32 + INT32 * (local > 1))
        else:
            routed = ((FP32 + 1) * self.count + INT64 * self.per_token) * share
            routed += rows * (b * (hidden + 5 * width) + FP32)
        routed += (INT64 + FP32) * self.per_token * share
        kept = at.norm + at.input  # the normalized input of router and permutation
        work = rows * max(3 * width + hidden, 2 * hidden) + 2 * share * hidden
        return Saved(kept + routed, kept, routed, b * work)

    def sent(self, at: Place) -> dict[str, float]:
        """Each forward pass (recomputation included) sends a copy to its expert and back, each backward pass
        its gradients. EP: all-to-alls, in which the busiest rank sends its experts' results. ETP: copies are
        gathered, and the results reduce-scattered in float32."""
        ep, etp = at.parallel.expert, at.parallel.expert_tensor
        travels = 4 + 2 * (at.recompute != "none") + 2 * at.passes
        copies = travels * self.rows(at) * at.hidden
        return {
            "EP": copies / etp * at.element * (ep - 1) / ep,
            "ETP": copies * (at.element + FP32) / 2 * (etp - 1) / etp,
        }

    def sizes(self) -> dict[str, int]:
        return {"experts": self.count, "width of an expert": self.ffn}

    def problems(self) -> Iterator[str]:
        sizes = {"num_experts": self.count, "moe_intermediate_size": self.ffn}
        yield from size_problems(sizes, _MOST_EXPERTS)
        if self.per_token == 1 and self.normalized:
            yield (
                "num_experts_per_tok=1 with norm_topk_prob is not supported: a token's one expert has the "
                "weight 1 always, so the router has no gradient"
            )
        if not 1 <= self.per_token <= self.count:
            yield f"num_experts_per_tok={self.per_token} cannot be: there are {self.count} experts"


@dataclass(frozen=True, kw_only=True)
class SharedExperts(Experts):
    """Mixture of experts with a shared expert, a gated SiLU MLP for all tokens.

    Its output is scaled by the sigmoid of a one-row gate matrix's product with the token. TP shards the MLP
    like a dense one; each TP rank has the whole gate, and under SP only its own tokens, so the gate's
    gradient is summed over TP, as for norms.
    """

    shared: int

    builder = "bapo_megatron.policy.layers:SharedExpertsBuilder"

    def parameters(self, hidden: int) -> dict[str, Mapping]:
        return {
            **super().parameters(hidden),
            **_gated(_SHARED, "mlp.shared_expert.", self.shared, hidden),
            f"{_SHARED}gate_weight": plain("mlp.shared_expert_gate.weight", (1, hidden)),
        }

    def arguments(self) -> dict[str, object]:
        own = {"moe_shared_expert_intermediate_size": self.shared, "moe_shared_expert_gate": True}
        return {**super().arguments(), **own}

    def states(self) -> tuple[str, ...]:
        return *super().states(), f"{_SHARED}linear_fc1", f"{_SHARED}linear_fc2"

    def cuts(self) -> tuple[Cut, ...]:
        return *super().cuts(), Cut("tensor", "shared expert's width", self.shared)

    def flops(self, hidden: int) -> Flops:
        linear = 2.0 * hidden * (3 * self.shared + 1)
        return replace(super().flops(hidden), linear=linear, selective=linear)

    def saved(self, at: Place) -> Saved:
        """Its input is the experts'. The gate keeps a number per token, and its other factor."""
        own, (gated, work) = super().saved(at), _gated_activations(self.shared, at)
        shared = gated + at.input + at.element / at.split
        return replace(
            own,
            whole=own.whole + shared,
            again=own.again + shared,
            workspace=max(own.workspace, work),
        )

    def sent(self, at: Place) -> dict[str, float]:
        return {**super().sent(at), "TP": at.pair(True)}

    def sizes(self) -> dict[str, int]:
        return {**super().sizes(), "width of the shared expert": self.shared}

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from size_problems({"shared_expert_intermediate_size": self.shared})


def _norm(hidden: int) -> dict[str, Mapping]:
    return {_NORM: plain("post_attention_layernorm.weight", (hidden,))}


def _gated_activations(ffn: int, at: Place) -> tuple[float, float]:
    """Bytes saved by a gated MLP per token between its matrices, and the workspace."""
    width = at.element * ffn / at.parallel.tensor
    return (3 if at.spec == "te" else 4) * width, 3 * width + 2 * at.element * at.hidden


def _gated(prefix: str, hf_prefix: str, ffn: int, hidden: int) -> dict[str, Mapping]:
    """The mappings of a gated MLP of width ``ffn``, dense or one expert."""
    return {
        f"{prefix}linear_fc1.weight": Mapping(
            tuple(f"{hf_prefix}{x}_proj.weight" for x in ("gate", "up")),
            ((ffn, hidden),) * 2,
            (RowSegment(0, 0, ffn), RowSegment(1, 0, ffn)),
            tp_dim=0,
            sections=(ffn, ffn),
            section_keys=("_w", "_v"),
            served=f"{hf_prefix}gate_up_proj.weight",
        ),
        f"{prefix}linear_fc2.weight": plain(f"{hf_prefix}down_proj.weight", (hidden, ffn), tp_dim=1),
    }
