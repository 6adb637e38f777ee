"""Shared helpers of the benchmarks: process group of size one, random models and samples, timing, pages."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bapo_megatron.config import BatchConfig, ModelConfig, OptimizerConfig, ParallelConfig
from bapo_megatron.data.samples import Sample
from bapo_megatron.policy.layout import parallel_processes
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.runtime.distributed import free_port

RESULTS = Path(__file__).parent / "results"


def is_quick(about: str | None) -> bool:
    """Whether ``--quick`` was passed: a small version, printed and not written to the results."""
    parser = _parser(about)
    parser.add_argument("--quick", action="store_true", help="a small version, which is only printed")
    return bool(parser.parse_args().quick)


def no_options(about: str | None) -> None:
    """Reject arguments and answer ``--help``, before minutes of measurement."""
    _parser(about).parse_args()


def _parser(about: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


@contextmanager
def one_process(threads: int = 2) -> Iterator[None]:
    """Context manager of process groups of size one, with ``threads`` torch threads."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    torch.set_num_threads(threads)
    with parallel_processes(ParallelConfig()):
        yield


def save_model(folder: Path, hidden: int, layers: int, vocab: int, positions: int, **others: object) -> Path:
    """Write a Qwen2 with random float32 weights as a Hugging Face folder; returns the folder.

    Eight query heads and two KV heads. ``others``: configuration fields that replace the defaults.
    """
    import transformers

    fields: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
    }
    config = transformers.Qwen2Config(**{**fields, **others})
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).float().save_pretrained(folder)
    return folder


def torch_policy(folder: Path, batch: BatchConfig) -> MegatronPolicy:
    """Float32 policy of an HF folder, in this process."""
    model = ModelConfig(folder, dtype="float32")
    return MegatronPolicy(model, ParallelConfig(), batch, OptimizerConfig(lr=1e-6), planned_updates=1000)


def random_samples(
    count: int, longest: int, vocab: int, version: int = -1, equal: bool = False
) -> list[Sample]:
    """Samples of log-normal lengths up to ``longest``, with advantages of both signs and ratios around 1.

    ``equal``: all samples have ``longest`` tokens.
    """
    generator = np.random.default_rng(0)
    lengths = np.minimum(longest - 1, 16 + generator.lognormal(np.log(longest / 4), 0.7, count)).astype(int)
    lengths = np.full(count, longest - 1) if equal else lengths
    return [
        Sample(
            token_ids=generator.integers(0, vocab, length + 1).astype(np.int32),
            log_probs_R=(-np.log(vocab) + 0.3 * generator.normal(size=length)).astype(np.float32),
            versions_R=np.full(length, version, dtype=np.int32),
            advantage=float(generator.normal()),
        )
        for length in lengths
    ]


Clock = Callable[[], float]


def in_turns(
    candidates: Mapping[str, Callable[[], object]], rounds: int, clock: Clock = time.perf_counter
) -> dict[str, float]:
    """Median seconds of each candidate over interleaved rounds."""
    seconds = rounds_in_turns(candidates, rounds, clock)
    return {name: statistics.median(values) for name, values in seconds.items()}


def rounds_in_turns(
    candidates: Mapping[str, Callable[[], object]], rounds: int, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each candidate in each round, interleaved, so that machine load affects all equally."""
    for run in candidates.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            start = clock()
            run()
            seconds[name].append(clock() - start)
    return seconds


def in_a_process(module: str, *arguments: object) -> Any:
    """Run a benchmark module in its own process. Returns the JSON in its last line of output."""
    command = [sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)]
    root = Path(__file__).parents[1]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=root).stdout
    return json.loads(out.splitlines()[-1])


def peak_above(run: Callable[[], object]) -> float:
    """Peak memory of this process during ``run``, in GiB above its memory before."""
    return peaks_above(run, ["self"])[0]


def peaks_above(run: Callable[[], object], pids: Sequence[int | str]) -> list[float]:
    """``peak_above`` of several processes."""
    before = [_kibibytes("VmRSS", pid) for pid in pids]
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets VmHWM
    run()
    return [(_kibibytes("VmHWM", pid) - base) / 2**20 for pid, base in zip(pids, before, strict=True)]


def _kibibytes(field: str, pid: int | str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def machine() -> str:
    """Description of this machine for a result page."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = names[0].split(":")[1].strip() if names else platform.machine()
    return f"{model}, {os.cpu_count()} cores, torch {torch.__version__}"


def write(name: str, text: str) -> None:
    """Print the report and write it to benchmarks/results."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
    print(text)
