"""Fused GPU kernels (SwiGLU, RMSNorm) as the memory that they allocate; they compute nothing.

Run eagerly, as on a CPU, they would allocate intermediates that a GPU never has. Used by
``cuda_device.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def install_swiglu() -> None:
    """Replace megatron's compiled SwiGLU, forward and backward, by the allocation of its outputs."""
    # Not before Transformer Engine is installed, which megatron looks for when it is imported.
    import megatron.core.fusions.fused_bias_swiglu as megatron_swiglu

    megatron_swiglu.swiglu = lambda y: y.new_empty(*y.shape[:-1], y.shape[-1] // 2)
    megatron_swiglu.swiglu_back = lambda _gradient, y: torch.empty_like(y)


def rms_norm(func: Any, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
    """torch's fused RMSNorm on CUDA: it saves its input and one number a row."""
    if not x.is_cuda or weight is None:
        return func(x, shape, weight, eps)
    return _FusedRMSNorm.apply(x, weight)  # type: ignore[no-untyped-call]


class _FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        if x.device != weight.device:
            raise RuntimeError(f"rms_norm: tensors on {x.device} and {weight.device}")
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
