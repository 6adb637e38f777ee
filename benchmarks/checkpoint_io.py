"""Benchmark of checkpoint I/O: bytes that each rank writes and reads, and its peak memory.

    python -m benchmarks.checkpoint_io            # two minutes on two cores
    python -m benchmarks.checkpoint_io --quick

Eight gloo processes hold a random Qwen2 model at TP 2, DP 2, CP 2 in bfloat16, and make a checkpoint in two
ways: by megatron's own gathering, where the first rank of DP x CP writes everything and all read everything,
and shared among the ranks. Writes benchmarks/results/checkpoint_io.md.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bapo_megatron.config import BatchConfig, ModelConfig, OptimizerConfig, ParallelConfig
from bapo_megatron.hf.reader import HfReader
from bapo_megatron.policy import checkpoint as megatron_checkpoint
from bapo_megatron.policy.megatron import MegatronPolicy
from benchmarks.common import is_quick, machine, peak_above, save_model, write
from tests.support.saves import CountingReader, complete, counting_reads
from tests.support.workers import run_layout

LAYOUT = ParallelConfig(tensor=2, data=2, context=2, sequence=True)
SIZE = {"hidden": 384, "layers": 6, "vocab": 8192}
QUICK = {"hidden": 64, "layers": 2, "vocab": 512}


@dataclass(frozen=True)
class Measured:
    """One rank's figures; bytes, but for ``parameters``."""

    parameters: int
    """Parameters of its model shard."""
    folder_whole: int
    """Read of the model folder if it takes whole tensors, and cuts them."""
    folder_part: int
    """Read of the model folder."""
    written: int
    read: int
    peak_of_save: float
    """Memory above what it held before."""
    peak_of_load: float


def measure(model: Path, path: Path, shared: bool) -> Measured:
    """Build the policy, save it, and load what was saved."""
    if not shared:
        _as_megatron_does()
    reader = CountingReader(model)
    config, batch = ModelConfig(model, "bfloat16"), BatchConfig(pack_tokens=128)
    policy = MegatronPolicy(config, LAYOUT, batch, OptimizerConfig(), 1, reader=reader)
    complete(policy.save(path / "first"))
    policy.load(path / "first", 0)  # pages and libraries that are touched once
    dist.barrier()
    peak_of_save = _peak(lambda: complete(policy.save(path / "second")))
    written = sum(file.stat().st_size for file in (path / "second").glob(f"__{dist.get_rank()}_*.distcp"))
    with counting_reads() as read:
        peak_of_load = _peak(lambda: policy.load(path / "second", 0))
    return Measured(
        parameters=sum(parameter.numel() for parameter in policy._weights.local.values()),
        folder_whole=_whole_tensors(policy, model),
        folder_part=reader.count,
        written=written,
        read=sum(read),
        peak_of_save=peak_of_save,
        peak_of_load=peak_of_load,
    )


def _as_megatron_does() -> None:
    """Baseline: megatron's gathered optimizer state, and its plain save and load strategies."""
    changes: dict[str, Callable[..., Any]] = {
        "shard_over_ranks": lambda _optimizer: None,
        "FullyParallelSaveStrategyWrapper": lambda strategy, _group: strategy,
        "FullyParallelLoadStrategyWrapper": lambda strategy, _group: strategy,
    }
    for name, value in changes.items():
        setattr(megatron_checkpoint, name, value)


def _whole_tensors(policy: MegatronPolicy, model: Path) -> int:
    """Bytes of every tensor of the folder that this rank needs a part of."""
    weights, reader = policy._weights, HfReader(model)
    names = [
        name.format(layer=layer) for (key, layer) in weights.local for name in weights.table[key].hf_names
    ]
    return sum(reader.read(name).nbytes for name in names)


def _peak(run: Callable[[], object]) -> float:
    ctypes.CDLL(None).malloc_trim(0)  # what is freed and kept would hide what is taken
    dist.barrier()
    found = 2**30 * peak_above(run)
    dist.barrier()
    return found


def report(size: dict[str, int]) -> str:
    """Measure both ways, and describe what was found."""
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder) / "model", **size, positions=1024)
        ranks = {
            name: run_layout(measure, LAYOUT, model, Path(folder) / name, shared)
            for name, shared in (("megatron's", False), ("shared", True))
        }
    one = ranks["shared"][0]
    tables = "\n\n".join(_table(name, found) for name, found in ranks.items())
    return f"""# Checkpoints: what each rank writes, reads and holds

Command: `python -m benchmarks.checkpoint_io`

{machine()}; eight gloo processes at TP 2 + SP, DP 2, CP 2,
so D = DP x CP = 4. A random Qwen2 model in bfloat16, P = {one.parameters / 1e6:.1f} M parameters a
model shard; its HF folder is in float32. MB, and in brackets bytes a parameter of the shard. *Memory*
is the peak above what the rank held before.

{tables}

A checkpoint has 14 bytes a parameter: bfloat16 weights, float32 master weights and moments. Shared, a
rank writes and reads 14 / D = 3.5. On a CPU the state of the optimizer is written from where it lies, and
weights are cloned; on a GPU what a rank writes is first copied to host memory, so the bytes that it writes
are the host memory that a save takes.

The model folder: rank 0 reads {one.folder_part / 1e6:.1f} MB of it. Whole tensors of its stage, of which it
kept a part, are {one.folder_whole / 1e6:.1f} MB.
"""


def _table(name: str, ranks: list[Measured]) -> str:
    lines = [
        f"| {number} | " + " | ".join(_cell(value, rank.parameters) for value in _bytes(rank)) + " |"
        for number, rank in enumerate(ranks)
    ]
    titles = ("written", "read", "memory of the save", "memory of the load")
    return "\n".join(
        [f"{name.capitalize()}:", "", f"| rank | {' | '.join(titles)} |", "|---:" * 5 + "|", *lines]
    )


def _bytes(rank: Measured) -> tuple[float, ...]:
    return rank.written, rank.read, rank.peak_of_save, rank.peak_of_load


def _cell(value: float, parameters: int) -> str:
    return f"{value / 1e6:,.1f} ({value / parameters:.1f})"


def main() -> None:
    """Measure and write the report."""
    torch.manual_seed(0)
    if is_quick(__doc__):
        print(report(QUICK))
    else:
        write("checkpoint_io", report(SIZE))


if __name__ == "__main__":
    main()
