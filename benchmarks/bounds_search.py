"""Benchmark of the exact bounds search against a loop that recomputes both sums each round.

    python -m benchmarks.bounds_search

Both search the same bounds for the same tokens (surrogate, P / (P + N), uniform weights, c_high first, the
paper's ranges). The loop does what the authors' published code does in every round: clip all ratios with
the candidate bounds, sum, one all_reduce, one ``.item()``. The exact search makes 53 sums in one pass, one
all_reduce, and then walks on the CPU. Writes benchmarks/results/bounds_search.md.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from bapo_megatron.algo.bapo import contribution_sums
from bapo_megatron.algo.bounds import BoundsConfig, high_values, low_values, positive_share, search_bounds
from bapo_megatron.algo.tokens import LOG_RATIO_LIMIT
from benchmarks.common import no_options

RESULTS = Path(__file__).parent / "results" / "bounds_search.md"
SIZES = (100_000, 1_000_000, 10_000_000)
RANKS = (1, 2)
TYPICAL_MOVES = 8
REPEATS = 5
CONFIG = BoundsConfig(measure="surrogate", share="absolute", weight="uniform", order="high_first")


class Tokens(NamedTuple):
    log_ratio_T: Tensor
    advantage_T: Tensor
    rollout_log_prob_T: Tensor
    mask_T: Tensor


class Outcome(NamedTuple):
    low: float
    high: float
    rounds: int
    collectives: int


class Row(NamedTuple):
    tokens: int
    ranks: int
    case: str
    moves: int
    loop_s: float
    exact_s: float
    loop_collectives: int
    exact_collectives: int


def synthetic_tokens(number: int, seed: int) -> Tokens:
    """Mostly small log-ratios with a heavy tail, a minority of positive tokens, a tenth of padding."""
    generator = torch.Generator().manual_seed(seed)
    scale_T = torch.where(torch.rand(number, generator=generator) < 0.9, 0.05, 0.6)
    positive_T = torch.rand(number, generator=generator) < 0.38
    return Tokens(
        log_ratio_T=scale_T * torch.randn(number, generator=generator),
        advantage_T=torch.where(positive_T, 1.0, -1.0),
        rollout_log_prob_T=-torch.rand(number, generator=generator),
        mask_T=(torch.rand(number, generator=generator) < 0.9).float(),
    )


def exact_search(tokens: Tokens, config: BoundsConfig) -> Outcome:
    sums = contribution_sums(*tokens, config)
    dist.all_reduce(sums)
    found = search_bounds(sums, config)
    return Outcome(found.low, found.high, found.rounds, collectives=1)


def loop_search(tokens: Tokens, config: BoundsConfig) -> Outcome:
    ratio_T = tokens.log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    lows, highs = low_values(config), high_values(config)
    low = high = 0
    while measured_share(ratio_T, tokens, lows[low], highs[high]) < config.target:
        if high + 1 < len(highs):
            high += 1
        elif low + 1 < len(lows):
            low += 1
        else:
            break
    return Outcome(lows[low], highs[high], low + high, collectives=low + high + 1)


def measured_share(ratio_T: Tensor, tokens: Tokens, low: float, high: float) -> float:
    clipped_T = torch.where(tokens.advantage_T >= 0, ratio_T.clamp(max=high), ratio_T.clamp(min=low))
    effective_T = clipped_T * tokens.advantage_T * tokens.mask_T
    sums = torch.stack([effective_T.clamp(min=0).sum(), -effective_T.clamp(max=0).sum()])
    dist.all_reduce(sums)
    return (sums[0] / sums.sum()).item()


def target_after(tokens: Tokens, moves: int) -> float:
    """A target that the search meets with this many moves of c_high: between two shares on its path."""
    sums = contribution_sums(*tokens, CONFIG)
    dist.all_reduce(sums)
    negative = sums[len(high_values(CONFIG))].item()
    before, after = (
        positive_share(positive, negative, "absolute") for positive in sums[moves - 1 : moves + 1].tolist()
    )
    return (before + after) / 2


def seconds(search: Callable[[Tokens, BoundsConfig], Outcome], tokens: Tokens, config: BoundsConfig) -> float:
    dist.barrier()
    start = time.perf_counter()
    search(tokens, config)
    dist.barrier()
    return time.perf_counter() - start


def measure(number: int, case: str) -> Row:
    ranks = dist.get_world_size()
    tokens = synthetic_tokens(number // ranks, seed=dist.get_rank())
    target = 0.99 if case == "worst" else target_after(tokens, TYPICAL_MOVES)
    config = dataclasses.replace(CONFIG, target=target)
    exact, loop = exact_search(tokens, config), loop_search(tokens, config)
    assert exact[:3] == loop[:3], (exact, loop)
    times = [
        (seconds(loop_search, tokens, config), seconds(exact_search, tokens, config)) for _ in range(REPEATS)
    ]
    loop_s, exact_s = (statistics.median(column) for column in zip(*times, strict=True))
    return Row(number, ranks, case, exact.rounds, loop_s, exact_s, loop.collectives, exact.collectives)


def worker(rank: int, ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}/rendezvous", rank=rank, world_size=ranks)
    rows = [measure(number, case) for number in SIZES for case in ("typical", "worst")]
    dist.destroy_process_group()
    if rank == 0:
        torch.save([tuple(row) for row in rows], f"{store}/rows.pt")


def run(ranks: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as store:
        mp.start_processes(worker, args=(ranks, store), nprocs=ranks, start_method="fork")
        return [Row(*row) for row in torch.load(f"{store}/rows.pt")]


def table(rows: list[Row]) -> str:
    lines = [
        "| tokens of the update | processes | case | moves | loop | exact search | loop / exact "
        "| collectives, loop | collectives, exact |",
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.tokens:,} | {row.ranks} | {row.case} | {row.moves} | {1e3 * row.loop_s:,.1f} ms "
            f"| {1e3 * row.exact_s:,.1f} ms | {row.loop_s / row.exact_s:.1f} "
            f"| {row.loop_collectives} | {row.exact_collectives} |"
        )
    return "\n".join(lines)


def report(rows: list[Row]) -> str:
    return f"""# Bounds search: exact search against a loop over the tokens

Command: `python -m benchmarks.bounds_search`

{platform.machine()} with {os.cpu_count()} cores, torch {torch.__version__}, gloo, one thread for
each process; the tokens are split over the processes. Median of {REPEATS} repeats, loop and exact search
taking turns.

{table(rows)}

*worst*: the target is never reached, so every candidate is tried. *typical*: {TYPICAL_MOVES} moves reach it.
One token in twenty is clipped by a candidate: its ratio is past the first c_high (positive tokens) or the
last c_low (negative tokens).
The loop pays for each move; the exact search makes one pass over the tokens and one collective however
many there are. Both find the same bounds, which every run of the benchmark checks.
"""


def main() -> None:
    no_options(__doc__)
    text = report([row for ranks in RANKS for row in run(ranks)])
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
