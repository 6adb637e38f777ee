"""Benchmark of an update's time and memory, by the way to find its clipping bounds.

    python -m benchmarks.update_cost            # ten minutes on two cores
    python -m benchmarks.update_cost --quick

One policy in one process repeats the same update; only the way to the bounds differs, and the ways take
turns. The memory of each is the peak of one update in its own process. Writes
benchmarks/results/update_cost.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from bapo_megatron.algo.bapo import BoundsConfig, eq8_literal, grpo
from bapo_megatron.config import AlgorithmConfig, BatchConfig
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.trainer.update_loss import UpdateLoss
from benchmarks.common import (
    in_a_process,
    in_turns,
    is_quick,
    machine,
    one_process,
    peak_above,
    random_samples,
    save_model,
    torch_policy,
    write,
)

Recompute = Literal["none", "full"]


@dataclass(frozen=True)
class Way:
    """A way to find the bounds of an update."""

    bounds: BoundsConfig
    on_policy: bool = False
    hold: bool = False


WAYS = {
    "fixed bounds": Way(grpo()),
    "exact, ratio known": Way(eq8_literal(), on_policy=True),
    "exact": Way(eq8_literal()),
    "exact, forwards held": Way(eq8_literal(), hold=True),
    "lagged": Way(replace(eq8_literal(), scope="lagged")),
    "micro_batch": Way(replace(eq8_literal(), scope="micro_batch")),
}


@dataclass(frozen=True)
class Size:
    """Size of the policy and the update."""

    hidden: int = 256
    layers: int = 8
    vocab: int = 16384
    longest: int = 2048
    samples: int = 24
    pack: int = 4096
    rounds: int = 5

    @property
    def batch(self) -> list[Sample]:
        return random_samples(self.samples, self.longest, self.vocab)


FULL, QUICK = Size(), Size(hidden=64, layers=2, vocab=512, longest=64, samples=8, pack=128, rounds=1)


def updates(policy: MegatronPolicy, way: Way, size: Size) -> Callable[[], object]:
    """Function that makes one update, bounds included."""
    clipping = UpdateLoss(AlgorithmConfig(bounds=way.bounds), way.hold)
    packs = pack_samples(size.batch, size.pack, "token", policy.pack_layout)

    def update() -> None:
        loss = clipping.loss(policy, packs, way.on_policy)
        clipping.observe(policy.update(packs, loss).sums)

    return update


def policy_of(folder: Path, size: Size, recompute: Recompute) -> MegatronPolicy:
    save_model(folder, size.hidden, size.layers, size.vocab, size.longest)
    return torch_policy(folder, BatchConfig(pack_tokens=size.pack, recompute=recompute))


def times(folder: Path, size: Size, recompute: Recompute) -> dict[str, float]:
    policy = policy_of(folder, size, recompute)
    return in_turns({name: updates(policy, way, size) for name, way in WAYS.items()}, size.rounds)


def peak(name: str, recompute: Recompute, size: Size) -> float:
    """GiB that the second update allocates above the memory before it."""
    with tempfile.TemporaryDirectory() as folder:
        update = updates(policy_of(Path(folder), size, recompute), WAYS[name], size)
        update()
        return peak_above(update)


def table(size: Size, recompute: Recompute) -> str:
    with one_process(), tempfile.TemporaryDirectory() as folder:
        seconds = times(Path(folder), size, recompute)
    quick = ["--quick"] * (size is QUICK)
    peaks = {name: in_a_process("benchmarks.update_cost", "--peak", name, recompute, *quick) for name in WAYS}
    lines = [f"## Recompute {recompute}\n", "| way | time | time / fixed | peak |", "|---|---:|---:|---:|"]
    for name in WAYS:
        ratio = seconds[name] / seconds["fixed bounds"]
        lines.append(f"| {name} | {seconds[name]:.2f} s | {ratio:.2f} | {peaks[name]:.2f} GiB |")
    return "\n".join(lines)


def report(size: Size) -> str:
    positions = sum(sample.positions for sample in size.batch)
    return f"""# Updates: what each way to the bounds costs

Command: `python -m benchmarks.update_cost`

{machine()}, two threads, float32, one process.
A Qwen2 of {size.layers} layers, hidden {size.hidden}, vocabulary {size.vocab:,}, random weights. An update is
{size.samples} samples of up to {size.longest:,} tokens ({positions:,} in all), packs of up to {size.pack:,}.
Medians of {size.rounds} rounds in which the ways take turns. The peak is what a process
grows by in an update, on top of weights, gradients and optimizer state; what the allocator keeps is part of
it, so differences below 0.2 GiB mean nothing.

{table(size, "none")}

{table(size, "full")}

*exact* makes a forward-only pass first. *forwards held* makes the search between the forward and the backward
passes, so only the output head's matmul is done once more; it keeps the activations of all packs of the
update, which under full recomputation are no more than the inputs of the layers. *lagged* takes the sums that
the update before measured.
"""


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--peak"]:
        size = QUICK if "--quick" in arguments else FULL
        with one_process():
            print(json.dumps(peak(arguments[1], arguments[2], size)))
    elif is_quick(__doc__):
        print(report(QUICK))
    else:
        write("update_cost", report(FULL))


if __name__ == "__main__":
    main(sys.argv[1:])
