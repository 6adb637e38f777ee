"""Check of one GPU: kernels, parity with the CPU, IPC, offload, memory against the plan, speed.

    make gpu-check
    python -m benchmarks.gpu_check --device cpu   # the same program at tiny size, where there is no GPU

Ends with 0 if every check held, 1 if one did not, 2 where there is no GPU. Writes
benchmarks/results/gpu_check.md and .json (not at tiny size). docs/gpu.md says what each check means.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bapo_megatron.runtime.device import DEVICE_VARIABLE, gpu_problem, prepare_device
from benchmarks.common import RESULTS, one_process
from benchmarks.gpu import (
    engine_head,
    environment,
    handles,
    host_streams,
    kernel,
    layers,
    memory_and_speed,
    offload,
    output_layer,
    parity,
    phases,
    server,
)
from benchmarks.gpu.rows import Row, Size


@dataclass(frozen=True)
class Section:
    """One group of checks."""

    title: str
    run: Callable[[Size, Path], Iterator[Row]]
    budget_s: int
    """Seconds that it should take on an H100 at most; all together ten minutes."""


SECTIONS = (
    Section("Environment", environment.rows, 5),
    Section("Attention kernel against float64", kernel.rows, 15),
    Section("GPU against CPU", parity.rows, 80),
    Section("Layers", layers.rows, 10),
    Section("Output layer", output_layer.rows, 10),
    Section("Output layer against SGLang's formula", engine_head.rows, 10),
    Section("Offload and reload", offload.rows, 45),
    Section("Weights by handles to another process", handles.rows, 45),
    Section("Host optimizer against the device's", host_streams.rows, 40),
    Section("A colocated SGLang server", server.rows, 150),
    Section("Memory and speed of an update", memory_and_speed.rows, 120),
    Section("Memory by phase against the rehearsal", phases.rows, 70),  # of the policy that the former saves
)
HANGS_AFTER_S = 1200
"""Then the program prints where it stands and ends: a kernel that hangs cannot be ended otherwise."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny size, nothing written")
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        os.environ[DEVICE_VARIABLE] = "cpu"
    prepare_device()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(gpu_problem() or "no CUDA device", file=sys.stderr)
        print("--device cpu runs what needs none, at tiny size", file=sys.stderr)
        return 2
    tiny = options.quick or options.device == "cpu"
    size = Size.smallest(options.device) if tiny else Size(options.device)
    if options.device == "cuda":
        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
    found: dict[str, list[Row]] = {}
    with one_process(), tempfile.TemporaryDirectory() as folder:
        for section in SECTIONS:
            print(f"\n## {section.title}\n", flush=True)
            found[section.title] = []
            start = time.monotonic()
            for row in section.run(size, Path(folder)):
                found[section.title].append(row)
                print(row.line(), flush=True)
            took = Row("time", f"{time.monotonic() - start:.0f} s", "" if tiny else f"{section.budget_s} s")
            found[section.title].append(took)
            print(took.line(), flush=True)
    if not tiny:
        keep(found)
    failed = [row for rows in found.values() for row in rows if row.ok is False]
    print(f"\n{len(failed)} checks failed" if failed else "\nevery check held")
    return 1 if failed else 0


def keep(found: dict[str, list[Row]]) -> None:
    """Write the results."""
    records = {title: [dataclasses.asdict(row) for row in rows] for title, rows in found.items()}
    (RESULTS / "gpu_check.json").write_text(json.dumps(records, indent=1) + "\n")
    head = ["", "| | measured | limit | |", "|---|---|---|---|"]
    tables = [
        "\n".join([f"## {title}", *head, *(row.line() for row in rows)]) for title, rows in found.items()
    ]
    text = "\n\n".join(["# One GPU", "Command: `make gpu-check`", *tables])
    (RESULTS / "gpu_check.md").write_text(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
