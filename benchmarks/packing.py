"""Benchmark of sequence packing against first fit and largest differencing: padding, balance, time.

    python -m benchmarks.packing

Response lengths follow an assumed distribution (``response_lengths``), because the paper has only curves of
averages (Fig. 6). Four planners get the same samples:

- ours: ``plan_packs``;
- first fit and first fit decreasing: packs by tokens, dealt to the ranks in turn;
- differencing: Karmarkar and Karp's largest differencing by tokens, with equally many samples per rank, then
  equally many packs per rank, as the fullest needs (the use of verl's ``get_seqlen_balanced_partitions``).

The last row is a lower bound for every plan. Writes benchmarks/results/packing.md.
"""

from __future__ import annotations

import heapq
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bapo_megatron.data.pack_plan import plan_packs
from bapo_megatron.types import PackLayout
from benchmarks.common import no_options

RESULTS = Path(__file__).parent / "results" / "packing.md"
SEEDS = range(5)
QUADRATIC = 1e-5
"""Attention cost n^2 relative to linear cost n, for a 32B model: 0.655 MFLOP n against 65 GFLOP per token."""
LENGTH_MULTIPLE = 16
POSITIVE_SHARE, POSITIVE_MEDIAN, NEGATIVE_MEDIAN, SIGMA = 0.4, 0.14, 0.30, 0.8
"""Medians as a share of the longest sequence."""

Plan = list[list[list[int]]]
"""Sample indices of each pack, by rank."""
Planner = Callable[[Sequence[int], int, PackLayout], Plan]


class Setting(NamedTuple):
    longest: int
    samples: int
    ranks: int
    pack_tokens: int
    fixed_length: bool = False
    count_multiple: int = 1

    @property
    def layout(self) -> PackLayout:
        return PackLayout(
            data_size=self.ranks,
            length_multiple=LENGTH_MULTIPLE,
            count_multiple=self.count_multiple,
            fixed_length=self.fixed_length,
            quadratic=QUADRATIC,
        )


class Score(NamedTuple):
    padding: float
    """Padding over all tokens of all packs."""
    imbalance: float
    """Cost of the slowest rank over the mean, minus 1."""
    spread: float
    """Cost of a rank's slowest pack over the mean of its packs, minus 1, averaged over ranks."""
    packs: float
    """Packs of all ranks."""
    seconds: float


SETTINGS = (
    Setting(65536, 256, 4, 65536),
    Setting(65536, 256, 8, 65536),
    Setting(65536, 256, 16, 65536),
    Setting(65536, 512, 8, 65536),
    Setting(65536, 512, 16, 65536),
    Setting(65536, 1024, 8, 65536),
    Setting(65536, 1024, 16, 65536),
    Setting(65536, 256, 16, 131072),
    Setting(65536, 512, 16, 131072),
    Setting(65536, 1024, 16, 131072),
    Setting(65536, 4096, 64, 131072),
    Setting(8192, 512, 8, 32768),
    Setting(65536, 64, 16, 65536),
    Setting(65536, 64, 32, 131072),
    Setting(65536, 512, 8, 65536, fixed_length=True, count_multiple=4),
    Setting(65536, 1024, 8, 65536, fixed_length=True, count_multiple=4),
    Setting(65536, 512, 8, 131072, fixed_length=True, count_multiple=4),
    Setting(65536, 1024, 8, 131072, fixed_length=True, count_multiple=4),
    Setting(65536, 1024, 16, 131072, fixed_length=True, count_multiple=4),
    Setting(8192, 512, 8, 32768, fixed_length=True, count_multiple=4),
)


def response_lengths(number: int, longest: int, seed: int) -> list[int]:
    """Log-normal lengths, negatives about twice as long as positives, cut off at ``longest``."""
    generator = np.random.default_rng(seed)
    positive = generator.random(number) < POSITIVE_SHARE
    median = longest * np.where(positive, POSITIVE_MEDIAN, NEGATIVE_MEDIAN)
    lengths = median * np.exp(SIGMA * generator.standard_normal(number))
    return [int(length) for length in np.clip(lengths, 64, longest)]


def first_fit(lengths: Sequence[int], pack_tokens: int, layout: PackLayout) -> Plan:
    """Put each sample into the first pack with room, and deal packs to ranks in turn."""
    packs: list[list[int]] = []
    room: list[int] = []
    for index, length in enumerate(lengths):
        pack = next((p for p, left in enumerate(room) if left >= length), len(packs))
        if pack == len(packs):
            packs.append([])
            room.append(pack_tokens)
        packs[pack].append(index)
        room[pack] -= length
    step = layout.data_size * layout.count_multiple
    packs += [[] for _ in range(-len(packs) % step)]
    return [packs[rank :: layout.data_size] for rank in range(layout.data_size)]


