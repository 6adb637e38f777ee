"""Benchmark of the weight sync (disk, broadcast) against a bare transfer of the same bytes.

    python -m benchmarks.weight_sync            # five minutes on two cores
    python -m benchmarks.weight_sync --quick

- disk: ``SingleWriter.write`` against a copy of the same files, into the page cache or synced to disk;
- broadcast: ``WeightBroadcast.send`` to one receiver process against ``dist.broadcast`` of as many bytes
  in chunks of a bucket's size. The receiver stands in for a server (benchmarks/receiver.py).

They take turns. Memory of sender and receiver excludes their memory before, such as the sender's model.
Writes benchmarks/results/weight_sync.md.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from bapo_megatron.rollout.weight_sync.broadcast import SendingGroup, WeightBroadcast
from benchmarks.common import is_quick, machine, peaks_above, rounds_in_turns, save_model, write
from benchmarks.receiver import ReceiverProcess
from tests.support.models import SingleWriter

CPU = torch.device("cpu")

Way = tuple[Callable[[], object], int]
"""Function that sends the model once, and the receiver's pid."""


@dataclass(frozen=True)
class Size:
    """Size of the model and of the buckets."""

    hidden: int = 1024
    layers: int = 20
    vocab: int = 32768
    buckets_mb: tuple[int, ...] = (512, 128, 32)
    rounds: int = 9


QUICK = Size(hidden=64, layers=2, vocab=512, buckets_mb=(1,), rounds=1)


class Model:
    """Weights in memory, as in the trainer, and their folder."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.folder = save_model(folder, size.hidden, size.layers, size.vocab, positions=64)
        self.tensors: dict[str, Tensor] = {}
        for file in sorted(self.folder.glob("*.safetensors")):
            self.tensors |= {name: tensor.clone() for name, tensor in load_file(file).items()}
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.largest = max(tensor.nbytes for tensor in self.tensors.values())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())


def disk_ways(model: Model, folder: Path) -> dict[str, Callable[[], object]]:
    """Functions that stage a version and that copy the staged files, unsynced and synced."""
    staging = SingleWriter(folder / "staged", model.folder)
    staged = staging.write(model.weights(), 0)

    def stage() -> Path:
        return staging.write(model.weights(), 1)

    def copy() -> Path:
        copied = folder / "copied"
        shutil.rmtree(copied, ignore_errors=True)
        copied.mkdir()
        for file in staged.iterdir():
            shutil.copyfile(file, copied / file.name)
        return copied

    return {
        "staging": stage,
        "copy": copy,
        "staging, synced": lambda: synced(stage()),
        "copy, synced": lambda: synced(copy()),
    }


def synced(folder: Path) -> None:
    """fsync all files of the folder."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


@contextmanager
def our_broadcast(model: Model, bucket_mb: int) -> Iterator[Way]:
    """Context manager of ``WeightBroadcast`` to one receiver."""
    receiver = ReceiverProcess()
    sender = WeightBroadcast(CPU, bucket_mb=bucket_mb)
    sender.open(1, lambda place: receiver.join(place, 1))
    yield lambda: sender.send(model.weights(), receiver.receive), receiver.pid
    left = receiver.leave()
    sender.close()
    left.result()
    receiver.stop()


@contextmanager
def raw_broadcast(model: Model, bucket_mb: int, reuse: bool) -> Iterator[Way]:
    """Context manager of a raw broadcast of equal chunks, into one buffer (``reuse``) or new memory."""
    receiver = ReceiverProcess()
    group = SendingGroup("127.0.0.1", f"raw {reuse} {bucket_mb}", 1, CPU, 120.0)
    joined = receiver.join(group.place, 1)
    group.form().result()
    joined.result()
    chunk = bucket_mb * 2**20
    sizes = [min(chunk, model.nbytes - start) for start in range(0, model.nbytes, chunk)]
    memory_B = torch.ones(max(sizes), dtype=torch.uint8)

    def send() -> None:
        received = receiver.receive_raw(sizes, reuse)
        for size in sizes:
            dist.broadcast(memory_B[:size], src=0, group=group._group)
        received.result()

    yield send, receiver.pid
    group.close().result()
    receiver.stop()


