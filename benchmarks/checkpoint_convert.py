"""Converting checkpoints against copying them: wall time, processor time, memory.

    python -m benchmarks.checkpoint_convert [--folder FOLDER] [--rounds 5] [--layers 28]

Writes benchmarks/results/checkpoint_convert.md. FOLDER needs room for four times the model.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bapo_megatron.policy.hf_config import model_shape
from bapo_megatron.policy.hf_names import hf_tensors
from checkpoints_tools.safetensors_writer import Sharding, plan_safetensors

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


@dataclass(frozen=True)
class Run:
    """One process, or several in a row."""

    wall_s: float
    cpu_s: float
    peak_mib: float


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--oracle-rounds", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        nbytes = save_model(folder / "hf", arguments.layers)
        runs = measure(folder, arguments.rounds, arguments.oracle_rounds)
    report = render(runs, nbytes, arguments.rounds)
    print(report)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "checkpoint_convert.md").write_text(report)


def save_model(folder: Path, layers: int) -> int:
    """Random bits as a Hugging Face folder in files of 2 GB. Returns the bytes of its tensors."""
    config = {**_CONFIG, "num_hidden_layers": layers}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    wanted = {name: ("BF16", size) for name, size in hf_tensors(model_shape(config, "benchmark")).items()}
    plan = plan_safetensors(wanted, folder, Sharding(2_000_000_000))
    plan.create()
    generator = np.random.default_rng(0)
    for tensor in plan.tensors.values():
        with tensor.blocks[0].file.open("r+b") as file:
            file.seek(tensor.blocks[0].position)
            file.write(generator.bytes(tensor.nbytes))
    plan.complete()
    return sum(tensor.nbytes for tensor in plan.tensors.values())


def measure(folder: Path, rounds: int, oracle_rounds: int) -> dict[str, list[Run]]:
    """Each candidate in turn, round after round, with the model in the page cache and an idle disk."""
    hf, megatron, output = folder / "hf", folder / "megatron", folder / "output"
    run_process([*_TOOL, "to-megatron", hf, megatron])
    copy = ["cp", "-r"]
    synced = ["sh", "-c", 'cp -r "$0" "$1" && find "$1" -type f -exec sync {} +']
    candidates: dict[str, tuple[Sequence[object], int]] = {
        "cp -r of the HF folder": ([*copy, hf, output], rounds),
        "to-megatron": ([*_TOOL, "to-megatron", hf, output], rounds),
        "cp -r of the Megatron folder": ([*copy, megatron, output], rounds),
        "to-hf": ([*_TOOL, "to-hf", megatron, output], rounds),
        "cp -r of the HF folder, and fsync": ([*synced, hf, output], rounds),
        "to-megatron through torch.distributed.checkpoint": (
            [*_ORACLE, "to-megatron", hf, output],
            oracle_rounds,
        ),
        "to-hf through torch.distributed.checkpoint": (
            [*_ORACLE, "to-hf", hf, megatron / "release", output],
            oracle_rounds,
        ),
    }
    runs: dict[str, list[Run]] = {name: [] for name in candidates}
    for number in range(rounds):
        for name, (command, times) in candidates.items():
            if number < times:
                runs[name].append(run_process(command))
                shutil.rmtree(output)
                os.sync()
    return runs


def run_process(command: Sequence[object]) -> Run:
    """Run a command to its end, without its output."""
    arguments = [str(argument) for argument in command]
    quiet = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
    start = time.perf_counter()
    child = os.posix_spawnp(arguments[0], arguments, os.environ, file_actions=quiet)
    peak_kib = 0
    while not (found := os.wait4(child, os.WNOHANG))[0]:
        # Not from wait4, which counts the memory of the process that started this one.
        if held := re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{child}/status").read_text()):
            peak_kib = max(peak_kib, int(held[1]))
        time.sleep(0.01)
    wall = time.perf_counter() - start
    _, status, used = found
    if os.waitstatus_to_exitcode(status) != 0:
        raise RuntimeError(f"{' '.join(arguments)} failed")
    return Run(wall, used.ru_utime + used.ru_stime, peak_kib / 1024)


def render(runs: dict[str, list[Run]], nbytes: int, rounds: int) -> str:
    """Medians, and each candidate's ratio to the copy of what it reads, in the same round."""
    base = {
        "to-megatron": "cp -r of the HF folder",
        "to-hf": "cp -r of the Megatron folder",
        "cp -r of the HF folder, and fsync": "cp -r of the HF folder",
        "to-megatron through torch.distributed.checkpoint": "cp -r of the HF folder",
        "to-hf through torch.distributed.checkpoint": "cp -r of the Megatron folder",
    }

    def middle(found: list[Run], pick: Callable[[Run], float]) -> float:
        return statistics.median(pick(run) for run in found)

    lines = [
        "# Converting a checkpoint against copying it",
        "",
        "Command: `python -m benchmarks.checkpoint_convert`",
        "",
        f"{platform.machine()} with {os.cpu_count()} cores. A model of {nbytes / 1e9:.2f} GB (the shape of",
        "R1-Distill-Qwen-1.5B, bfloat16, random bits), in the page cache. Medians of "
        f"{rounds} rounds in which the",
        "candidates take turns; *ratio* is the median over the rounds of the wall time over that of `cp -r`",
        "of the same input in the same round, its range in brackets. Ours end when all is on disk (fsync);",
        "`cp -r` alone does not wait for the disk.",
        "",
        "| candidate | wall, s | ratio | processor, s | peak memory, MiB |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, found in runs.items():
        ratio = ""
        if name in base:
            pairs = zip(found, runs[base[name]], strict=False)
            ratios = [run.wall_s / copied.wall_s for run, copied in pairs]
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(
            f"| {name} | {middle(found, lambda r: r.wall_s):.1f} | {ratio} "
            f"| {middle(found, lambda r: r.cpu_s):.1f} | {max(run.peak_mib for run in found):.0f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
