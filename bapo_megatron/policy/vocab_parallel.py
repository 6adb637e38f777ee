"""Log-prob and entropy from vocabulary-parallel logits, in chunks over tokens.

For logits z of one token, at temperature t:

    log pi(y) = z_y / t - logsumexp(z / t)
    H = logsumexp(z / t) - sum_v pi(v) z_v / t

Only one chunk of float32 softmax exists at a time, forward and backward: a pack of 64k tokens with 152k
entries would need 40 GB at once. The backward pass computes the softmax of each chunk anew.

Shapes: ``_TV`` [tokens, this rank's part of the vocabulary], ``_T`` [tokens].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def log_prob_and_entropy(
    logits_TV: Tensor,
    label_T: Tensor,
    temperature: float,
    chunk_tokens: int,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the labels (differentiable) and entropies (not), float32, both [tokens].

    ``group`` holds the parts of the vocabulary in rank order, equal in size; None for the whole.
    """
    log_prob_T, entropy_T = _LogProbEntropy.apply(  # type: ignore[no-untyped-call]
        logits_TV, label_T, temperature, chunk_tokens, group
    )
    return log_prob_T, entropy_T


class _LogProbEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        label_T: Tensor,
        temperature: float,
        chunk_tokens: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        local_label_T, mine_T = _local_labels(label_T, logits_TV.size(1), group)
        log_prob_T, entropy_T, log_norm_T = (
            torch.empty(label_T.numel(), dtype=torch.float32, device=logits_TV.device) for _ in range(3)
        )
        for part in _chunks(label_T.numel(), chunk_tokens):
            scaled = logits_TV[part].float() / temperature
            peak = _all_reduce(scaled.amax(1), dist.ReduceOp.MAX, group)
            exp = (scaled - peak[:, None]).exp()
            chosen = scaled.gather(1, local_label_T[part, None])[:, 0] * mine_T[part]
            sums = torch.stack([exp.sum(1), (exp * scaled).sum(1), chosen])
            norm, weighted, chosen = _all_reduce(sums, dist.ReduceOp.SUM, group)
            log_norm_T[part] = norm.log() + peak
            log_prob_T[part] = chosen - log_norm_T[part]
            entropy_T[part] = log_norm_T[part] - weighted / norm
        ctx.save_for_backward(logits_TV, local_label_T, mine_T, log_norm_T)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.mark_non_differentiable(entropy_T)
        return log_prob_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_log_prob_T: Tensor, _grad_entropy_T: Tensor) -> tuple[Tensor | None, ...]:
        """d log pi(y) / dz_v = (1[v = y] - pi(v)) / t."""
        logits_TV, local_label_T, mine_T, log_norm_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        for part in _chunks(local_label_T.numel(), ctx.chunk_tokens):
            scaled = logits_TV[part].float() / ctx.temperature
            grad = -(scaled - log_norm_T[part, None]).exp()
            grad.scatter_add_(1, local_label_T[part, None], mine_T[part, None].to(grad.dtype))
            grad *= grad_log_prob_T[part, None] / ctx.temperature
            grad_TV[part] = grad.to(grad_TV.dtype)
        return grad_TV, None, None, None, None


def _local_labels(label_T: Tensor, width: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Labels as columns of this rank's part (0 where they lie elsewhere), and whether they lie here."""
    first = (group.rank() if group is not None else 0) * width
    mine_T = (label_T >= first) & (label_T < first + width)
    return torch.where(mine_T, label_T - first, 0), mine_T


def _all_reduce(value: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(value, op, group)
    return value


def _chunks(tokens: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]
