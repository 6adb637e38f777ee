"""Check of one GPU: kernels, parity with the CPU, IPC, offload, memory against the plan, speed.

    make gpu-check
    python -m benchmarks.gpu_check --device cpu   # the same program at tiny size, without a GPU
    python -m benchmarks.gpu_check --only kernel speed --output /tmp/again    # some sections

A section that raises becomes a failed row, and the next one runs. Exit code: 0 if every check passed, 1 if
one failed, 2 without a GPU. Writes benchmarks/results/gpu_check.md and .json after every row (not at tiny
size). docs/gpu.md explains each check.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bapo_megatron.runtime.device import DEVICE_VARIABLE, gpu_problem, prepare_device

if __name__ == "__main__":
    # Before torch is imported: with flash-attn the import of Transformer Engine starts CUDA and its
    # allocator, which reads its settings once.
    prepare_device()

import torch

from bapo_megatron.policy.device import release_cached_memory
from benchmarks.common import RESULTS, one_process
from benchmarks.gpu import (
    delta_net,
    engine_head,
    environment,
    experts,
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
    """A group of checks."""

    title: str
    run: Callable[[Size, Path], Iterator[Row]]
    budget_s: int
    """Longest expected seconds on an H100; eleven minutes in all."""


SECTIONS = (
    Section("Gated DeltaNet against float64", delta_net.rows, 60),  # compiles and times some twenty kernels
    Section("Environment", environment.rows, 5),
    Section("Attention kernel against float64", kernel.rows, 15),
    Section("GPU against CPU", parity.rows, 80),
    Section("Layers", layers.rows, 10),
    Section("Experts", experts.rows, 40),  # compiles the permutations
    Section("Output layer", output_layer.rows, 10),
    Section("Output layer against SGLang's formula", engine_head.rows, 10),
    Section("Offload and reload", offload.rows, 45),
    Section("Weights by handles to another process", handles.rows, 45),
    Section("Host optimizer against the device's", host_streams.rows, 40),
    Section("A colocated SGLang server", server.rows, 140),
    Section("Memory and speed of an update", memory_and_speed.rows, 100),
    Section(
        "Memory by phase against the rehearsal", phases.rows, 60
    ),  # reuses the policy of the section before
)
Found = dict[str, list[Row]]
"""Rows by section title."""
Keep = Callable[[Found], None]
"""Writes the rows so far."""
HANGS_AFTER_S = 1200
"""Seconds after which the program prints its stacks and exits: nothing else ends a hung kernel."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny size, nothing written")
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="sections whose title has one of these words, e.g. kernel"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    sections = chosen(options.only)
    if not sections:
        parser.error(f"--only {' '.join(options.only)}: no title has it: {', '.join(titles())}")
    if options.device == "cpu":
        os.environ[DEVICE_VARIABLE] = "cpu"
    prepare_device()  # again, for --device cpu
    if options.device == "cuda" and not torch.cuda.is_available():
        print(gpu_problem() or "no CUDA device", file=sys.stderr)
        print("--device cpu runs what needs none, at tiny size", file=sys.stderr)
        return 2
    tiny = options.quick or options.device == "cpu"
    size = Size.smallest(options.device) if tiny else Size(options.device)
    if options.device == "cuda":
        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
    keeps: Keep = (lambda _: None) if tiny else partial(keep, options.output)
    with one_process(), tempfile.TemporaryDirectory() as folder:
        results = run_sections(sections, size, Path(folder), keeps)
        failed = [row for rows in results.values() for row in rows if row.ok is False]
        print(f"\n{len(failed)} checks failed" if failed else "\nevery check held", flush=True)
    return 1 if failed else 0


def chosen(words: Sequence[str] | None) -> list[Section]:
    """Sections whose title contains one of the words, ignoring case; None: all."""
    return [
        part
        for part in SECTIONS
        if words is None or any(word.lower() in part.title.lower() for word in words)
    ]


def titles() -> list[str]:
    return [section.title for section in SECTIONS]


def run_sections(sections: Sequence[Section], size: Size, folder: Path, keeps: Keep) -> Found:
    """Rows by section, printed and kept one by one: later sections may hang or end the process.

    An exception becomes the section's failed row, with its traceback on stderr, and the next section runs.
    """
    results: Found = {}
    for section in sections:
        print(f"\n## {section.title}\n", flush=True)
        results[section.title] = []
        start = time.monotonic()
        for row in rows_of(section, size, folder):
            results[section.title].append(row)
            print(row.line(), flush=True)
            keeps(results)
        budget = "" if size.tiny else f"{section.budget_s} s"
        took = Row("time", f"{time.monotonic() - start:.0f} s", budget)
        results[section.title].append(took)
        print(took.line(), flush=True)
        keeps(results)
    return results


def rows_of(section: Section, size: Size, folder: Path) -> Iterator[Row]:
    """The section's rows; an exception becomes a failed row."""
    try:
        gc.collect()  # policies of the last section are reference cycles
        release_cached_memory()
        yield from section.run(size, folder)
    except Exception as error:
        traceback.print_exc()
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        yield Row("the section", said[:300], "no exception", False)


def keep(folder: Path, results: Found) -> None:
    """Write the results so far to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    records = {title: [dataclasses.asdict(row) for row in rows] for title, rows in results.items()}
    (folder / "gpu_check.json").write_text(json.dumps(records, indent=1) + "\n")
    head = ["", "| | measured | limit | |", "|---|---|---|---|"]
    tables = [
        "\n".join([f"## {title}", *head, *(row.line() for row in rows)]) for title, rows in results.items()
    ]
    text = "\n\n".join(["# One GPU", "Command: `make gpu-check`", *tables])
    (folder / "gpu_check.md").write_text(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