def ratio(raw: Sequence[float], ours: Sequence[float]) -> float:
    """Speed relative to raw: median over rounds, since the two of a round see the same machine state."""
    return statistics.median(r / o for r, o in zip(raw, ours, strict=True))


def disk_rows(model: Model, rounds: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        ways = disk_ways(model, Path(folder))
        peaks = {name: peaks_above(run, ["self"])[0] for name, run in ways.items()}
        seconds = rounds_in_turns(ways, rounds)
    rows = []
    for name, values in seconds.items():
        speed = model.nbytes / statistics.median(values) / 1e9
        by_copy = ratio(seconds[name.replace("staging", "copy")], values)
        rows.append(f"| {name} | {speed:.2f} | {by_copy:.2f} | {peaks[name]:.2f} |")
    return rows


def broadcast_rows(model: Model, bucket_mb: int, rounds: int) -> list[str]:
    with (
        our_broadcast(model, bucket_mb) as ours,
        raw_broadcast(model, bucket_mb, reuse=False) as new_memory,
        raw_broadcast(model, bucket_mb, reuse=True) as one_buffer,
    ):
        ways = {"WeightBroadcast": ours, "raw": new_memory, "raw, one buffer": one_buffer}
        # Before the timing: the sender keeps its buffers.
        peaks = {name: peaks_above(run, ["self", pid]) for name, (run, pid) in ways.items()}
        seconds = rounds_in_turns({name: run for name, (run, _) in ways.items()}, rounds)
    rows = []
    for name, values in seconds.items():
        sender, receiver = peaks[name]
        speed = model.nbytes / statistics.median(values) / 1e9
        by_raw, by_one = ratio(seconds["raw"], values), ratio(seconds["raw, one buffer"], values)
        figures = (speed, by_raw, by_one, sender, receiver)
        rows.append(f"| {bucket_mb} | {name} | " + " | ".join(f"{x:.2f}" for x in figures) + " |")
    return rows


def report(size: Size) -> str:
    with tempfile.TemporaryDirectory() as folder:
        model = Model(Path(folder), size)
        disk = "\n".join(disk_rows(model, size.rounds))
        sent = "\n".join(row for cut in size.buckets_mb for row in broadcast_rows(model, cut, size.rounds))
    gib, largest = model.nbytes / 2**30, model.largest / 2**30
    return f"""# Weights to servers

Command: `python -m benchmarks.weight_sync`

{machine()}, one thread in each process.
A Qwen2 of {size.layers} layers, hidden {size.hidden}, vocabulary {size.vocab:,}, float32:
{gib:.2f} GiB, the largest tensor {largest:.2f} GiB. {size.rounds} rounds in which all take turns; GB/s are
medians, and ratios are medians of those within a round. Memory is what a process has at its peak above what
it holds before; the sender holds the model.

## Disk

| | GB/s | speed / copy | peak, GiB |
|---|---:|---:|---:|
{disk}

*staging* writes the model as a folder of safetensors files; *copy* is `shutil.copyfile` of those files.
*synced*: until the disk has them.

## Broadcast over loopback, one receiver

| bucket, MiB | | GB/s | speed / raw | speed / raw, one buffer | sender's peak, GiB | receiver's peak, GiB |
|---:|---|---:|---:|---:|---:|---:|
{sent}

*WeightBroadcast* copies tensors into buckets and sends each; the receiver is told of every bucket, allocates
memory for it as SGLang does, and does not load it. *raw* is `dist.broadcast` of as many bytes in chunks of a
bucket's size from one buffer that is ready, received into new memory as SGLang does; *raw, one buffer*
receives into the same memory again and again, which SGLang does not.

The sender needs two buckets; a tensor that is larger than a bucket is sent from where it lies. The receiver
needs one bucket, or a larger tensor and the bucket before it. New memory is what costs: most of the time of
*raw* is page faults of the receiver, and the C library reuses memory only of less than 32 MiB, which our
smallest buckets are. The first bucket is gathered before anything is sent, so a model of few buckets is
slower; one of 64 GB has more buckets of 512 MiB than this one has of 32.
"""


def main() -> None:
    quick = is_quick(__doc__)
    torch.set_num_threads(1)
    if quick:
        print(report(QUICK))
    else:
        write("weight_sync", report(Size()))


if __name__ == "__main__":
    main()
