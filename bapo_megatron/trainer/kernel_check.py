"""Self-test of the GPU kernels of Gated DeltaNet: compares outputs and all gradients with torch in float64.

``check_kernels``, called on every rank before it builds a policy, raises ConfigError on all ranks if a kernel
is wrong; without such layers, without a GPU or in float32 it does nothing. Kernels of flash-linear-attention
(fla) have silently returned wrong gradients: of the decay and beta on Hopper (its issues 640 and 984), NaN on
Blackwell (913). Correctness depends on the triton version, the GPU, and the number of warps that autotuning
picks at the first call. So the test uses the run's per-rank sizes and dtype, and the run reuses its kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import metadata
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from bapo_megatron.config import ModelConfig, ParallelConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import read_model_shape
from bapo_megatron.layers.delta_net import DeltaNet
from bapo_megatron.policy.device import has_cuda, release_cached_memory, select_device
from bapo_megatron.runtime.distributed import on_all_ranks

Rule = Callable[[Tensor, Tensor, Tensor, Tensor, DeltaNet, tuple[int, ...]], Tensor]

FLA = "fla-core==0.6.0"
"""Package of the kernels, as in `make cluster`: earlier versions do not accept a pack's chunks."""
LENGTHS = (1000, 1, 65, 63, 64)
"""Document lengths of the test pack, in tokens; a short document after a long one reveals a missing reset."""
LIMITS = {
    "output": 0.03,
    "gradient of queries": 0.05,
    "gradient of keys": 0.05,
    "gradient of values": 0.05,
    "gradient of the decay": 0.1,
    "gradient of beta": 0.1,
    "gradient of the convolution": 0.05,
}
"""Largest error of a document, relative to the root mean square over all. In float16, interpreted by triton,
the kernels' errors are at most 0.001, so about 0.008 in bfloat16; known faults cause errors above 0.5."""


def check_kernels(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Test the kernels of a policy's layers on this GPU, in seconds once they are compiled. Collective.
    Raises ConfigError on all ranks, with the versions, if one is wrong."""
    dtype = getattr(torch, model.dtype)
    for kind in read_model_shape(model.hf_path).kinds:
        if isinstance(kind, DeltaNet) and dtype != torch.float32 and has_cuda():
            from bapo_megatron.policy.delta_net import kernel_rule

            cuts = parallel.tensor * parallel.context
            heads = {"key_heads": kind.key_heads // cuts, "value_heads": kind.value_heads // cuts}
            own, device = replace(kind, **heads), select_device()
            on_all_ranks(partial(check_rule, kernel_rule, own, dtype, device))
            release_cached_memory()


def check_rule(rule: Rule, kind: DeltaNet, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError if ``rule``, a kernel, raises, or if its outputs or gradients exceed ``LIMITS``."""
    try:
        errors = rule_errors(rule, kind, dtype, device)
        wrong = [f"{name} by {error:.2g}" for name, error in errors.items() if not error <= LIMITS[name]]
        problem = f"differs from torch's rule: {', '.join(wrong)} of the root mean square" if wrong else ""
    except Exception as error:
        problem = f"raises {type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0]
    if problem:
        raise ConfigError(
            f"the kernel of Gated DeltaNet {problem} ({versions(device)}): a policy would train wrongly. "
            f"Install {FLA} and the triton that this torch names; with model.dtype=float32 torch "
            "computes it, slowly"
        )


def versions(device: torch.device) -> str:
    """Return the kernels' package versions and the device name, as text."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    packages = (
        f"{package} {_version(package) or 'not installed'}" for package in ("fla-core", "triton", "torch")
    )
    return ", ".join((*packages, name))


def rule_errors(
    rule: Rule, kind: DeltaNet, dtype: torch.dtype, device: torch.device, lengths: tuple[int, ...] = LENGTHS
) -> dict[str, float]:
    """Return the largest relative error per document of the output and each gradient, as in ``LIMITS``."""
    from bapo_megatron.policy.delta_net import chunked_rule

    bounds = tuple(accumulate(lengths, initial=0))
    inputs, grad = _inputs(kind, bounds[-1], dtype, device)
    ours = _results(rule, inputs, grad, kind, bounds)
    wide = _results(chunked_rule, [x.double() for x in inputs], grad.double(), kind, bounds)
    pairs = zip(LIMITS, ours, wide, strict=True)
    return {name: _worst(a.double() - b, b, lengths) for name, a, b in pairs}


def _inputs(
    kind: DeltaNet, tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], Tensor]:
    """Return channels, decay (memories of 1 to 1000 tokens), beta, convolution weight; output gradient."""
    generator = torch.Generator().manual_seed(0)
    channels, heads = 2 * kind.keys + kind.values, kind.value_heads
    shapes = (tokens, channels), (tokens, heads), (tokens, heads), (channels, 1, kind.kernel)
    x, a, b, weight, grad = (
        torch.randn(shape, generator=generator) for shape in (*shapes, (tokens, kind.values))
    )
    decay = -F.softplus(a) * torch.logspace(-3, 0, heads)
    inputs = [x.to(dtype), decay, b.sigmoid(), (weight / 2).to(dtype)]
    return [tensor.to(device) for tensor in inputs], grad.to(device, dtype)


def _results(
    rule: Rule, inputs: list[Tensor], grad: Tensor, kind: DeltaNet, bounds: tuple[int, ...]
) -> list[Tensor]:
    x, decay, beta, weight = (tensor.clone().requires_grad_() for tensor in inputs)
    out = rule(x, decay, beta, weight, kind, bounds)
    wanted = torch.autograd.grad(out, (x, decay, beta, weight), grad)
    parts = wanted[0].split([kind.keys, kind.keys, kind.values], -1)
    return [out.detach(), *parts, *wanted[1:]]


def _worst(error: Tensor, reference: Tensor, lengths: tuple[int, ...]) -> float:
    """Return the largest per-document RMS error relative to the reference RMS; NaN if any value is NaN."""
    parts = error.split(lengths) if len(error) == sum(lengths) else (error,)
    each = torch.stack([part.square().mean().sqrt() for part in parts])
    return float(each.max() / reference.square().mean().sqrt())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