def first_fit_decreasing(lengths: Sequence[int], pack_tokens: int, layout: PackLayout) -> Plan:
    """First fit, with the longest samples first."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    plan = first_fit([lengths[index] for index in order], pack_tokens, layout)
    return [[[order[i] for i in pack] for pack in rank] for rank in plan]


def differencing(lengths: Sequence[int], pack_tokens: int, layout: PackLayout) -> Plan:
    """Ranks with similar tokens and equally many samples; within each, packs of similar tokens."""
    ranks = largest_differencing(lengths, layout.data_size, equal_count=True)
    fullest = max(sum(lengths[i] for i in rank) for rank in ranks)
    step = layout.count_multiple
    for number in count(-(-fullest // (pack_tokens * step)) * step, step):
        plan = [[[rank[i] for i in pack] for pack in _packs_of(rank, lengths, number)] for rank in ranks]
        if all(sum(lengths[i] for i in pack) <= pack_tokens for rank in plan for pack in rank):
            return plan
    raise AssertionError("unreachable")


def _packs_of(rank: Sequence[int], lengths: Sequence[int], number: int) -> list[list[int]]:
    return largest_differencing([lengths[i] for i in rank], number, equal_count=False)


def largest_differencing(weights: Sequence[int], parts: int, equal_count: bool) -> list[list[int]]:
    """Karmarkar and Karp: join the two partitions whose sums differ most, heaviest part to lightest.

    ``equal_count`` starts with partitions of ``parts`` samples, one per part, so that every join adds equally
    many samples to each.
    """
    order = sorted(range(len(weights)), key=lambda index: weights[index])
    width = parts if equal_count else 1
    heap = []
    for start in range(0, len(order), width):
        chosen = order[start : start + width]
        bins = [(weights[i], [i]) for i in chosen] + [(0, [])] * (parts - len(chosen))
        heapq.heappush(heap, _partition(bins, start))
    while len(heap) > 1:
        (_, tie, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        heapq.heappush(heap, _partition(joined, tie))
    return [indices for _, indices in heap[0][2]]


def _partition(bins: list[tuple[int, list[int]]], tie: int) -> tuple[int, int, list[tuple[int, list[int]]]]:
    """Heap entry: minus the difference, tie-breaker, bins by falling weight."""
    bins = sorted(bins, key=lambda part: -part[0])
    return bins[-1][0] - bins[0][0], tie, bins


PLANNERS: dict[str, Planner] = {
    "ours": plan_packs,
    "first fit": first_fit,
    "first fit decreasing": first_fit_decreasing,
    "differencing": differencing,
}


def score(setting: Setting, planner: Planner, seed: int) -> Score:
    lengths = response_lengths(setting.samples, setting.longest, seed)
    start = time.perf_counter()
    plan = planner(lengths, setting.pack_tokens, setting.layout)
    seconds = time.perf_counter() - start
    check(plan, lengths, setting)
    totals = [[sum(lengths[i] for i in pack) for pack in rank] for rank in plan]
    floor = max(max(rank) for rank in totals) if setting.fixed_length else 1
    padded = np.array([[-(-max(floor, n) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE for n in r] for r in totals])
    costs = padded + QUADRATIC * np.array(
        [[sum(lengths[i] ** 2 for i in pack) for pack in rank] for rank in plan]
    )
    ranks = costs.sum(1)
    return Score(
        padding=1 - sum(lengths) / padded.sum(),
        imbalance=ranks.max() / ranks.mean() - 1,
        spread=float((costs.max(1) / costs.mean(1)).mean()) - 1,
        packs=costs.size,
        seconds=seconds,
    )


def check(plan: Plan, lengths: Sequence[int], setting: Setting) -> None:
    assert sorted(i for rank in plan for pack in rank for i in pack) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) % setting.count_multiple == 0
    assert all(sum(lengths[i] for i in pack) <= setting.pack_tokens for rank in plan for pack in rank)


def lower_bound(setting: Setting, seed: int) -> tuple[float, float]:
    """Lower bounds of any plan's padding and imbalance, from the longest sample, which is never split.

    Assumes the fewest packs that can have all tokens. Packs of one length are at least as long as the longest
    sample. The mean includes the most padding that rounding can add, so the bound is not an overestimate.
    """
    lengths = response_lengths(setting.samples, setting.longest, seed)
    step = setting.ranks * setting.count_multiple
    fewest = math.ceil(sum(lengths) / (setting.pack_tokens * step)) * step
    tokens, longest = sum(lengths), max(lengths)
    attention = QUADRATIC * sum(length**2 for length in lengths) / setting.ranks
    if setting.fixed_length:
        padded = max(tokens, fewest * longest)
        linear = mean_linear = padded / setting.ranks
    else:
        padded, linear = tokens, float(longest)
        mean_linear = (tokens + LENGTH_MULTIPLE * setting.samples) / setting.ranks
    slowest = linear + QUADRATIC * longest**2
    return 1 - tokens / padded, max(0.0, slowest / (mean_linear + attention) - 1)


def table(settings: Sequence[Setting]) -> str:
    lines = [
        "| longest | samples | DP | pack tokens | planner | padding % (worst) | imbalance % (worst) "
        "| spread in a rank % | packs | planning, ms |",
        "|---:|---:|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for setting in settings:
        for name, planner in PLANNERS.items():
            lines.append(planner_line(setting, name, planner))
        padding, imbalance = zip(*(lower_bound(setting, seed) for seed in SEEDS), strict=True)
        lines.append(f"{cells(setting)} | lower bound | {percent(padding)} | {percent(imbalance)} | | | |")
    return "\n".join(lines)


def planner_line(setting: Setting, name: str, planner: Planner) -> str:
    scores = [score(setting, planner, seed) for seed in SEEDS]
    padding, imbalance, spread, packs, seconds = zip(*scores, strict=True)
    return (
        f"{cells(setting)} | {name} | {percent(padding)} | {percent(imbalance)} "
        f"| {100 * statistics.fmean(spread):.1f} | {statistics.fmean(packs):.1f} "
        f"| {1e3 * statistics.median(seconds):.0f} |"
    )


def cells(setting: Setting) -> str:
    return f"| {setting.longest:,} | {setting.samples:,} | {setting.ranks} | {setting.pack_tokens:,}"


def percent(values: Sequence[float]) -> str:
    """Mean and worst value over the seeds, in percent."""
    return f"{100 * statistics.fmean(values):.2f} ({100 * max(values):.2f})"


def report() -> str:
    own = [setting for setting in SETTINGS if not setting.fixed_length]
    fixed = [setting for setting in SETTINGS if setting.fixed_length]
    drawn = [response_lengths(1024, 65536, seed) for seed in SEEDS]
    mean = statistics.fmean(length for lengths in drawn for length in lengths)
    cut = statistics.fmean(length == 65536 for lengths in drawn for length in lengths)
    return f"""# Packing: padding, balance, planning time

