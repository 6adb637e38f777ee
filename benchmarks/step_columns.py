"""A step's batch on four ranks: header by broadcast and columns from the file, beside the broadcast of all.

    python -m benchmarks.step_columns [--quick]

Both ways begin where rank 0 knows the path of the step's file, and end where every rank has made the packs of
one pass over the batch, in four updates. The second way is that of earlier versions: rank 0 reads the batch
and broadcasts it, one pickled object with all columns, to ranks that keep it. Gloo, on this machine alone.
"""

from __future__ import annotations

import json
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from bapo_megatron.algo.advantages import group_advantages
from bapo_megatron.data.packing import pack_samples, split_into_updates
from bapo_megatron.data.samples import Sample, TrainingSample, samples_of
from bapo_megatron.rollout.sampler.step_batches import read_header, read_step, write_step
from bapo_megatron.rollout.sampler.step_columns import StepColumns
from bapo_megatron.runtime.distributed import (
    all_gather,
    barrier,
    broadcast_from_main,
    is_main,
    on_all_ranks,
    process_group,
    run_processes,
)
from bapo_megatron.types import Group, PackLayout, Prompt, Rollout, StepBatch
from benchmarks.common import is_quick, machine, peak_above, write

RANKS, UPDATES, PACK_TOKENS, RESPONSES = 4, 4, 32768, 16
SIZES, QUICK = ((64, 470), (64, 17_000)), ((8, 100),)
"""Prompts, and tokens of a response in the mean."""
ROUNDS = 3


class Row(NamedTuple):
    """What one way costs. Seconds and bytes are those of the slowest or largest rank."""

    share_s: float
    pack_s: float
    broadcast: int
    read: int
    """Bytes that a rank other than 0 reads."""
    peak_mib: float
    """Memory of a rank other than 0, above what it held."""
    cpu_s: float
    """Processor time of all ranks together, for sharing and packing."""


Held = tuple[object, list[list[TrainingSample]]]
"""What a rank keeps for the step, and its samples."""


def by_file(folder: Path) -> Held:
    """Header by broadcast; the columns stay in the file."""
    columns = StepColumns(broadcast_from_main(read_header(folder, 1) if is_main() else None))
    on_all_ranks(columns.open)
    return columns, [[*group] for group in samples_of(columns, "grpo")]


def by_broadcast(folder: Path) -> Held:
    """The whole batch by broadcast."""
    batch = broadcast_from_main(read_step(folder, 1) if is_main() else None)
    return batch, [_in_memory(group) for group in batch.groups]


def _in_memory(group: Group) -> list[TrainingSample]:
    advantages = group_advantages([one.reward for one in group.rollouts], "grpo")
    return [
        Sample(
            np.concatenate([group.prompt.token_ids_P, one.token_ids_R]),
            one.log_probs_R,
            one.versions_R,
            float(value),
        )
        for one, value in zip(group.rollouts, advantages, strict=True)
    ]


def make_packs(groups: Sequence[Sequence[TrainingSample]]) -> None:
    """This rank's packs of one pass, update by update, as the loop makes them."""
    layout = PackLayout(torch.distributed.get_rank(), RANKS, quadratic=1e-5)
    for part in split_into_updates(groups, UPDATES, (0, 1, 0)):
        pack_samples([sample for group in part for sample in group], PACK_TOKENS, "token", layout)


def timed(way: Callable[[Path], Held], folder: Path) -> tuple[float, float]:
    """Seconds until all ranks can begin to pack, and until all have packed."""
    barrier()
    start = time.perf_counter()
    _, groups = way(folder)
    barrier()
    shared = time.perf_counter()
    make_packs(groups)
    barrier()
    return shared - start, time.perf_counter() - shared


def costs(way: Callable[[Path], Held], folder: Path) -> tuple[int, float, float]:
    """Bytes that this rank reads, MiB at its peak, processor seconds, in a round of its own."""
    before, start = _bytes_read(), time.process_time()
    peak = peak_above(lambda: timed(way, folder))
    return _bytes_read() - before, 1024 * peak, time.process_time() - start


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])  # rchar: of read and pread, not of sockets' recv


