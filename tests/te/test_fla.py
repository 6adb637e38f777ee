"""The call of flash-linear-attention's kernels: by recorded signatures, and by the package where it is.

Interpreted by triton 3.8.0 on a CPU, the kernels of fla-core 0.6.0 agreed with the rule in float64 to 5e-7 in
float32 and to 0.001 in float16, outputs and gradients, at commit 57efc37a (tests/support/fla_interpreter.py).
On a GPU every run compares them before its policy is built (trainer/kernel_check.py).
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from inspect import Parameter, signature
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bapo_megatron.layers.delta_net import CHUNK
from bapo_megatron.policy.delta_net import chunked_rule, gated_delta_rule, kernel_rule
from tests.unit.policy.test_delta_net import BOUNDS, CHANNELS, KIND, inputs

ROOT = Path(__file__).parents[2]
needs_fla = pytest.mark.skipif(
    not (find_spec("fla") and find_spec("triton")),
    reason="fla-core and triton are not installed: `make cluster`",
)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    cu_seqlens: torch.Tensor,
    chunk_indices: torch.Tensor,
) -> tuple[torch.Tensor, None]:
    """As of fla-core 0.6.0, with what we give: x [1, tokens, channels], weight [channels, taps]."""
    assert activation == "silu"
    assert weight is not None
    assert x.shape == (1, BOUNDS[-1], CHANNELS)
    assert weight.shape == (CHANNELS, KIND.kernel)
    check_documents(cu_seqlens, chunk_indices)
    parts = [F.pad(x[:, a:b].mT, (KIND.kernel - 1, 0)) for a, b in pairwise(cu_seqlens.tolist())]
    mixed = [F.silu(F.conv1d(part, weight[:, None], groups=len(weight))).mT for part in parts]
    return torch.cat(mixed, 1), None


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor,
    chunk_indices: torch.Tensor,
) -> tuple[torch.Tensor, None]:
    """As of fla-core 0.6.0, with what we give: [1, tokens, heads, width], values that share keys."""
    assert use_qk_l2norm_in_kernel
    assert scale is None, "1 / sqrt(width)"
    assert q.shape == k.shape == (1, BOUNDS[-1], KIND.key_heads, KIND.key_dim)
    assert v.shape == (1, BOUNDS[-1], KIND.value_heads, KIND.value_dim)
    assert g.shape == beta.shape == v.shape[:3]
    check_documents(cu_seqlens, chunk_indices)
    bounds = pairwise(cu_seqlens.tolist())
    parts = [gated_delta_rule(*(x[:, a:b] for x in (q, k, v, g, beta))) for a, b in bounds]
    return torch.cat(parts, 1), None


def check_documents(cu_seqlens: torch.Tensor, chunk_indices: torch.Tensor) -> None:
    assert cu_seqlens.tolist() == list(BOUNDS)
    counts = [-(-(b - a) // CHUNK) for a, b in pairwise(BOUNDS)]
    assert chunk_indices.tolist() == [[d, n] for d, count in enumerate(counts) for n in range(count)]


def test_our_call_gives_what_torchs_rule_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """With functions of the package's signatures, in torch: layouts, names and defaults of the arguments."""
    for name, function in (
        ("fla.modules.causal_conv1d", causal_conv1d),
        ("fla.ops.gated_delta_rule", chunk_gated_delta_rule),
    ):
        module = ModuleType(name)
        setattr(module, function.__name__, function)
        parts = name.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        monkeypatch.setitem(sys.modules, name, module)
    ours, theirs = ([part.clone().requires_grad_() for part in inputs(BOUNDS[-1])] for _ in range(2))
    found, expected = (rule(*x, KIND, BOUNDS) for rule, x in ((kernel_rule, ours), (chunked_rule, theirs)))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for out in (found, expected):
        out.square().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-11)


@needs_fla
@pytest.mark.parametrize("ours", [causal_conv1d, chunk_gated_delta_rule])
def test_the_package_has_the_arguments_that_it_is_given(ours: Any) -> None:
    """Both swallow a wrong name in ``**kwargs``."""
    from fla.modules.causal_conv1d import CausalConv1dFunction
    from fla.modules.causal_conv1d import causal_conv1d as convolution
    from fla.modules.norm.l2norm import l2norm_fwd
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule

    theirs = signature({"causal_conv1d": convolution, "chunk_gated_delta_rule": rule}[ours.__name__])
    for name, parameter in signature(ours).parameters.items():
        assert theirs.parameters[name].kind == Parameter.POSITIONAL_OR_KEYWORD, name
        if parameter.default is not Parameter.empty:
            assert theirs.parameters[name].default == parameter.default, name
    assert signature(CausalConv1dFunction.forward).parameters["chunk_size"].default == CHUNK
    assert signature(l2norm_fwd).parameters["eps"].default == 1e-6
