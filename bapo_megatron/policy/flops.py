"""Model FLOPs: the arithmetic of a decoder's forward pass, counted from its shape. Needs no torch.

A multiply and an add are two FLOPs. Counted are the matrix products, as in model FLOPs utilization
(Chowdhery et al. 2022, PaLM, appendix B), and attention as causal: a query sees the keys before it.
A backward pass costs twice the forward pass.
"""

from __future__ import annotations

from bapo_megatron.hf.config import ModelShape


def attention_matmuls(shape: ModelShape) -> int:
    """Entries of one layer's matrices around the attention: queries, keys, values, output projection."""
    return 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)


def mlp_matmuls(shape: ModelShape) -> int:
    """Entries of one layer's MLP matrices: gate, up, down."""
    return 3 * shape.hidden * shape.ffn


def head_flops_per_token(shape: ModelShape) -> float:
    """Forward FLOPs of the output layer for one token."""
    return 2.0 * shape.hidden * shape.vocab


def linear_flops_per_token(shape: ModelShape) -> float:
    """Forward FLOPs of all matrices for one token, the output layer included, attention scores not."""
    per_layer = attention_matmuls(shape) + mlp_matmuls(shape)
    return 2.0 * shape.layers * per_layer + head_flops_per_token(shape)


def attention_flops(shape: ModelShape, n: float) -> float:
    """Forward FLOPs of attention (scores and weighted values), all layers, for a sequence of ``n`` tokens.

    Scores and values take 2 x heads x head_dim FLOPs each for a pair of tokens; n^2 / 2 pairs are causal.
    """
    return 2.0 * shape.layers * shape.heads * shape.head_dim * n**2


def attention_weight(shape: ModelShape) -> float:
    """Relative cost of attention: w such that n tokens cost ``n + w n^2``, in units of a token's linear cost.

    About 1e-5 for a 32B model: at n = 1 / w, some 98,000 tokens, attention costs as much as the matrices.
    """
    return attention_flops(shape, 1) / linear_flops_per_token(shape)
