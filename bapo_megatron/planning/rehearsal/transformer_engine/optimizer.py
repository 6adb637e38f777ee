"""Multi-tensor optimizer kernels in torch: AdamW, the norm of a gradient, and scaling.

Without values (fake tensors) they only allocate what the compiled ones would. Used by ``installation.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bapo_megatron.planning.rehearsal.transformer_engine.extension import has_values, kernel

_ADAMW = 1


@kernel
def multi_tensor_adam(
    _chunk_size: int,
    _overflow: Tensor,
    lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One step of AdamW, in place; ``lists`` are gradients, parameters, first and second moments."""
    if mode != _ADAMW:
        raise NotImplementedError("Adam whose weight decay is part of the gradient")
    first_scale, second_scale = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for grad, parameter, first, second in zip(*lists[:4], strict=True):
        if not has_values(parameter):
            continue
        first.mul_(beta1).add_(grad.float(), alpha=1 - beta1)
        second.mul_(beta2).add_(grad.float().square(), alpha=1 - beta2)
        change = (first / first_scale) / ((second / second_scale).sqrt() + eps)
        parameter.sub_(lr * (change + weight_decay * parameter))


@kernel
def multi_tensor_l2norm(
    _chunk_size: int, _overflow: Tensor, lists: Sequence[Sequence[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """The Euclidean norm of all tensors, [1], and of each one (empty unless it is asked for)."""
    tensors = lists[0]
    norm, norms = (
        torch.zeros(size, dtype=torch.float32, device=tensors[0].device)
        for size in (1, len(tensors) if per_tensor else 0)
    )
    if has_values(tensors[0]):
        each = torch.stack([tensor.float().norm() for tensor in tensors])
        norm.copy_(each.norm())
        if per_tensor:
            norms.copy_(each)
    return norm, norms


@kernel
def multi_tensor_scale(
    _chunk_size: int, _overflow: Tensor, lists: Sequence[Sequence[Tensor]], scale: float | Tensor
) -> None:
    """Each tensor of the first list times ``scale``, written to its counterpart in the second."""
    for source, target in zip(*lists, strict=True):
        if has_values(source):
            target.copy_(source * scale)
