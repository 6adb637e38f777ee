"""Benchmark of the diagnostics' cost in an update.

    python -m benchmarks.diagnostics            # two minutes on two cores
    python -m benchmarks.diagnostics --quick

The diagnostics run as they do in an update: once for each chunk of tokens whose logits exist. They take turns
with whole updates of the same tokens. Writes benchmarks/results/diagnostics.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from bapo_megatron.algo.bapo import grpo
from bapo_megatron.algo.diagnostics import diagnostic_sums
from bapo_megatron.algo.losses.clip import ClipLoss
from bapo_megatron.algo.measurements import PackView
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.types import TokenStats
from benchmarks.common import in_turns, is_quick, machine, one_process, write
from benchmarks.update_cost import QUICK, WAYS, Size, policy_of, updates

SIZES = {
    "as small as the demo": Size(hidden=64, layers=2, vocab=512, longest=96, samples=64, pack=4096, rounds=5),
    "small": Size(samples=12, rounds=3),
}


def diagnostics(policy: MegatronPolicy, size: Size, chunk_tokens: int) -> Callable[[], object]:
    """A function that makes the diagnostic sums of every chunk of an update, with ratios around one."""
    generator = torch.Generator().manual_seed(0)
    chunks = []
    for pack in pack_samples(size.batch, size.pack, "token", policy.pack_layout):
        for start in range(0, pack.token_T.numel(), chunk_tokens):
            chunk = pack.take(slice(start, start + chunk_tokens))
            noise_T = 0.2 * torch.randn(chunk.mask_T.shape, generator=generator)
            chunks.append((TokenStats(chunk.old_log_prob_T + noise_T, torch.rand_like(noise_T)), chunk))
    loss = ClipLoss(AlgorithmConfig(bounds=grpo()))
    found = loss.search.known

    def measure() -> None:
        for stats, chunk in chunks:
            diagnostic_sums(PackView(stats, chunk, loss.terms(stats, chunk, found), found, 0))

    return measure


def row(name: str, size: Size) -> str:
    with tempfile.TemporaryDirectory() as folder:
        policy = policy_of(Path(folder), size, "none")
        seconds = in_turns(
            {
                "update": updates(policy, WAYS["fixed bounds"], size),
                "diagnostics": diagnostics(policy, size, chunk_tokens=1024),
            },
            size.rounds,
        )
    tokens = sum(sample.positions for sample in size.batch)
    share = seconds["diagnostics"] / seconds["update"]
    return (
        f"| {name} | {size.layers} x {size.hidden}, {size.vocab:,} | {tokens:,} "
        f"| {seconds['update']:.2f} s | {1e3 * seconds['diagnostics']:.1f} ms | {100 * share:.2f} % |"
    )


def report(sizes: dict[str, Size]) -> str:
    with one_process():
        rows = "\n".join(row(name, size) for name, size in sizes.items())
    return f"""# What the diagnostics add to an update

Command: `python -m benchmarks.diagnostics`

{machine()}, two threads, float32, one process.
Medians of a few rounds in which the diagnostics take turns with whole updates at fixed bounds. The
diagnostics cost the same for each token whatever the model; an update costs more the larger the model is.

| policy | layers x hidden, vocabulary | tokens | update | diagnostics | share |
|---|---|---:|---:|---:|---:|
{rows}
"""


if __name__ == "__main__":
    if is_quick(__doc__):
        print(report({"tiny": QUICK}))
    else:
        write("diagnostics", report(SIZES))
