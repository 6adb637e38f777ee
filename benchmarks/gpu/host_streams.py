"""GPU check of the host optimizer and its copy streams against Adam on the device.

Both step on the same gradients. Without a stream synchronization a moment or weight comes from another
bucket: the largest differences are then of the order of the values, not of their last bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from bapo_megatron.policy import optimizer as host_optimizer
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.policy.optimizer_state import STATES, placements
from benchmarks.gpu.rows import Row, Size
from benchmarks.gpu.small_policy import adam_step, build, save

STEPS = 4
LIMIT = {"param": 1e-6, "exp_avg": 1e-5, "exp_avg_sq": 1e-5}
"""Largest difference relative to the tensor's largest value. float32 has 24 bits, 6e-8; the kernels round
their products in another order, in four steps at a rate of 1e-3."""
TINY_BUCKET = 5000

State = dict[str, list[Tensor]]


def rows(size: Size, folder: Path) -> Iterator[Row]:
    path, dtype = save(size, folder), "bfloat16" if size.cuda else "float32"
    with small_buckets(size.tiny):
        norms, device, _ = stepped(build(path, dtype, "model"))  # type: ignore[arg-type]
        host_norms, host, unrounded = stepped(build(path, dtype, "cpu"))  # type: ignore[arg-type]
    apart = max(abs(a / b - 1) for a, b in zip(norms, host_norms, strict=True))
    yield Row(f"gradient norms of {STEPS} steps", f"{apart:.1e} apart", "1e-5", apart < 1e-5)
    for name in STATES:
        worst = max(relative(a, b) for a, b in zip(host[name], device[name], strict=True))
        said = f"{worst:.1e} of the largest value, in the worst of {len(host[name])} parameters"
        yield Row(f"{name} after {STEPS} steps", said, f"{LIMIT[name]}", worst < LIMIT[name])
    said = f"{unrounded} of {len(host['param'])} parameters differ"
    yield Row("weights on the device are the host's masters, rounded", said, "none", unrounded == 0)


def stepped(policy: MegatronPolicy) -> tuple[list[float], State, int]:
    """Gradient norms, optimizer state on the CPU, and count of weights unequal to their rounded masters."""
    norms = [adam_step(policy, seed) for seed in range(STEPS)]
    states: State = {name: [] for name in STATES}
    unrounded = 0
    for part in policy._optimizer.chained_optimizers:
        for placement in placements(part):
            state = part._get_main_param_and_optimizer_states(placement.parameter)
            for name in STATES:
                states[name].append(state[name].detach().cpu().clone())
            weights = placement.parameter.detach().flatten().cpu()
            unrounded += not torch.equal(weights, states["param"][-1].flatten().to(weights.dtype))
    return norms, states, unrounded


def relative(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


@contextmanager
def small_buckets(tiny: bool) -> Iterator[None]:
    """Context manager of small buckets if ``tiny``: a default bucket would take the whole model."""
    before = host_optimizer.BUCKET
    host_optimizer.BUCKET = TINY_BUCKET if tiny else before
    try:
        yield
    finally:
        host_optimizer.BUCKET = before
