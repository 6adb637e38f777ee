"""Patches of megatron-core's layers with experts, for machines without a GPU or without Transformer Engine.

``policy/device.py`` patches the all-to-all dispatcher for gloo where there is no GPU; ``policy/model.py``
defines the name of Transformer Engine's product, which the router asks for, where that package is missing.
Used by ``device.py`` and ``model.py``.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

_SPLITS = ("input_splits", "output_splits", "output_splits_tp")


def define_te_gemm() -> None:
    """Define Transformer Engine's product as missing, where it is: megatron's router asks for its name."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def adapt_to_gloo() -> None:
    """Patch megatron-core's dispatcher and its uneven gathers. Idempotent."""
    if mappings._gather_along_first_dim is _gather:
        return
    dispatcher: Any = MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = nullcontext()
    dispatcher._maybe_dtoh_and_synchronize = _read_splits
    global _plain_gather, _plain_scatter
    _plain_gather = mappings._gather_along_first_dim
    _plain_scatter = mappings._reduce_scatter_along_first_dim
    mappings._gather_along_first_dim = _gather
    mappings._reduce_scatter_along_first_dim = _reduce_scatter


_plain_gather: Any = None
_plain_scatter: Any = None


def _read_splits(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """Read the sizes of the messages on the host; on a GPU this is a copy on a stream of its own."""
    if point == dispatcher.cuda_dtoh_point:
        for name in _SPLITS:
            value = getattr(dispatcher, name)
            if isinstance(value, Tensor):
                setattr(dispatcher, name, value.numpy())
    return tokens_per_expert


def _gather(part: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
    """Gather parts of different lengths (ETP with EP), padded to the longest: gloo takes equal ones."""
    if output_split_sizes is None or group.size() == 1:
        return _plain_gather(part, group, use_global_buffer=use_global_buffer)
    sizes = [int(size) for size in output_split_sizes]
    pieces = _plain_gather(_padded(part, max(sizes)), group).split(max(sizes)) if max(sizes) else []
    kept = [piece[:size] for piece, size in zip(pieces, sizes, strict=False)]
    return torch.cat(kept) if kept else part


def _reduce_scatter(
    whole: Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
) -> Any:
    """Reduce-scatter into parts of different lengths, padded to the longest."""
    if input_split_sizes is None or group.size() == 1:
        return _plain_scatter(whole, group, use_global_buffer=use_global_buffer)
    sizes = [int(size) for size in input_split_sizes]
    if not max(sizes):
        return whole
    pieces = [_padded(piece, max(sizes)) for piece in whole.split(sizes)]
    return _plain_scatter(torch.cat(pieces), group)[: sizes[group.rank()]]


def _padded(part: Tensor, length: int) -> Tensor:
    found = part.new_zeros(length, *part.shape[1:])
    found[: len(part)] = part
    return found
