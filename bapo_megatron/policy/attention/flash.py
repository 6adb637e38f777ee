"""Flash attention of packs (GPU, half precision): one call of torch's variable-length kernel for all chunks.

Called by ``core.py`` in every layer. It needs torch 2.11, which ``device.varlen_problem`` checks. The
kernel's causal mask is aligned to the last query and the last key (bottom right), as a document's chunk
needs: its queries are the last of the keys that they see.

Shapes: ``_THD`` [tokens of the pack, heads, head_dim], ``_LHD`` the same for the tokens on this rank,
``_KHD`` for the keys of its chunks, end to end. Used by ``core.py``.
"""

from __future__ import annotations

from functools import lru_cache
from inspect import signature
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from bapo_megatron.policy.attention.context_parallel import document_chunks


def flash_attention(
    query_LHD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    bounds: tuple[int, ...],
    size: int,
    rank: int,
    scale: float,
) -> Tensor:
    """Attention [tokens, heads, head_dim] of this rank's queries; documents ``bounds[d]:bounds[d + 1]``."""
    plan = _key_plan(bounds, size, rank, query_LHD.device)
    if size > 1:  # two chunks of a document see overlapping keys: (2 x size + 1) chunks instead of 2 x size
        key_THD, value_THD = key_THD[plan.key_rows], value_THD[plan.key_rows]
    return _varlen(query_LHD, key_THD, value_THD, plan, scale)


def _varlen(query_LHD: Tensor, key_KHD: Tensor, value_KHD: Tensor, plan: _KeyPlan, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # torch 2.10

    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}
    groups = query_LHD.size(1) // key_KHD.size(1)
    if "enable_gqa" in signature(varlen_attn).parameters:
        options["enable_gqa"] = groups > 1
    else:  # torch 2.11
        key_KHD, value_KHD = (x.repeat_interleave(groups, 1) for x in (key_KHD, value_KHD))
    bounds = plan.query_bounds, plan.key_bounds, plan.most_queries, plan.most_keys
    return cast(Tensor, varlen_attn(query_LHD, key_KHD, value_KHD, *bounds, **options))


class _KeyPlan:
    """The arguments of the variable-length kernel for a rank's chunks: bounds of queries and keys."""

    def __init__(self, bounds: tuple[int, ...], size: int, rank: int, device: torch.device) -> None:
        parts = [s for s in document_chunks(bounds, size, rank) if s.queries]
        keys = [part.last_key - part.first_key for part in parts]
        queries = [part.queries for part in parts]
        rows = torch.cat([torch.arange(part.first_key, part.last_key) for part in parts])
        bounds_of = [torch.tensor([0, *accumulate(counts)], dtype=torch.int32) for counts in (queries, keys)]
        self.key_rows, self.query_bounds, self.key_bounds = (
            x.to(device, non_blocking=True) for x in (rows, *bounds_of)
        )
        self.most_queries, self.most_keys = max(queries), max(keys)


_key_plan = lru_cache(maxsize=16)(_KeyPlan)  # every layer of a micro-batch needs the same plan
