"""Benchmark of the host optimizer step, in elements and bytes a second, against torch's AdamW variants.

    python -m benchmarks.host_optimizer         # two minutes, 4 GB
    python -m benchmarks.host_optimizer --quick

All step the same parameters, of a transformer's shapes, in float32 on this machine's cores; kinds take turns.
``host`` is ``optimizer.device=cpu`` as it runs beside a GPU, with its copies of gradients and weights between
buffers, which here are copies within the host's memory. Writes benchmarks/results/host_optimizer.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from bapo_megatron.config import OptimizerConfig
from bapo_megatron.policy.optimizer import HostAdamW, _Shard
from benchmarks.common import is_quick, machine, write

STEP_BYTES = 28
"""Memory traffic of an element: gradient, master and two moments read, the last three written."""
CONFIG = OptimizerConfig(lr=1e-3)


def shapes(quick: bool) -> list[int]:
    """Elements of the parameters: layers of 8.4 M."""
    return [1 << 20, 1 << 22, 1 << 22, 1 << 10] * (1 if quick else 16)


def plain(sizes: list[int], **kind: bool) -> Callable[[], None]:
    """A step of torch's AdamW of a kind."""
    parameters = [torch.randn(size) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return torch.optim.AdamW(parameters, CONFIG.lr, **kind).step


def on_host(sizes: list[int]) -> Callable[[], None]:
    """A step of ``HostAdamW`` with gradients and bfloat16 weights elsewhere."""
    shards = [_Shard(torch.randn(size), torch.empty(size, dtype=torch.bfloat16)) for size in sizes]
    gradients = [torch.randn(size) for size in sizes]
    group = {"params": [shard.master for shard in shards], "lr": CONFIG.lr, "weight_decay": 0.01}
    adam = HostAdamW([group], {shard.master: shard for shard in shards}, CONFIG)

    def step() -> None:
        for shard, gradient in zip(shards, gradients, strict=True):
            shard.grad = gradient
        adam.step()

    return step


def main() -> None:
    """Measure, and write the table."""
    quick = is_quick(__doc__)
    sizes, turns = shapes(quick), 2 if quick else 7
    kinds = {
        "host (`optimizer.device=cpu`)": on_host(sizes),
        "torch, fused": plain(sizes, fused=True),
        "torch, foreach": plain(sizes, foreach=True),
        "torch, one by one": plain(sizes, foreach=False),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(turns + 1):
        for name, step in kinds.items():
            began = time.perf_counter()
            step()
            if turn:  # the first makes the moments
                times[name].append(time.perf_counter() - began)
    elements = sum(sizes)
    text = "\n".join([*heading(elements, len(sizes), turns), *rows(elements, times), *NOTE]) + "\n"
    print(text) if quick else write("host_optimizer", text)


def heading(elements: int, parameters: int, turns: int) -> list[str]:
    """The report until its rows."""
    return [
        "# AdamW on the host",
        "",
        "Command: `python -m benchmarks.host_optimizer`",
        "",
        f"{machine()}, {torch.get_num_threads()} threads.",
        f"{elements:,} elements in {parameters} parameters; kinds take turns, medians of {turns}.",
        "",
        "| kind | M elements / s | GB / s, at 28 B | time / fused |",
        "|---|---:|---:|---:|",
    ]


def rows(elements: int, times: dict[str, list[float]]) -> list[str]:
    """A row for each kind."""
    fused = median(times["torch, fused"])
    found = []
    for name, taken in times.items():
        rate = elements / median(taken)
        cells = (name, f"{rate / 1e6:,.0f}", f"{STEP_BYTES * rate / 1e9:.1f}", f"{median(taken) / fused:.2f}")
        found.append(f"| {' | '.join(cells)} |")
    return found


NOTE = (
    "",
    "*host* also rounds the weights to bfloat16, and copies gradients in and weights out; beside a GPU the",
    "copies go over PCIe. docs/planning.md has what follows for nodes of GPUs.",
)


if __name__ == "__main__":
    main()
