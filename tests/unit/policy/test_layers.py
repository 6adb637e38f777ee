"""SwiGLU of torch's layers: values and gradients are megatron's own, bit for bit, and what it keeps."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

from bapo_megatron.policy.device import choose_router_matmul
from bapo_megatron.policy.layers import swiglu


def megatrons(stacked: Tensor) -> Tensor:
    """SwiGLU as megatron-core 0.16 has it without a fusion (``MLP.forward``); its offset is 0."""
    gate, up = torch.chunk(stacked, 2, dim=-1)
    return torch.nn.functional.silu(gate) * (up + 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 6), (7, 1, 34), (128, 1, 512)])
def test_swiglu_is_megatrons_bit_for_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = (3 * torch.randn(shape, generator=generator)).to(dtype)
    gradient = torch.randn(*shape[:-1], shape[-1] // 2, generator=generator).to(dtype)
    found = []
    for function in (swiglu, megatrons):
        stacked = values.clone().requires_grad_()
        product = function(stacked)
        product.backward(gradient)
        found.append((product.detach(), stacked.grad))
    (ours, our_gradient), (theirs, their_gradient) = found
    assert torch.equal(ours, theirs)
    assert our_gradient is not None
    assert their_gradient is not None
    assert torch.equal(our_gradient, their_gradient)


@pytest.mark.parametrize("te", [False, True])
def test_the_routers_product_is_that_of_the_layers(te: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Transformer Engine is installed, megatron would take its kernel, which a CPU does not have."""
    theirs = object()
    extension = SimpleNamespace(te_general_gemm=theirs)
    monkeypatch.setitem(sys.modules, "megatron.core.extensions.transformer_engine", extension)
    monkeypatch.setattr(moe_utils, "te_general_gemm", theirs, raising=False)
    choose_router_matmul(te)
    assert moe_utils.te_general_gemm is (theirs if te else None)
