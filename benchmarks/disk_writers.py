"""The weights' folder, written by one process as before and by all ranks of a replica: bytes, time, memory.

    python -m benchmarks.disk_writers            # two minutes on two cores
    python -m benchmarks.disk_writers --quick

Each writer is a process with the whole model in its hands, as a rank has when the weights are gathered. All
ways take turns. A shared file system gives one writer a fraction of what it gives many; that is played by a
sleep for each piece of a file. Writes benchmarks/results/disk_writers.md.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.hf import stream_writer
from bapo_megatron.hf.background_copy import CHUNK_BYTES, CHUNKS
from bapo_megatron.rollout.weight_sync.disk import WeightStaging
from benchmarks.common import is_quick, machine, peaks_above, rounds_in_turns, write
from benchmarks.weight_sync import QUICK, Model, Size

WRITERS = (1, 2, 4)
STREAM_BYTES_PER_S = 20e6
"""What the played file system gives one writer: so little that this machine's own speed hardly matters."""

Report = tuple[int, float]
"""Bytes that a writer wrote, and its peak memory in GiB above what it held before."""


def in_one_thread(model: Model, staging: WeightStaging, version: int) -> list[Report]:
    """As it was done before: rank 0 alone copies a tensor, writes it, and goes on to the next."""
    staging.prepare(version)
    files = stream_writer._Files(staging._temporary(version), stream_writer._SHARD_BYTES, 0, 1)

    def run() -> None:
        for name, tensor in model.weights():
            files.begin(name, tensor.dtype, tuple(tensor.shape))
            files.append(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8))
        files.close()

    [peak] = peaks_above(run, ["self"])
    staging.publish(version, files.sizes)
    return [(sum(files.sizes.values()), peak)]


def by_writers(model: Model, staging: WeightStaging, version: int, writers: int) -> list[Report]:
    """As the ranks of a replica do it, one process for each."""
    staging.prepare(version)
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for writer in range(writers):
        mine, theirs = context.Pipe()
        process = context.Process(target=_write, args=(theirs, model, staging, version, writer, writers))
        process.start()
        pipes.append(mine)
        processes.append(process)
    found = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    staging.publish(version, {name: size for sizes, _ in found for name, size in sizes.items()})
    return [(sum(sizes.values()), peak) for sizes, peak in found]


def _write(pipe: Any, model: Model, staging: WeightStaging, version: int, writer: int, writers: int) -> None:
    sizes: dict[str, int] = {}

    def run() -> None:
        sizes.update(staging.write_share(model.weights(), version, writer, writers))

    [peak] = peaks_above(run, ["self"])
    pipe.send((sizes, peak))


def slowly(append: Callable[[Any, Tensor], None]) -> Callable[[Any, Tensor], None]:
    """A file's write at the rate of one stream."""

    def write_slowly(shard: Any, bytes_B: Tensor) -> None:
        began = time.monotonic()
        append(shard, bytes_B)
        time.sleep(max(0.0, bytes_B.nbytes / STREAM_BYTES_PER_S - (time.monotonic() - began)))

    return write_slowly


def rows(model: Model, rounds: int) -> list[str]:
    """One row for each way."""
    reports: dict[str, list[Report]] = {}
    before = "before: rank 0, one thread"
    ways = {before: 0, **{f"after: {n} writer{'s' * (n > 1)}": n for n in WRITERS}}

    def run(name: str, staging: WeightStaging) -> None:
        writers = ways[name]
        reports[name] = (
            by_writers(model, staging, 1, writers) if writers else in_one_thread(model, staging, 1)
        )

    append = stream_writer._Shard.append
    stream_writer._Shard.append = slowly(append)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        staging = WeightStaging(Path(folder), model.folder)
        seconds = rounds_in_turns({name: partial(run, name, staging) for name in ways}, rounds)
    stream_writer._Shard.append = append  # type: ignore[method-assign]
    found = []
    for name, values in seconds.items():
        most, peak = max(n for n, _ in reports[name]), max(p for _, p in reports[name])
        total, median = sum(n for n, _ in reports[name]), statistics.median(values)
        faster = statistics.median(seconds[before]) / median
        figures = f"{most / 2**20:,.0f} | {total / 2**20:,.0f} | {median:.1f} | {faster:.1f} | {peak:.2f}"
        found.append(f"| {name} | {figures} |")
    return found


def report(size: Size, rounds: int) -> str:
    """The whole text."""
    with tempfile.TemporaryDirectory() as folder:
        model = Model(Path(folder), size)
        table = "\n".join(rows(model, rounds))
    return f"""# A folder of weights, written by all ranks of a replica

Command: `python -m benchmarks.disk_writers`

{machine()}, shared with other work; {rounds} rounds in which all take turns, medians. A Qwen2 of
{model.nbytes / 2**30:.2f} GiB, the largest tensor {model.largest / 2**20:.0f} MiB. Each writer is a
process that has the whole model, as a rank has when the weights are gathered. *Memory* is a writer's peak
above the model; its buffers are {CHUNKS} of {CHUNK_BYTES / 2**20:.0f} MiB at most.

| way | most MiB a writer | MiB in all | seconds | times as fast as before | memory, GiB |
|---|---:|---:|---:|---:|---:|
{table}

The disk is played: each writer gets {STREAM_BYTES_PER_S / 1e6:.0f} MB/s, and any number of
them at once, as parallel file systems nearly do. The seconds follow the bytes of the writer that has most,
and those are what counts here: of a 32B model (65.5 GB) one writer wrote all, and each of the 64 ranks of
`recipes/bp_math_32b_64k.py` writes 1.0 GB. The two cores of this machine and its disk would be shared by the
writers, so they say nothing of it.
"""


def main() -> None:
    """Measure, and write the report."""
    quick = is_quick(__doc__)
    torch.set_num_threads(1)
    if quick:
        print(report(QUICK, 1))
    else:
        write("disk_writers", report(Size(hidden=512, layers=10), 2))


if __name__ == "__main__":
    main()
