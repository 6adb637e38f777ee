"""Torch versions of Transformer Engine's kernels of fused and ring attention, for packed documents (thd).

The compiled functions take positional arguments, whose order differs by version: ``_FORWARD`` and
``_BACKWARD`` map their number to their names. Raises NotImplementedError for dropout, windows and other
layouts.

Shapes: T tokens, Q queries, K keys, H heads, G KV heads, D head_dim; ``_HQK`` is [heads, queries, keys].

In ring attention (context parallelism) a rank has two chunks of each document: its first and second half
here. ``cu_seqlens`` count the rank's tokens; log-sum-exps are packed, [heads, tokens].
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bapo_rehearsal.transformer_engine.extension import MaskType, has_values, kernel

_FORWARD = {
    29: "max_q max_kv training scale dropout zero layout bias mask softmax window cu_q cu_kv q k v type "
    "cu_q_padded cu_kv_padded",  # 2.11
    32: "max_q max_kv training scale dropout zero layout o_format scale_format bias mask softmax window "
    "bottom_right cu_q cu_kv q k v type cu_q_padded cu_kv_padded",  # 2.20
}
_BACKWARD = {
    27: "max_q max_kv scale dropout zero layout bias mask softmax window deterministic cu_q cu_kv q k v out "
    "grad type grad_type saved cu_q_padded cu_kv_padded",  # 2.11
    32: "max_q max_kv scale dropout zero layout o_format do_format grad_layout scale_format do_scale_format "
    "bias mask softmax window bottom_right deterministic cu_q cu_kv q k v out grad type saved cu_q_padded "
    "cu_kv_padded",  # 2.20
}


def named_arguments(kernel_name: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments of ``fused_attn_fwd`` or ``fused_attn_bwd`` by name."""
    names = (_FORWARD if kernel_name == "fused_attn_fwd" else _BACKWARD)[len(arguments)].split()
    return dict(zip(names, arguments, strict=False))


@kernel
def get_fused_attn_backend(*arguments: Any) -> Any:
    """cuDNN's fused attention backend for packs: available on sm90 and newer, none on sm80 and sm89.

    2.11 passes 18 arguments and expects a backend; later versions pass one object and expect a reason, too.
    """
    backends = sys.modules["transformer_engine_torch"].NVTE_Fused_Attn_Backend
    if torch.cuda.get_device_capability() >= (9, 0):
        backend, reason = backends.NVTE_F16_arbitrary_seqlen, ""
    else:
        backend, reason = backends.NVTE_No_Backend, "thd takes sm90 or newer"
    return backend if len(arguments) > 1 else (backend, reason)


@kernel
def fused_attn_fwd(*arguments: Any) -> list[Tensor]:
    """Output [tokens, heads, head_dim], log-sum-exps [tokens, heads, 1], generator state [2]."""
    call = _Call(named_arguments("fused_attn_fwd", arguments))
    q, v = call.q, call.v
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(*q.shape[:2], 1, dtype=torch.float32, device=q.device)
    rng_state = torch.empty(2, dtype=torch.int64, device=q.device)
    if has_values(q):
        for x in (out, lse, rng_state):
            x.zero_()  # rows between documents
        for document in call.documents():
            scores_HQK = call.scores(document)
            lse_HQ = scores_HQK.logsumexp(-1)
            p_HQK = (scores_HQK - lse_HQ[..., None]).exp()
            values = call.repeated(v, document.keys)
            out[document.queries] = torch.einsum("hqk,khd->qhd", p_HQK, values).to(out.dtype)
            lse[document.queries, :, 0] = lse_HQ.T
    return [out, lse, rng_state]


@kernel
def fused_attn_bwd(*arguments: Any) -> list[Tensor | None]:
    """Gradients of queries, keys and values; None for the bias and the softmax offset."""
    named = named_arguments("fused_attn_bwd", arguments)
    out, grad, (lse, *_) = named["out"], named["grad"], named["saved"]
    call = _Call(named)
    q, k, v = call.q, call.k, call.v
    grads = [torch.empty_like(x) for x in (q, k, v)]
    if has_values(q):
        dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
        for document in call.documents():
            rows, keys = document.queries, document.keys
            lse_HQ = lse[rows, :, 0].T
            p_HQK = (call.scores(document) - lse_HQ[..., None]).exp()
            grad_QHD, out_QHD = grad[rows].float(), out[rows].float()
            dp_HQK = torch.einsum("qhd,khd->hqk", grad_QHD, call.repeated(v, keys))
            delta_HQ = (grad_QHD * out_QHD).sum(-1).T
            ds_HQK = p_HQK * (dp_HQK - delta_HQ[..., None]) * call.scale
            dq[rows] = torch.einsum("hqk,khd->qhd", ds_HQK, call.repeated(k, keys))
            dk[keys] = call.summed(torch.einsum("hqk,qhd->khd", ds_HQK, q[rows].float()))
            dv[keys] = call.summed(torch.einsum("hqk,qhd->khd", p_HQK, grad_QHD))
        for result, value in zip(grads, (dq, dk, dv), strict=True):
            result.copy_(value)
    return [*grads, None, None]


@dataclass(frozen=True)
class _Document:
    """Row ranges of a document's queries and keys."""

    queries: slice
    keys: slice


