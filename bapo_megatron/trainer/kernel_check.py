"""Self-test of the GPU's kernels of Gated DeltaNet: outputs and all gradients against the rule in float64.

Kernels of flash-linear-attention (fla) have given wrong gradients without a word: of the decay and of beta on
Hopper (its issues 640 and 984), NaN on Blackwell (913). Which of them are right depends on triton's version,
the GPU, and the number of warps that the kernels choose by timing themselves at the first call. So the test
has the sizes that a rank of the run has, in its dtype; what is compiled and timed for it the run finds there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import metadata
from itertools import accumulate

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

from bapo_megatron.config import ModelConfig, ParallelConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import read_model_shape
from bapo_megatron.layers import Kind
from bapo_megatron.layers.delta_net import DeltaNet
from bapo_megatron.policy.device import has_cuda, release_cached_memory, select_device
from bapo_megatron.runtime.distributed import on_all_ranks

Rule = Callable[[Tensor, Tensor, Tensor, Tensor, DeltaNet, tuple[int, ...]], Tensor]

FLA = "fla-core==0.6.0"
"""The package of the kernels, as `make cluster` installs it: the first version that takes a pack's chunks."""
LENGTHS = (1000, 1, 65, 63, 64)
"""Documents of the pack, in tokens: a short one behind a long one shows a state that is not begun anew."""
LIMITS = {
    "output": 0.03,
    "gradient of queries": 0.05,
    "gradient of keys": 0.05,
    "gradient of values": 0.05,
    "gradient of the decay": 0.1,
    "gradient of beta": 0.1,
    "gradient of the convolution": 0.05,
}
"""Largest error of a document, as a part of the root mean square over all. In float16, interpreted by triton,
the kernels' are at most 0.001, so in bfloat16 about 0.008; their known faults make errors above 0.5."""


def missing_package(kinds: tuple[Kind, ...], dtype: torch.dtype) -> str | None:
    """The lack of the package for layers on this machine's GPUs, with the fix; None if nothing is missing."""
    if not (dtype != torch.float32 and any(isinstance(kind, DeltaNet) for kind in kinds) and has_cuda()):
        return None
    version = _version("fla-core")
    if version is not None and Version(version) >= Version(FLA.partition("==")[2]):
        return None
    state = "is not installed" if version is None else f"is of version {version}"
    return (
        f"Gated DeltaNet needs the kernels of flash-linear-attention on a GPU, and fla-core {state}: "
        f"`pip install {FLA}` (`make cluster` does); with model.dtype=float32 torch computes it, slowly"
    )


def check_kernels(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Test the kernels that a policy's layers run on this GPU, in seconds once they are compiled.

    Before the policy is built. Collective: ConfigError on all ranks, with the versions, if one is wrong.
    """
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
    """ConfigError if the rule's outputs or gradients are wrong, or if it raises."""
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
    """The packages that make the kernels, and the device that runs them."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    packages = (
        f"{package} {_version(package) or 'not installed'}" for package in ("fla-core", "triton", "torch")
    )
    return ", ".join((*packages, name))


def rule_errors(
    rule: Rule, kind: DeltaNet, dtype: torch.dtype, device: torch.device, lengths: tuple[int, ...] = LENGTHS
) -> dict[str, float]:
    """The largest error of a document in the output and in each gradient, by the names of ``LIMITS``."""
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
    """Channels, decay, beta and the convolution's weight, and a gradient of the output.

    The heads' memories are from one token to a thousand tokens long.
    """
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
    """Output and gradients, in the order of ``LIMITS``."""
    x, decay, beta, weight = (tensor.clone().requires_grad_() for tensor in inputs)
    out = rule(x, decay, beta, weight, kind, bounds)
    wanted = torch.autograd.grad(out, (x, decay, beta, weight), grad)
    parts = wanted[0].split([kind.keys, kind.keys, kind.values], -1)
    return [out.detach(), *parts, *wanted[1:]]


def _worst(error: Tensor, reference: Tensor, lengths: tuple[int, ...]) -> float:
    """The largest root mean square of a document's errors by that of the reference; NaN if there is one."""
    parts = error.split(lengths) if len(error) == sum(lengths) else (error,)
    each = torch.stack([part.square().mean().sqrt() for part in parts])
    return float(each.max() / reference.square().mean().sqrt())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