def worker(folder: Path, found: Path, rounds: int) -> None:
    """One rank; rank 0 leaves the rows in ``found``."""
    torch.set_num_threads(1)
    with process_group("gloo", 10):
        ways = (by_broadcast, by_file)
        # Memory first, and of the way that should need less: what a process has freed, it may still hold.
        [ours, theirs] = [all_gather(costs(way, folder)) for way in reversed(ways)]
        seconds: list[list[tuple[float, float]]] = [[], []]
        for _ in range(rounds):
            for way, times in zip(ways, seconds, strict=True):
                times.append(timed(way, folder))
        if is_main():
            sent = [len(pickle.dumps(read(folder, 1))) for read in (read_step, read_header)]
            rows = [
                Row(
                    *(statistics.median(one) for one in zip(*times, strict=True)),
                    size,
                    max(read for read, _, _ in ranks[1:]),
                    max(peak for _, peak, _ in ranks[1:]),
                    sum(cpu for _, _, cpu in ranks),
                )
                for times, size, ranks in zip(seconds, sent, (theirs, ours), strict=True)
            ]
            found.write_text(json.dumps(rows))


def step_batch(prompts: int, length: int) -> StepBatch:
    """Random responses of 1/2 to 3/2 ``length`` tokens."""
    generator = np.random.default_rng(0)

    def response(reward: float) -> Rollout:
        tokens = int(generator.integers(length // 2, 3 * length // 2))
        return Rollout(
            generator.integers(0, 150_000, tokens).astype(np.int32),
            generator.normal(size=tokens).astype(np.float32),
            np.zeros(tokens, np.int32),
            "stop",
            reward,
        )

    ids = np.arange(200, dtype=np.int32)
    groups = tuple(
        Group(Prompt(n, ids, "42", "x"), tuple(response(float(one % 2)) for one in range(RESPONSES)))
        for n in range(prompts)
    )
    return StepBatch(groups, {"reward/mean": 0.5})


def measured(prompts: int, length: int, rounds: int) -> tuple[int, list[Row]]:
    """Bytes of a step's file, and the rows of both ways."""
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), Path(name, "rows")
        size = write_step(folder, 1, step_batch(prompts, length)).stat().st_size
        run_processes(worker, (folder, found, rounds), RANKS)
        return size, [Row(*row) for row in json.loads(found.read_text())]


def lines(size: int, responses: int, rows: Sequence[Row]) -> list[str]:
    """Rows of the page's table for one size."""
    first = f"| {size / 1e6:,.0f} MB, {responses:,} responses"
    return [
        f"{first} | {name} | {row.share_s:.2f} | {row.pack_s:.2f} | {row.broadcast / 1e6:,.2f} | "
        f"{row.read / 1e6:,.1f} | {row.peak_mib:,.0f} | {row.cpu_s:.2f} |"
        for name, row in zip(("whole batch by broadcast", "header by broadcast"), rows, strict=True)
    ]


def main() -> None:
    quick = is_quick(__doc__)
    table = []
    for prompts, length in QUICK if quick else SIZES:
        size, rows = measured(prompts, length, 1 if quick else ROUNDS)
        table += lines(size, prompts * RESPONSES, rows)
    page = f"""# A step's batch on every rank

Command: `python -m benchmarks.step_columns`

{machine()}. {RANKS} ranks on this machine, gloo over loopback; the file is in
the page cache. Medians of {ROUNDS} rounds, in turns. *share*: from the path that rank 0 knows until each rank
can begin to pack. *pack*: until every rank has made its packs of one pass, in {UPDATES} updates; here the
header's way reads the columns. *broadcast*: the pickled object. *read*: by a rank other than 0 from files.
*memory*: of such a rank at its peak, above what it held before. *processor*: time of all ranks together, one
round. Wall times include what else the machine did: its load average at the end was {os.getloadavg()[0]:.0f}.

| step file | way | share, s | pack, s | broadcast, MB | read, MB | memory, MiB | processor, s |
|---|---|---:|---:|---:|---:|---:|---:|
{chr(10).join(table)}

Rank 0 reads and verifies the whole file in both ways; with a header it also makes a checksum of each
response, which the rank that reads it compares. Not measured: several nodes, a network file system.
"""
    if quick:
        print(page)
    else:
        write("step_columns", page)


if __name__ == "__main__":
    main()