class _Call:
    """Named arguments of one call, and operations shared by its forward and backward passes."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.q: Tensor = arguments["q"]
        self.k: Tensor = arguments["k"]
        self.v: Tensor = arguments["v"]
        self.scale: float = arguments["scale"]
        self._arguments = arguments
        if arguments["dropout"] or self.q.dim() != 3 or arguments["window"][0] != -1:
            raise NotImplementedError("attention with dropout, a sliding window, or another layout than thd")

    def documents(self) -> Iterator[_Document]:
        """Documents with queries and keys. Padding follows each, up to the start of the next."""
        lengths, starts = [], []
        for side in ("q", "kv"):
            bounds = self._arguments[f"cu_{side}"]
            padded = self._arguments[f"cu_{side}_padded"]
            lengths.append([end - start for start, end in pairwise(bounds.tolist())])
            starts.append((bounds if padded is None else padded).tolist())
        for queries, keys, first_q, first_k in zip(*lengths, *starts, strict=False):
            if queries and keys:
                yield _Document(slice(first_q, first_q + queries), slice(first_k, first_k + keys))

    def scores(self, document: _Document) -> Tensor:
        """Attention scores [heads, queries, keys], -inf where masked."""
        keys = self.repeated(self.k, document.keys)
        scores_HQK = torch.einsum("qhd,khd->hqk", self.q[document.queries].float(), keys) * self.scale
        if "CAUSAL" not in self._mask():
            return scores_HQK
        queries, count = scores_HQK.shape[1:]
        shift = count - queries if "BOTTOM_RIGHT" in self._mask() else 0
        seen = torch.ones(queries, count, dtype=torch.bool).tril(shift)
        return scores_HQK.masked_fill(~seen, float("-inf"))

    def repeated(self, x_KGD: Tensor, rows: slice) -> Tensor:
        """Rows of keys or values in float32, repeated for each query head."""
        return x_KGD[rows].float().repeat_interleave(self.q.shape[1] // x_KGD.shape[1], 1)

    def summed(self, grad_KHD: Tensor) -> Tensor:
        """Gradient of repeated keys or values, summed over the query heads that share them."""
        summed: Tensor = grad_KHD.unflatten(1, (self.k.shape[1], -1)).sum(2)
        return summed

    def _mask(self) -> str:
        return MaskType(self._arguments["mask"]).name


@kernel
def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half: int) -> Tensor:
    """One half of every document, of [tokens, heads, head_dim] or keys and values [2, tokens, ...]."""
    dim = _token_dim(tensor)
    shape = list(tensor.shape)
    shape[dim] //= 2
    out = tensor.new_empty(shape)
    if has_values(tensor):
        out.copy_(tensor.index_select(dim, _half(cu_seqlens, half)))
    return out


@kernel
def thd_second_half_lse_correction(lse: Tensor, step: Tensor, cu_seqlens: Tensor, packed: bool) -> None:
    """Merge a step's log-sum-exps of second halves into those of all rows, in place."""
    _must_be_packed(packed)
    if has_values(lse):
        rows = _half(cu_seqlens, 1)
        lse[:, rows] = torch.logaddexp(lse[:, rows], step[:, : rows.numel()].to(lse.dtype))


@kernel
def thd_read_second_half_lse(lse: Tensor, cu_seqlens: Tensor, packed: bool, tokens: int) -> Tensor:
    """Log-sum-exps of second halves, [heads, tokens]."""
    _must_be_packed(packed)
    out = lse.new_empty(lse.shape[0], tokens)
    if has_values(lse):
        rows = _half(cu_seqlens, 1)
        out.zero_()
        out[:, : rows.numel()] = lse[:, rows]
    return out


@kernel
def thd_out_correction(out: Tensor, step: Tensor, *rest: Tensor | bool) -> None:
    """Add a step's output, weighted by its share of the softmax, in place.

    2.11 adds all steps to zeros, with the final log-sum-exps. Later versions also pass the log-sum-exps from
    before the step, which rescale the sum so far.
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
    sum_THD = flat_THD[rows].float()
    if before:
        assert isinstance(before[0], Tensor)
        sum_THD = sum_THD * _share(before[0][:, rows], lse[:, rows])
    flat_THD[rows] = (sum_THD + step_THD * _share(step_lse[:, : rows.numel()], lse[:, rows])).to(out.dtype)


@kernel
def thd_grad_correction(grad: Tensor, step: Tensor, cu_seqlens: Tensor, first: str, second: str) -> None:
    """``add`` a step's gradient to the halves of every document, ``copy`` it there, or skip them (``none``).

    If one half is skipped, ``step`` has only the rows of the other.
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
    """Share of a part in the softmax, [tokens, heads, 1], from log-sum-exps [heads, tokens]."""
    return (part - whole).exp().T[..., None]


def _token_dim(tensor: Tensor) -> int:
    return 0 if tensor.dim() == 3 else 1


def _half(cu_seqlens: Tensor, half: int) -> Tensor:
    """Rows of the first (0) or second (1) half of every document."""
    parts = []
    for start, end in pairwise(cu_seqlens.tolist()):
        middle = (start + end) // 2
        parts.append(torch.arange(start, middle) if half == 0 else torch.arange(middle, end))
    return torch.cat(parts)


def _must_be_packed(packed: bool) -> None:
    if not packed:
        raise NotImplementedError("log-sum-exps that are not packed, as cuDNN before 9.6 gives them")
