"""Activation memory of ``bapo plan``: bytes that autograd saves for the backward pass, per token and layer.

Every entry is a tensor that autograd saves, once for each storage. ``torch`` is the spec of
``policy/model.py`` on a CPU, which the tests measure. ``te`` is Transformer Engine's, after Korthikanti et
al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), section 4,
adapted: no dropout and no score matrix (flash attention keeps one log-sum-exp for each head), grouped-query
attention, a gated MLP, and the fused RoPE and SwiGLU that ``policy/model.py`` asks for on a GPU.

Letters: h hidden, q and kv widths of queries and of keys, f MLP width; t TP size;
s ranks that norms are split over (t under sequence parallelism, else 1); b bytes of an activation.

In a layer with experts the MLP is one of the experts' width for each copy of a token that the rank's experts
process (``ExpertLoad``), with what routing and permutation keep. Used by ``memory.py`` and ``page.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from bapo_megatron.config import ParallelConfig
from bapo_megatron.hf.config import ModelShape
from bapo_megatron.planning.sizes import ExpertLoad, expert_load

Spec = Literal["te", "torch"]
Recompute = Literal["none", "selective", "full"]
_FP32, _INT64, _INT32 = 4, 8, 4


@dataclass(frozen=True)
class ActivationBytes:
    """Activation bytes for each token of a rank, by what holds them: layers, final norm, stage boundary."""

    layer: float
    """Saved by each layer."""
    transient: float
    """Recomputed in the backward pass, for one layer at a time."""
    final_norm: float
    """Saved by the last stage's final norm."""
    boundary: float
    """The output that a stage holds until its gradient comes back."""


def activation_bytes_per_token(
    shape: ModelShape,
    parallel: ParallelConfig,
    element: int,
    recompute: Recompute,
    spec: Spec,
    imbalance: float = 1.0,
) -> ActivationBytes:
    """The activation bytes under a recompute mode; ``policy/model.py`` says what each mode recomputes.

    ``imbalance``: of a model with experts, that of the busiest rank.
    """
    widths = _Widths.of(shape, parallel, element)
    layer = (_te_layer if spec == "te" else _torch_layer)(widths)
    if load := expert_load(shape, parallel, imbalance):
        layer = _with_experts(layer, element, shape, load, spec)
    everything = layer.always + layer.core + layer.mlp
    saved, transient = {
        "none": (everything, 0.0),
        "selective": (
            layer.always + layer.core_arguments + layer.mlp_arguments,
            max(layer.core_recomputed, layer.mlp_recomputed),
        ),
        "full": (layer.input, everything - layer.shared_input),
    }[recompute]
    return ActivationBytes(saved, transient, layer.norm, layer.input)


@dataclass(frozen=True)
class _Layer:
    """One layer's saved tensors by module; bytes for each token."""

    input: float
    norm: float
    always: float
    """Norm and projections of the attention: kept unless the whole layer is recomputed."""
    core: float
    """Core attention: the softmax of queries and keys, times the values."""
    core_arguments: float
    """Arguments of the core attention, kept instead of it if "selective" recomputes it; else all it keeps."""
    core_recomputed: float
    """Bytes that the recomputation of the core attention adds; 0 if "selective" leaves it out."""
    mlp: float
    """The MLP and its norm."""
    mlp_arguments: float
    mlp_recomputed: float
    shared_input: float
    """The layer's input, a part of the above that full recomputation holds already."""


@dataclass(frozen=True)
class _Widths:
    """Entries for each token of a rank; see the letters above."""

    b: int
    h: float
    q: float
    kv: float
    f: float
    heads: float
    kv_heads: float
    qk_norm: bool

    @classmethod
    def of(cls, shape: ModelShape, parallel: ParallelConfig, element: int) -> _Widths:
        t = parallel.tensor
        own = shape.attention
        heads, kv_heads, d = own.heads / t, own.kv_heads / t, own.head_dim
        h = shape.hidden / (t if parallel.sequence else 1)
        return cls(element, h, heads * d, kv_heads * d, shape.ffn / t, heads, kv_heads, own.qk_norm)

    @property
    def fused(self) -> float:
        """Bytes of the fused projection's output; the values stay a view of it."""
        return self.b * (self.q + 2 * self.kv)

    @property
    def copied_queries(self) -> float:
        """Bytes of the queries where they are no view of the fused output: several KV groups on a rank."""
        return self.b * self.q if self.kv_heads > 1 else 0.0


