"""Benchmark of the checkpoint converter against a file copy: wall time, CPU time, memory.

    python -m benchmarks.checkpoint_convert [--folder FOLDER] [--rounds 5] [--slow-rounds 2]

Writes benchmarks/results/checkpoint_convert.md. FOLDER needs room for five times the model. For a small
model: --layers 2 --vocabulary 8192 --results /tmp/small.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bapo_megatron.hf.config import model_shape
from bapo_megatron.hf.parameter_map import hf_tensors
from checkpoints_tools.formats.safetensors_folder import plan_safetensors

# DeepSeek-R1-Distill-Qwen-1.5B.
_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
RESULTS = Path(__file__).parent / "results"
_TOOL = (sys.executable, "-m", "checkpoints_tools.cli")
_ORACLE = (sys.executable, "-W", "ignore", "-m", "benchmarks.dcp_convert")
_FORMAT_UTILS = f"{sys.executable} -W ignore -m torch.distributed.checkpoint.format_utils"
_OF_HF, _OF_MEGATRON = "cp -r of the HF folder, and fsync", "cp -r of the Megatron folder, and fsync"


@dataclass(frozen=True)
class Run:
    """Cost of one process."""

    wall_s: float
    cpu_s: float
    peak_mib: float


@dataclass(frozen=True)
class Candidate:
    """A command to measure once per round."""

    command: Sequence[object]
    base: str | None = None
    """The copy that serves as its baseline."""
    rounds: int | None = None
    """Number of rounds in which it runs; None: all."""


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument(
        "--slow-rounds", type=int, default=2, help="of what takes many times as long; 0 leaves it out"
    )
    parser.add_argument("--only", nargs="+", default=[], help="candidates besides the copies")
    parser.add_argument("--results", type=Path, default=RESULTS / "checkpoint_convert.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        nbytes = save_model(folder / "hf", arguments.layers, arguments.vocabulary)
        run_process([*_TOOL, "to-megatron", folder / "hf", folder / "megatron"])
        chosen = candidates(folder, arguments.slow_rounds)
        if arguments.slow_rounds:
            run_process(dcp_to_torch(folder / "megatron/release", folder / "torch"))
        if arguments.only:
            chosen = {n: c for n, c in chosen.items() if n in {*arguments.only, _OF_HF, _OF_MEGATRON}}
        runs = measure(chosen, folder / "output", arguments.rounds)
    size = f"--layers {arguments.layers} --vocabulary {arguments.vocabulary}"
    flags = f"{size} --rounds {arguments.rounds} --slow-rounds {arguments.slow_rounds}"
    flags += f" --only {' '.join(arguments.only)}" * bool(arguments.only)
    report = render(chosen, runs, f"{nbytes / 1e9:.2f} GB", flags)
    print(report)
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(report)


def save_model(folder: Path, layers: int, vocabulary: int) -> int:
    """Write a Hugging Face folder of random bits in files of 2 GB. Returns the bytes of its tensors."""
    config = {**_CONFIG, "num_hidden_layers": layers, "vocab_size": vocabulary}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    wanted = {name: ("BF16", size) for name, size in hf_tensors(model_shape(config, "benchmark")).items()}
    plan = plan_safetensors(wanted, folder, 2_000_000_000)
    plan.create()
    generator = np.random.default_rng(0)
    for tensor in plan.tensors.values():
        with tensor.blocks[0].file.open("r+b") as file:
            file.seek(tensor.blocks[0].position)
            file.write(generator.bytes(tensor.nbytes))
    plan.complete()
    return sum(tensor.nbytes for tensor in plan.tensors.values())


def candidates(folder: Path, slow_rounds: int) -> dict[str, Candidate]:
    """The converter's commands, their baseline copies, and torch.distributed.checkpoint."""
    hf, megatron, output = folder / "hf", folder / "megatron", folder / "output"
    release = megatron / "release"
    synced = ["sh", "-c", 'cp -r "$0" "$1" && find "$1" -type f -exec sync {} +']
    return {
        _OF_HF: Candidate([*synced, hf, output]),
        "to-megatron": Candidate([*_TOOL, "to-megatron", hf, output], _OF_HF),
        "verify, HF against Megatron": Candidate([*_TOOL, "verify", hf, megatron], _OF_HF),
        _OF_MEGATRON: Candidate([*synced, megatron, output]),
        "to-hf": Candidate([*_TOOL, "to-hf", megatron, output], _OF_MEGATRON),
        "reshard --grid 4": Candidate([*_TOOL, "reshard", megatron, output, "--grid", "4"], _OF_MEGATRON),
        "cp -r of the HF folder": Candidate(["cp", "-r", hf, output], _OF_HF),
        "to-megatron through torch.distributed.checkpoint": Candidate(
            [*_ORACLE, "to-megatron", hf, output], _OF_HF, slow_rounds
        ),
        "to-hf through torch.distributed.checkpoint": Candidate(
            [*_ORACLE, "to-hf", hf, release, output], _OF_MEGATRON, slow_rounds
        ),
        "to-hf through megatron-core's load_plain_tensors": Candidate(
            [*_ORACLE, "to-hf-by-megatron", hf, release, output], _OF_MEGATRON, slow_rounds
        ),
        "torch's format_utils dcp_to_torch, names as they are": Candidate(
            dcp_to_torch(release, output), _OF_MEGATRON, slow_rounds
        ),
        "torch's format_utils torch_to_dcp, names as they are": Candidate(
            [*_FORMAT_UTILS.split(), "torch_to_dcp", folder / "torch/model.pt", output],
            _OF_MEGATRON,
            slow_rounds,
        ),
    }


