"""Model FLOPs of a decoder's forward pass, from its shape (as for MFU). Needs no torch.

For the speeds of `bapo plan`, and the cost by which packs are balanced. Matrix products (Chowdhery et al.
2022, PaLM, appendix B) and causal attention are counted; a multiply-add is two FLOPs. A backward pass costs
twice the forward pass. Used in ``planning/`` and this folder.
"""

from __future__ import annotations

from bapo_megatron.hf.config import ModelShape


def attention_matmuls(shape: ModelShape) -> int:
    """2 hidden head_dim (heads + kv_heads): entries of one layer's q, k, v and output projections."""
    return 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)


def mlp_matmuls(shape: ModelShape) -> int:
    """3 hidden ffn: entries of the matrices of one layer's MLP (gate, up, down) that a token passes.

    With experts: hidden (3 per_token expert_ffn + experts), those of its experts and of the router.
    """
    if shape.experts is not None:
        experts = shape.experts
        return shape.hidden * (3 * experts.per_token * experts.ffn + experts.count)
    return 3 * shape.hidden * shape.ffn


def head_flops_per_token(shape: ModelShape) -> float:
    """2 hidden vocab: forward FLOPs of the output layer for one token."""
    return 2.0 * shape.hidden * shape.vocab


def linear_flops_per_token(shape: ModelShape) -> float:
    """Forward FLOPs of all weight matrices for one token, output layer included, without attention scores."""
    per_layer = attention_matmuls(shape) + mlp_matmuls(shape)
    return 2.0 * shape.layers * per_layer + head_flops_per_token(shape)


def attention_flops(shape: ModelShape, n: float) -> float:
    """2 layers heads head_dim n^2: forward FLOPs of causal attention for a sequence of ``n`` tokens.

    Scores and weighted values take 2 heads head_dim FLOPs each for one of the n^2 / 2 causal pairs of tokens.
    """
    return 2.0 * shape.layers * shape.heads * shape.head_dim * n**2


def attention_weight(shape: ModelShape) -> float:
    """w of the cost n + w n^2 of n tokens: the relative cost of attention, in units of a token's linear cost.

    About 1e-5 for a 32B model: at n = 1 / w, some 98,000 tokens, attention costs as much as the matrices.
    """
    return attention_flops(shape, 1) / linear_flops_per_token(shape)
