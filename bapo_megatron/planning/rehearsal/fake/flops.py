"""FLOP counter of a rank's kernels: matrix products by their shapes, attention as executed.

Flash attention does two products for each pair of a query and a key forward and five backward (recomputed
scores, and the gradients of queries, keys, values and scores): Dao 2023, FlashAttention-2 (arXiv 2307.08691),
section 3.1. Of a causal chunk only unmasked pairs are counted. Used by ``meter.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.attention.varlen
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils.flop_counter import flop_registry

from bapo_megatron.planning.rehearsal.fake.values import known
from bapo_megatron.planning.rehearsal.transformer_engine.attention import named_arguments
from bapo_megatron.planning.rehearsal.transformer_engine.extension import MaskType

aten = torch.ops.aten
_FORWARD, _BACKWARD = 4, 10
"""FLOPs of a pair of a query and a key for each entry of a head: two and five products of two FLOPs."""


class FlopMeter:
    """FLOP counter of kernels: gives the meter, which makes it, the FLOPs of one call, and adds nothing up.

    ``chunks``, the (queries, keys) of each chunk of documents on this rank, must be set before the
    variable-length kernels run: their arguments are on the device.
    """

    def __init__(self) -> None:
        self.chunks: list[tuple[int, int]] = []

    def count(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
        """FLOPs of one kernel call; 0 for a kernel without products."""
        packet = func._overloadpacket
        if packet is torch.ops.torch_attn._varlen_attn:
            return self._varlen(args[0], _FORWARD)
        if packet is torch.ops.torch_attn._varlen_attn_backward:
            return self._varlen(args[1], _BACKWARD)
        if packet is aten._scaled_dot_product_flash_attention_for_cpu:
            return _dense(args[0], args[1], _causal(args, 4), _FORWARD)
        if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
            return _dense(args[1], args[2], _causal(args, 7), _BACKWARD)
        formula = flop_registry.get(packet)
        return int(formula(*args, **kwargs, out_val=out)) if formula else 0

    def count_te(self, kernel: str, args: Sequence[Any]) -> int:
        """FLOPs of one call of Transformer Engine's compiled part; 0 for a kernel without products."""
        if kernel == "generic_gemm":
            a, transposed_a, b = args[:3]
            return 2 * int(b.numel()) * int(a.shape[-2] if transposed_a else a.shape[-1])
        if kernel == "te_general_grouped_gemm":
            pairs = zip(args[0], args[2], strict=True)
            return sum(self.count_te("generic_gemm", (a, args[1], b)) for a, b in pairs)
        if kernel in ("fused_attn_fwd", "fused_attn_bwd"):
            named = named_arguments(kernel, tuple(args))
            each = _FORWARD if kernel == "fused_attn_fwd" else _BACKWARD
            heads, width = named["q"].shape[-2:]
            return int(each * heads * width * _te_pairs(named))
        return 0

    def _varlen(self, query: torch.Tensor, each: int) -> int:
        pairs = sum(_seen(queries, keys) for queries, keys in self.chunks)
        return each * query.shape[1] * query.shape[2] * pairs


def _dense(query: torch.Tensor, key: torch.Tensor, causal: bool, each: int) -> int:
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    return each * batch * heads * width * (_seen(queries, keys) if causal else queries * keys)


def _te_pairs(named: dict[str, Any]) -> int:
    """Unmasked pairs of a query and a key in a call of fused attention, by the bounds of its documents."""
    bounds = [known(named[name]) for name in ("cu_q", "cu_kv")]
    causal = "CAUSAL" in MaskType(named["mask"]).name
    if any(one is None for one in bounds):
        raise ValueError("fused attention: the bounds of its documents do not follow from the host's data")
    with unset_fake_temporarily():
        queries, keys = (one.diff().tolist() for one in bounds)  # type: ignore[union-attr]
    return sum(_seen(q, k) if causal else q * k for q, k in zip(queries, keys, strict=True) if q)


def _seen(queries: int, keys: int) -> int:
    """Pairs of causal attention, q k - q (q - 1) / 2, where the queries are the last q of the k keys."""
    return queries * keys - queries * (queries - 1) // 2


def _causal(args: Sequence[Any], place: int) -> bool:
    return bool(args[place]) if len(args) > place else False