def dcp_to_torch(release: Path, output: Path) -> list[object]:
    """Command with which torch converts a checkpoint to ``output/model.pt``."""
    return [
        "sh",
        "-c",
        f'mkdir "$1" && exec {_FORMAT_UTILS} dcp_to_torch "$0" "$1/model.pt"',
        release,
        output,
    ]


def measure(candidates: dict[str, Candidate], output: Path, rounds: int) -> dict[str, list[Run]]:
    """Runs by candidate, in turns, with the model in the page cache and an idle disk."""
    runs: dict[str, list[Run]] = {name: [] for name in candidates}
    for number in range(rounds):
        for name, candidate in candidates.items():
            if candidate.rounds is None or number < candidate.rounds:
                runs[name].append(run_process(candidate.command))
                shutil.rmtree(output, ignore_errors=True)
                os.sync()
    return {name: costs for name, costs in runs.items() if costs}


def run_process(command: Sequence[object]) -> Run:
    """Run a command to its end, discarding its output. Returns its cost; RuntimeError if it fails."""
    arguments = [str(argument) for argument in command]
    quiet = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
    start = time.perf_counter()
    child = os.posix_spawnp(arguments[0], arguments, os.environ, file_actions=quiet)
    peak_kib = 0
    while not (ended := os.wait4(child, os.WNOHANG))[0]:
        # Not from wait4, which includes the memory of the parent process.
        if peak := re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{child}/status").read_text()):
            peak_kib = max(peak_kib, int(peak[1]))
        time.sleep(0.01)
    wall = time.perf_counter() - start
    _, status, used = ended
    if os.waitstatus_to_exitcode(status) != 0:
        raise RuntimeError(f"{' '.join(arguments)} failed")
    return Run(wall, used.ru_utime + used.ru_stime, peak_kib / 1024)


def render(candidates: dict[str, Candidate], runs: dict[str, list[Run]], size: str, flags: str) -> str:
    """Result page: medians, and each candidate's ratio to the copy of its input in the same round."""
    rounds = max(map(len, runs.values()))
    lines = [
        "# Converting a checkpoint against copying it",
        "",
        f"Command: `python -m benchmarks.checkpoint_convert {flags}`",
        "",
        f"{platform.machine()} with {os.cpu_count()} cores. A model of {size} (the widths of",
        "R1-Distill-Qwen-1.5B, bfloat16, random bits), in the page cache. Medians of "
        f"{rounds} rounds in which the",
        "candidates take turns; *ratio* is the median over the rounds of the wall time over that of",
        "`cp -r` and fsync of the same input in the same round, its range in brackets. Ours end when all is",
        "on disk, too; `cp -r` alone does not. Processor time includes the start-up. `verify` reads",
        "both folders, writes nothing. torch's format_utils keep Megatron's names and make no Hugging Face",
        "folder. mbridge and Megatron-Bridge need CUDA: they do not run here.",
        f"Load at the end: {os.getloadavg()[0]:.0f} (of others).",
        "",
        "| candidate | wall, s | ratio | processor, s | peak memory, MiB |",
        "|---|---:|---:|---:|---:|",
        *(row(name, candidate, runs) for name, candidate in candidates.items() if name in runs),
    ]
    return "\n".join(lines) + "\n"


def row(name: str, candidate: Candidate, runs: dict[str, list[Run]]) -> str:
    """A candidate's table row."""
    costs, ratio = runs[name], ""
    if candidate.base is not None:
        pairs = zip(costs, runs[candidate.base], strict=False)
        ratios = [run.wall_s / copied.wall_s for run, copied in pairs]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    wall, cpu = (
        statistics.median(values) for values in zip(*((r.wall_s, r.cpu_s) for r in costs), strict=True)
    )
    peak = max(run.peak_mib for run in costs)
    return f"| {name} | {wall:.1f} | {ratio} | {cpu:.1f} | {peak:.0f} |"


if __name__ == "__main__":
    main()