def _torch_layer(w: _Widths) -> _Layer:
    """torch's RMSNorm on a CPU keeps its input and the normalized input in float32, and a number a row.

    RoPE keeps a table for all layers together (``policy/positions.py``), too small to count.
    """
    norm = 2 * _FP32 * w.h + _FP32
    gated = 5 * w.b * w.f  # gate and up (2f), silu(gate), up once more (megatron adds a zero offset), product
    qk_norm = 0.0
    if w.qk_norm:
        qk_norm = _FP32 * (w.q + w.kv + w.heads + w.kv_heads)
        # Inputs that are float32 already are kept as they came, others as float32 copies.
        qk_norm += w.fused + w.copied_queries if w.b == _FP32 else _FP32 * (w.q + w.kv)
    shared_fused = w.fused if w.qk_norm and w.b == _FP32 else 0.0
    core = w.fused + w.b * w.q + _FP32 * w.heads  # padded q, k, v, padded output, log-sum-exp
    return _Layer(
        input=w.b * w.h,
        norm=norm,
        always=norm + w.b * w.h + qk_norm + w.b * w.q,
        core=core,
        core_arguments=(w.b * (w.q + w.kv) if w.qk_norm else w.copied_queries) + w.fused - shared_fused,
        core_recomputed=core,
        mlp=norm + w.b * w.h + gated,
        mlp_arguments=norm + w.b * w.h,
        mlp_recomputed=gated,
        shared_input=w.b * w.h if w.b == _FP32 else 0.0,
    )


def _te_layer(w: _Widths) -> _Layer:
    """Norms are fused into the matrix that follows and keep their input as it came; flash attention.

    Norms of queries and keys keep contiguous copies of their inputs, the attention queries, keys and values
    of its own (in a ring, in the last message that came). Nothing recomputes the attention alone: that would
    keep more, the fused projection's output too, in which the values lie.
    """
    norm = w.b * w.h + _FP32
    gated = 3 * w.b * w.f  # gate and up (2f), product
    qk_norm = w.b * (w.q + w.kv) + _FP32 * (w.heads + w.kv_heads) if w.qk_norm else 0.0
    core = w.b * (w.q + 2 * w.kv) + _FP32 * w.heads  # queries, keys, values, log-sum-exp
    return _Layer(
        input=w.b * w.h,
        norm=norm,
        always=norm + w.b * w.h + qk_norm + w.b * w.q,  # the last is also attention's output
        core=core,
        core_arguments=core,
        core_recomputed=0.0,
        mlp=norm + w.b * w.h + gated,
        mlp_arguments=w.b * w.h,
        mlp_recomputed=_FP32 + w.b * w.h + gated,
        shared_input=w.b * w.h,
    )


def _with_experts(layer: _Layer, b: int, shape: ModelShape, load: ExpertLoad, spec: Spec) -> _Layer:
    """The layer with experts in place of its MLP. Their norm is a module of its own in both specs."""
    assert shape.experts is not None
    routed = (_te_routed if spec == "te" else _torch_routed)(b, shape.hidden, shape.experts.count, load)
    # Of each routed token: numbers of its experts, and their weights after the softmax.
    routed += (_INT64 + _FP32) * shape.experts.per_token * load.routed
    arguments = layer.norm + layer.input  # the normalized input, which router and permutation read
    return replace(layer, mlp=arguments + routed, mlp_arguments=arguments, mlp_recomputed=routed)


def _torch_routed(b: int, hidden: int, experts: int, load: ExpertLoad) -> float:
    """megatron's SequentialMLP, and its permutation by torch's index and mask.

    The permutation keeps the mask and the weights of all experts, and the number of each copy's token. Of a
    copy: gate and up, silu(gate), up once more, product, product x weight, and the weight.
    """
    mask = (_FP32 + 1) * experts * load.routed + _INT64 * load.copies
    return mask + load.rows * (b * (hidden + 6 * load.width) + _FP32)


def _te_routed(b: int, hidden: int, experts: int, load: ExpertLoad) -> float:
    """Transformer Engine's grouped layer and its fused permutation.

    The permutation keeps a map of 2 experts + 1 numbers of each token. Of a copy: its input, gate and up, the
    product with the weight, which SwiGLU fuses; the weight; its place in the order of experts, if there are
    several.
    """
    row_map = _INT32 * (2 * experts + 1) * load.routed
    return row_map + load.rows * (b * (hidden + 3 * load.width) + _FP32 + _INT32 * (load.local > 1))
