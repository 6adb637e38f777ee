"""Chunked, vocabulary-parallel output layer: log-probs, entropies and loss from hidden states.

    log pi(y) = z_y / t - logsumexp(z / t)
    H = logsumexp(z / t) - sum_v pi(v) z_v / t
    d log pi(y) / dz_v = (1[v = y] - pi(v)) / t
    dH / dz_v = -pi(v) (log pi(v) + H) / t

with logits z = W h of a token's hidden state h, output weights W, and temperature t. ``OutputHead.stats``
returns log pi and H per token, ``OutputHead.sums`` a loss vector, whose element 0 is differentiable.

Logits are float32 from the matmul on, whatever the dtype of h and W, and are divided by t in float32: the
arithmetic of SGLang 0.5.23 under ``--enable-fp32-lm-head`` (``LogitsProcessor._compute_lm_head``,
``Sampler.forward``). bfloat16 logits would be off by up to 1/512 of their size, 0.06 nats at a logit of 30.

Each chunk's matmul, softmax, loss and gradient finish before the next chunk begins, so that a pack's logits
are never all in memory (40 GB in float32 for 64k tokens and a vocabulary of 152k) and none is computed twice.
This works because the loss is additive over tokens: a token's gradient needs no other token. So a ``TokenFn``
sees one chunk at a time; sums over whole sequences must be computed beforehand.

``rows_N``: rows of the hidden states whose logits are needed (None: all), in the order of the labels or the
batch; copied one chunk at a time.

Shapes: ``_T`` tokens, ``_N`` tokens with needed logits, ``_C`` tokens of a chunk, ``_H`` hidden size, ``_V``
this rank's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.tensor_types import MicroBatch, TokenFn, TokenStats

_CACHED_LOGITS = 1 << 19
"""CPU softmax block size in logits: 2 MiB of float32, which fits the cache."""
_SOFTMAX_LOGITS = 1 << 27
"""GPU softmax block size in logits: 512 MiB of float32 beside the chunk's logits."""


