"""Benchmark of the training stall of a checkpoint: synchronous against background writes.

    python -m benchmarks.checkpoint_stall            # ten minutes on two cores
    python -m benchmarks.checkpoint_stall --quick

One policy on one process makes update after update. Both ways save it in turns, through the store that a run
uses: files, digests, sync, rename. Then the checkpoint is verified, as a continuation does, by one thread and
by several. Writes benchmarks/results/checkpoint_stall.md.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

from bapo_megatron.algo.bapo import grpo
from bapo_megatron.checkpoint import reader
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config import AlgorithmConfig, BatchConfig, CheckpointConfig
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.trainer.update_loss import UpdateLoss
from benchmarks.common import (
    in_turns,
    is_quick,
    machine,
    one_process,
    random_samples,
    save_model,
    torch_policy,
    write,
)

READERS = (1, 2, 4)
OF_A_RANK = reader.READERS


@dataclass(frozen=True)
class Size:
    """A model, and how often it is saved each way."""

    hidden: int
    layers: int
    vocab: int
    rounds: int = 7


FULL = (Size(256, 6, 8192), Size(512, 12, 16384))
QUICK = (Size(64, 2, 512, rounds=2),)


@dataclass(frozen=True)
class Save:
    """Seconds of one checkpoint."""

    stall_s: float
    """Seconds in which the training stood still."""
    total_s: float
    """Seconds until the checkpoint was complete."""
    update_s: float | None
    """Seconds of an update during the write; None if none was made."""


class Training:
    """A policy that makes updates, and the store of its checkpoints."""

    def __init__(self, folder: Path, size: Size) -> None:
        batch = BatchConfig(pack_tokens=1024, recompute="none")
        model = save_model(folder / "model", size.hidden, size.layers, size.vocab, positions=1024)
        self._policy: MegatronPolicy = torch_policy(model, batch)
        samples = random_samples(8, 512, size.vocab)
        self._packs = pack_samples(samples, batch.pack_tokens, layout=self._policy.pack_layout)
        self._loss, _ = UpdateLoss(AlgorithmConfig(bounds=grpo()), False).loss(
            self._policy, self._packs, True
        )
        self._run_dir = folder
        self.store = CheckpointStore(RunPaths(folder), CheckpointConfig(keep_last=1))
        self._step = 0

    def update(self) -> float:
        """Make one update; its seconds."""
        start = perf_counter()
        self._policy.update(self._packs, self._loss)
        return perf_counter() - start

    def _begin(self) -> float:
        self._step += 1
        start = perf_counter()
        self.store.begin((self._step, 0), {"policy": self._policy.save}, {"step": self._step})
        return perf_counter() - start

    def save_at_once(self) -> Save:
        """Synchronous save: the training waits until the checkpoint is complete."""
        start = perf_counter()
        self._begin()
        self.store.finalize(wait=True)
        seconds = perf_counter() - start
        return Save(seconds, seconds, None)

    def save_in_the_background(self) -> Save:
        """Background save: the training continues, and polls the writer after each update."""
        start = perf_counter()
        stall_s, updates = self._begin(), []
        saved = None
        while saved is None:
            updates.append(self.update())
            look = perf_counter()
            saved = self.store.finalize(wait=False)
            stall_s += perf_counter() - look
        return Save(stall_s, perf_counter() - start, statistics.median(updates))

    def nbytes(self) -> int:
        """The bytes of the newest checkpoint."""
        return sum(
            path.stat().st_size for path in RunPaths(self._run_dir).checkpoints.rglob("*") if path.is_file()
        )

    def verify(self, readers: int) -> None:
        """Read it back, so many files at a time."""
        reader.READERS = readers
        assert reader.latest_checkpoint(RunPaths(self._run_dir)) is not None


def measured(size: Size) -> tuple[str, str]:
    """A row of each table."""
    with one_process(), tempfile.TemporaryDirectory() as folder:
        training = Training(Path(folder), size)
        training.update()
        training.save_at_once()
        training.save_in_the_background()
        ways: tuple[Callable[[], Save], ...] = (training.save_at_once, training.save_in_the_background)
        undisturbed, rows = [], []
        for _ in range(size.rounds):
            undisturbed.append(training.update())
            rows.append([way() for way in ways])
        gigabytes = training.nbytes() / 1e9
        verify = in_turns({str(n): partial(training.verify, n) for n in READERS}, size.rounds)
    at_once, behind = zip(*rows, strict=True)
    update_s = statistics.median(undisturbed)
    slower = statistics.median(save.update_s or update_s for save in behind) / update_s
    return _row(gigabytes, at_once, behind, slower), _verify_row(gigabytes, verify)


def _row(gigabytes: float, at_once: Sequence[Save], behind: Sequence[Save], slower: float) -> str:
    def median(saves: Sequence[Save], name: str) -> float:
        return statistics.median(getattr(save, name) for save in saves)

    stalls = median(at_once, "stall_s"), median(behind, "stall_s")
    totals = median(at_once, "total_s"), median(behind, "total_s")
    spread = sorted(one.stall_s / two.stall_s for one, two in zip(at_once, behind, strict=True))
    cells = [
        *(f"{1000 * gigabytes:,.0f} MB", f"{stalls[0]:.2f} s", f"{stalls[1]:.2f} s"),
        f"{stalls[0] / stalls[1]:.1f} ({spread[0]:.1f} to {spread[-1]:.1f})",
        *(f"{totals[1]:.2f} s", f"{totals[1] / totals[0]:.2f}", f"{slower:.2f}"),
    ]
    return f"| {' | '.join(cells)} |"


def _verify_row(gigabytes: float, seconds: dict[str, float]) -> str:
    ratios = " | ".join(f"{seconds['1'] / seconds[str(n)]:.2f}" for n in READERS[1:])
    return f"| {1000 * gigabytes:,.0f} MB | {gigabytes / seconds['1']:.2f} GB/s | {ratios} |"


def report(sizes: Sequence[Size]) -> str:
    rows = [measured(size) for size in sizes]
    saves, verified = ("\n".join(column) for column in zip(*rows, strict=True))
    readers = " | ".join(f"{n} threads" for n in READERS[1:])
    return f"""# Checkpoints: how long the training stands still

Command: `python -m benchmarks.checkpoint_stall`

{machine()}, two threads, float32, one process; random Qwen2 models. Medians of {sizes[0].rounds} rounds
in which both ways save in turns.

| checkpoint | still, at once | background | ratio (of rounds) | whole, background | / at once | updates |
|---:|---:|---:|---:|---:|---:|---:|
{saves}

*Still* is the time in which the training makes no update. *Whole* is the time until the checkpoint counts; in
the background it shares the machine with the training, and is noticed after an update. *Updates* is the time
of an update meanwhile, against one that nothing disturbs.

Verified by a continuation, from the page cache: the speed of one thread, and how many times faster more are.
Each rank verifies its share of the files with {OF_A_RANK} threads.

| checkpoint | one thread | {readers} |
|---:|---:|{"---:|" * len(READERS[1:])}
{verified}
"""


def main() -> None:
    if is_quick(__doc__):
        print(report(QUICK))
    else:
        write("checkpoint_stall", report(FULL))


if __name__ == "__main__":
    main()
