"""Ring attention kernels in torch, for context parallelism over packed documents (thd).

Transformer Engine calls them between the steps of its ring. A rank holds two chunks of each document, one
after the other: its first and its second half here. ``cu_seqlens`` are those of the rank's tokens;
log-sum-exps are packed, [heads, tokens]. Used by ``installation.py``.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from bapo_megatron.planning.rehearsal.transformer_engine.kernel import has_values, kernel


@kernel
def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half: int) -> Tensor:
    """One half of every document: of [tokens, heads, head_dim] or of keys and values, [2, tokens, ...]."""
    dim = _token_dim(tensor)
    shape = list(tensor.shape)
    shape[dim] //= 2
    out = tensor.new_empty(shape)
    if has_values(tensor):
        out.copy_(tensor.index_select(dim, _half(cu_seqlens, half)))
    return out


@kernel
def thd_second_half_lse_correction(lse: Tensor, step: Tensor, cu_seqlens: Tensor, packed: bool) -> None:
    """Join a step's log-sum-exps, which are of second halves, into those of all rows, in place."""
    _must_be_packed(packed)
    if has_values(lse):
        rows = _half(cu_seqlens, 1)
        lse[:, rows] = torch.logaddexp(lse[:, rows], step[:, : rows.numel()].to(lse.dtype))


@kernel
def thd_read_second_half_lse(lse: Tensor, cu_seqlens: Tensor, packed: bool, tokens: int) -> Tensor:
    """The log-sum-exps of second halves, [heads, tokens]."""
    _must_be_packed(packed)
    out = lse.new_empty(lse.shape[0], tokens)
    if has_values(lse):
        rows = _half(cu_seqlens, 1)
        out.zero_()
        out[:, : rows.numel()] = lse[:, rows]
    return out


@kernel
def thd_out_correction(out: Tensor, step: Tensor, *rest: Tensor | bool) -> None:
    """Add a step's output by its share of the softmax, in place.

    2.11 adds up all steps in zeros, with the final log-sum-exps. Later versions pass those from before the
    step, too: what is there already is scaled by them.
    """
    *before, lse, step_lse, cu_seqlens, only_second_half, packed = rest
    assert isinstance(lse, Tensor)
    assert isinstance(step_lse, Tensor)
    assert isinstance(cu_seqlens, Tensor)
    _must_be_packed(bool(packed))
    if not has_values(out):
        return
    rows = _half(cu_seqlens, 1) if only_second_half else torch.arange(int(cu_seqlens[-1]))
    flat_THD = out.view(-1, lse.shape[0], step.shape[-1])
    step_THD = step.reshape(-1, *step.shape[-2:])[: rows.numel()].float()
    held_THD = flat_THD[rows].float()
    if before:
        assert isinstance(before[0], Tensor)
        held_THD = held_THD * _share(before[0][:, rows], lse[:, rows])
    flat_THD[rows] = (held_THD + step_THD * _share(step_lse[:, : rows.numel()], lse[:, rows])).to(out.dtype)


@kernel
def thd_grad_correction(grad: Tensor, step: Tensor, cu_seqlens: Tensor, first: str, second: str) -> None:
    """``add`` a step's gradient to the halves of every document, ``copy`` it there, or leave them (``none``).

    Where one half is left alone, ``step`` holds the other alone.
    """
    if not has_values(grad):
        return
    dim = _token_dim(grad)
    for half, how in enumerate((first, second)):
        if how == "none":
            continue
        rows = _half(cu_seqlens, half)
        alone = "none" in (first, second)
        value = step.narrow(dim, 0, rows.numel()) if alone else step.index_select(dim, rows)
        if how == "add":
            value = grad.index_select(dim, rows) + value
        grad.index_copy_(dim, rows, value.to(grad.dtype))


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """The part's share of the softmax, [tokens, heads, 1], from log-sum-exps [heads, tokens]."""
    return (part - whole).exp().T[..., None]


def _token_dim(tensor: Tensor) -> int:
    return 0 if tensor.dim() == 3 else 1


def _half(cu_seqlens: Tensor, half: int) -> Tensor:
    """Rows of the first (0) or the second (1) half of every document."""
    parts = []
    for start, end in pairwise(cu_seqlens.tolist()):
        middle = (start + end) // 2
        parts.append(torch.arange(start, middle) if half == 0 else torch.arange(middle, end))
    return torch.cat(parts)


def _must_be_packed(packed: bool) -> None:
    if not packed:
        raise NotImplementedError("log-sum-exps that are not packed, as cuDNN before 9.6 gives them")