@dataclass(frozen=True)
class OutputHead:
    """Chunked output layer of one policy. ``stats`` returns each label's log-prob and the entropy at its
    position; ``sums`` returns a loss vector, of which only element 0 is differentiable. Holds settings only:
    the weights are arguments. Calls are collective over the tensor-parallel group."""

    temperature: float
    """Divides the logits."""
    chunk_tokens: int
    group: dist.ProcessGroup | None = None
    """Tensor-parallel group with equal vocabulary shards in rank order (None: unsharded); each rank has all
    tokens and gets the hidden-state gradient of its shard."""
    adds_in_float32: bool = False
    """Whether the backward pass adds the weight gradient to ``main_grad`` itself, in float32, as the layers
    do (``model.py``); if not, autograd gets it, rounded to the weights' dtype."""

    @torch.no_grad()
    def stats(
        self, hidden_TH: Tensor, weight_VH: Tensor, label_N: Tensor, rows_N: Tensor | None = None
    ) -> TokenStats:
        """Log-probs of the labels and entropies at their positions, float32, both [N], without gradients."""
        log_prob_N, entropy_N = hidden_TH.new_empty(2, label_N.numel(), dtype=torch.float32)
        for part, _, logits_CV in self._logits(hidden_TH, weight_VH, rows_N):
            log_prob_N[part], entropy_N[part], _ = self._stats(logits_CV, label_N[part])
        return TokenStats(log_prob_N, entropy_N)

    def sums(
        self,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        batch: MicroBatch,
        loss: TokenFn,
        rows_N: Tensor | None = None,
    ) -> Tensor:
        """Return ``loss`` summed over the tokens of ``batch``, float64; only element 0 is differentiable."""
        total: Tensor = _LossAndGradient.apply(hidden_TH, weight_VH, batch, loss, self, rows_N)  # type: ignore[no-untyped-call]
        return total

    def _logits(
        self, hidden_TH: Tensor, weight_VH: Tensor, rows_N: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield slice, hidden states and float32 logits / t of each chunk; valid until the next chunk."""
        tokens = hidden_TH.size(0) if rows_N is None else rows_N.numel()
        size = min(self.chunk_tokens, tokens)
        buffer = hidden_TH.new_empty(size, weight_VH.size(0), dtype=torch.float32)
        # A tensor: CUDA multiplies by a Python number's reciprocal, which rounds unlike SGLang.
        temperature = buffer.new_full((1,), self.temperature)
        matmul = _matmul_into_float32(weight_VH)
        for start in range(0, tokens, size):
            part = slice(start, min(start + size, tokens))
            hidden_CH = hidden_TH[part] if rows_N is None else hidden_TH[rows_N[part]]
            logits = buffer[: part.stop - start]
            matmul(hidden_CH, logits)
            yield part, hidden_CH, logits if self.temperature == 1.0 else logits.div_(temperature)

    def _stats(self, logits_CV: Tensor, label_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-prob, entropy and logsumexp of each token of a chunk, float32."""
        log_norm_C, mean_C = _local_softmax(logits_CV)
        column_C, mine_C = self._local_columns(label_C, logits_CV.size(1))
        peak_C = self._all_reduce(log_norm_C.clone(), dist.ReduceOp.MAX)
        mass_C = (log_norm_C - peak_C).exp()
        chosen_C = logits_CV.gather(1, column_C[:, None])[:, 0] * mine_C
        sums = torch.stack([mass_C, mass_C * mean_C, chosen_C])
        norm_C, weighted_C, chosen_C = self._all_reduce(sums, dist.ReduceOp.SUM)
        log_norm_C = norm_C.log() + peak_C
        log_prob_C, entropy_C = chosen_C - log_norm_C, log_norm_C - weighted_C / norm_C
        return log_prob_C.float(), entropy_C.float(), log_norm_C.float()

    def _local_columns(self, label_C: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Labels as columns of this rank's vocabulary shard (0 if elsewhere), and whether they are here."""
        first = (self.group.rank() if self.group is not None else 0) * width
        mine_C = (label_C >= first) & (label_C < first + width)
        return torch.where(mine_C, label_C - first, 0), mine_C

    def _all_reduce(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(value, op, self.group)
        return value


class _LossAndGradient(torch.autograd.Function):
    """Autograd function of ``OutputHead.sums``: forward computes the sums and, chunk by chunk, the gradients,
    which backward scales, and adds to ``main_grad`` if ``adds_in_float32``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        batch: MicroBatch,
        loss: TokenFn,
        head: OutputHead,
        rows_N: Tensor | None,
    ) -> Tensor:
        grad_hidden_TH = torch.zeros_like(hidden_TH)
        # Accumulate the chunks' gradients in float32, whatever the weights' dtype.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        total: Tensor | None = None
        for part, hidden_CH, logits_CV in head._logits(hidden_TH, weight_VH, rows_N):
            chunk = batch.take(part)
            log_prob_C, entropy_C, log_norm_C = head._stats(logits_CV, chunk.label_T)
            sums, grad_C, entropy_grad_C = _sums_and_gradient(log_prob_C, entropy_C, chunk, loss)
            total = sums if total is None else total + sums
            # g replaces the logits; then -grad g W and -grad g^T h, over the temperature.
            column_C, mine_C = head._local_columns(chunk.label_T, weight_VH.size(0))
            logits_CV.sub_(log_norm_C[:, None])
            if entropy_grad_C is None:  # g = pi - 1[label]
                chosen_C, gap_CV = mine_C.float(), logits_CV.exp_()
            else:
                # With the gradients a and b by log pi and H, and c = |a| + |b| to replace a:
                size_C = grad_C.abs() + entropy_grad_C.abs()
                share_C, entropy_share_C = (
                    torch.where(size_C > 0, one_C / size_C, 0.0) for one_C in (grad_C, entropy_grad_C)
                )
                gap_CV = _with_entropy(logits_CV, share_C + entropy_share_C * entropy_C, entropy_share_C)
                chosen_C, grad_C = mine_C * share_C, size_C
            gap_CV.scatter_add_(1, column_C[:, None], -chosen_C[:, None])
            gap = gap_CV.to(weight_VH.dtype)
            scale = (-grad_C / head.temperature)[:, None]  # float32, so that a token's weight is not rounded
            if rows_N is None:
                torch.mm(gap, weight_VH, out=grad_hidden_TH[part]).mul_(scale)
            else:
                grad_hidden_TH.index_copy_(0, rows_N[part], torch.mm(gap, weight_VH).mul_(scale))
            _add_product(grad_weight_VH, gap, (hidden_CH * scale).to(weight_VH.dtype))
            del gap  # free it before the next chunk's
        ctx.save_for_backward(grad_hidden_TH, grad_weight_VH)
        ctx.dtype = weight_VH.dtype
        ctx.main_grad_VH = weight_VH.main_grad if head.adds_in_float32 else None  # type: ignore[attr-defined]
        assert total is not None
        return total

    @staticmethod
    def backward(ctx: Any, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_TH, grad_weight_VH = ctx.saved_tensors
        scale = grad_sums[0]
        grad_hidden_TH = grad_hidden_TH * scale.to(grad_hidden_TH.dtype)
        if ctx.main_grad_VH is not None:
            ctx.main_grad_VH.addcmul_(grad_weight_VH, scale.to(grad_weight_VH.dtype))
            return grad_hidden_TH, None, None, None, None, None
        grad_weight_VH *= scale.to(grad_weight_VH.dtype)
        return grad_hidden_TH, grad_weight_VH.to(ctx.dtype), None, None, None, None


def _sums_and_gradient(
    log_prob_C: Tensor, entropy_C: Tensor, chunk: MicroBatch, loss: TokenFn
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The vector of ``loss`` over a chunk, and element 0's gradients by log-probs and entropies (or None)."""
    with torch.enable_grad():
        stats = TokenStats(*(one_C.detach().requires_grad_() for one_C in (log_prob_C, entropy_C)))
        sums = loss(stats, chunk)
        grad_C, entropy_grad_C = torch.autograd.grad(sums[0], stats, allow_unused=True)
    grad_C = torch.zeros_like(log_prob_C) if grad_C is None else grad_C
    return sums.detach().double(), grad_C, entropy_grad_C


def _with_entropy(log_prob_CV: Tensor, constant_C: Tensor, factor_C: Tensor) -> Tensor:
    """Replace log pi by ``pi (constant + factor log pi)`` in place, block by block."""
    for part in _blocks(log_prob_CV):
        weighted_CV = torch.addcmul(constant_C[part, None], factor_C[part, None], log_prob_CV[part])
        log_prob_CV[part].exp_().mul_(weighted_CV)
    return log_prob_CV


def _blocks(logits_CV: Tensor) -> Iterator[slice]:
    """Yield slices of a chunk's rows, small enough to need little extra memory."""
    rows, width = logits_CV.shape
    block = min(rows, max(1, (_SOFTMAX_LOGITS if logits_CV.is_cuda else _CACHED_LOGITS) // width))
    for start in range(0, rows, block):
        yield slice(start, min(start + block, rows))


def _matmul_into_float32(weight_VH: Tensor) -> Callable[[Tensor, Tensor], object]:
    """Return a function out = hidden weight^T that accumulates and stores in float32.

    cuBLAS takes bfloat16 and returns float32. A CPU has no such matmul: there the weights are cast to
    float32, once for all chunks; bfloat16 products are exact in float32, so both sum the same numbers.
    """
    if weight_VH.dtype == torch.float32:
        return lambda hidden_CH, out: torch.mm(hidden_CH, weight_VH.t(), out=out)
    if weight_VH.is_cuda:
        return lambda hidden_CH, out: torch.mm(hidden_CH, weight_VH.t(), out_dtype=torch.float32, out=out)
    wide_VH = weight_VH.float()
    return lambda hidden_CH, out: torch.mm(hidden_CH.float(), wide_VH.t(), out=out)


def _local_softmax(logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    """logsumexp(z) and sum_v softmax(z)_v z_v of each row, by blocks; float64 on a CPU, float32 on a GPU."""
    softmax, dtype = (_gpu_softmax, torch.float32) if logits_CV.is_cuda else (_cpu_softmax, torch.float64)
    log_norm_C, mean_C = logits_CV.new_empty(2, logits_CV.size(0), dtype=dtype)
    buffer: Tensor | None = None
    for part in _blocks(logits_CV):
        logits = logits_CV[part]
        buffer = torch.empty_like(logits) if buffer is None else buffer
        log_norm_C[part], mean_C[part] = softmax(logits, buffer[: logits.size(0)])
    return log_norm_C, mean_C


def _gpu_softmax(logits_CV: Tensor, buffer_CV: Tensor) -> tuple[Tensor, Tensor]:
    """logsumexp(z) and mean, by one fused kernel with tree summation."""
    prob_CV = torch.softmax(logits_CV, 1, out=buffer_CV)
    peak_C, column_C = logits_CV.max(1)
    log_norm_C = peak_C - prob_CV.gather(1, column_C[:, None])[:, 0].log()
    return log_norm_C, torch.linalg.vecdot(prob_CV, logits_CV)


def _cpu_softmax(logits_CV: Tensor, buffer_CV: Tensor) -> tuple[Tensor, Tensor]:
    """logsumexp(z) = log sum e^d + max z, mean = sum d e^d / sum e^d + max z, with d = z - max z.

    ``sum`` adds pairwise. torch's CPU softmax adds sequentially, which at 49,152 float32 numbers makes
    entropies 2e-4 nats too low. max z, up to a hundred times the entropy, is added in float64, and cancels.
    """
    peak_C1 = logits_CV.amax(1, keepdim=True)
    gap_CV = torch.sub(logits_CV, peak_C1, out=buffer_CV)
    mass_CV = gap_CV.exp()
    total_C, weighted_C, peak_C = mass_CV.sum(1), gap_CV.mul_(mass_CV).sum(1), peak_C1[:, 0].double()
    return peak_C + total_C.double().log(), peak_C + weighted_C.double() / total_C


def _add_product(total_VH: Tensor, gap_CV: Tensor, hidden_CH: Tensor) -> None:
    """Add gap^T hidden to the total, whose dtype may be wider."""
    if total_VH.dtype == gap_CV.dtype:
        total_VH.addmm_(gap_CV.t(), hidden_CH)
    else:
        total_VH += gap_CV.t() @ hidden_CH