Command: `python -m benchmarks.packing`

{platform.machine()} with {os.cpu_count()} cores, numpy {np.__version__}. Means over {len(SEEDS)} seeds, the
worst seed in brackets; planning time is a median and depends on what else the machine does.

**Assumed lengths.** The paper says that responses go up to 64k tokens (8k in its preliminary runs) and that
negatives are longer than positives; its Fig. 6 has averages only. Here lengths are log-normal with sigma
{SIGMA}, {POSITIVE_SHARE:.0%} positives with a median of {POSITIVE_MEDIAN:.0%} of the longest, negatives with
{NEGATIVE_MEDIAN:.0%}, cut off at the longest. At 64k that is a mean of {mean:,.0f} tokens, and
{cut:.1%} of the samples are cut off. No measured lengths stand behind it.

**Columns.** *padding*: share of all tokens of all packs (lengths are multiples of {LENGTH_MULTIPLE}).
*imbalance*: cost of the slowest rank over the mean, minus 1, where n tokens cost n + {QUADRATIC:g} n^2 (a 32B
model) and padding its linear part. *spread in a rank*: the same of a rank's packs. *packs*: of all ranks.
*lower bound*: from the longest sample alone; no plan is below.

## Each pack as long as what it holds

{table(own)}

## One length for all packs, the packs of a rank a multiple of 4

{table(fixed)}

{CONCLUSIONS}"""


CONCLUSIONS = """## What it says

- Ours pads at most 2 % and is out of balance by at most 3 % in all settings but those whose lower bound is
  above that.
- *64 samples*: two to four on a rank. A rank with a sample at the limit can cost more than the mean even if
  it has nothing else. Only more samples in an update, or fewer replicas, help.
- *One length, packs as long as the longest sample*: each pack is then that long, and their number is a
  multiple of DP times 4, so up to that many are padding. No other plan pads less; packs twice as long do.
- *Spread in a rank* stays near 25-30 % where packs are as long as the longest sample: attention makes that
  sample cost 1.66 a token, and no pack of short ones may be longer.
- First fit decreasing makes as few packs, but ranks differ by how many they get and by attention.
  Differencing by tokens, with as many samples on each rank, comes near ours in balance where every rank has
  many samples. It often takes more packs, because each rank fills its own, and pads more at one length.
- Ours takes longer to plan, up to some tenths of a second, which is far less than an update takes.
"""


def main() -> None:
    no_options(__doc__)
    text = report()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
